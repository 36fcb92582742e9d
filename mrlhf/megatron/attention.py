"""Attention of the local layer spec, and the hook through which generation keeps keys and values.

`SDPAttention` is the core attention for machines without Transformer Engine: torch's fused kernel, no score matrix, no
mask tensor. `CachedSelfAttention` is Megatron's self-attention that, when a `CacheContext` comes along, reads and
writes a key-value cache; without one it is Megatron's own, unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig

from mrlhf.megatron.cached_attention import cached_attention
from mrlhf.megatron.context import gather_keys, hidden_keys, part_of_rank
from mrlhf.megatron.cpu_products import attention


class SDPAttention(torch.nn.Module):
    """Causal attention by ``torch.nn.functional.scaled_dot_product_attention``, grouped queries included.

    Takes the arguments of Megatron's ``DotProductAttention`` and stands in its place in a layer spec.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any = None,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        self.cp_group = pg_collection.cp if config.context_parallel_size > 1 else None
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        # Under sequence parallelism all of a layer already draws from the tensor rank's own random numbers; forked
        # once more, a recomputed layer would begin with other ones.
        self.forks_rng = not config.sequence_parallel
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Attend causally (in packed rows to the own document only), or as the mask says.

        Under context parallelism ``s`` is this rank's part of the rows (`mrlhf.megatron.context`).

        Args:
            query: ``[s, b, heads / TP, head_dim]``; packed ``[t, heads / TP, head_dim]``.
            key: ``[s, b, kv_heads / TP, head_dim]``; packed ``[t, kv_heads / TP, head_dim]``.
            value: like ``key``.
            attention_mask: None, or bool ``[b, 1, s, s]`` with True where a query does not see a key, the causal order
                included (`padded_causal_mask`). None is enough wherever results on padding are not used: rows are
                right-padded, so the causal order hides the padding from the tokens before it.
            attn_mask_type: not used.
            attention_bias: must be None.
            packed_seq_params: Megatron's ``thd`` parameters of packed rows, or None.

        Returns:
            ``[s, b, heads / TP * head_dim]``; packed ``[t, heads / TP * head_dim]``.

        Raises:
            ValueError: a bias, packed rows with a mask, a packed format other than ``thd``, or packed rows or a mask
                under context parallelism.
        """
        if attention_bias is not None:
            raise ValueError("SDPAttention takes no attention bias")
        packed = packed_seq_params
        if packed is not None and (packed.qkv_format != "thd" or attention_mask is not None):
            raise ValueError("SDPAttention takes packed rows as thd and without a mask")
        if self.cp_group is not None:
            if packed is not None or attention_mask is not None:
                raise ValueError("SDPAttention takes neither packed rows nor a mask under context parallelism")
            attention_mask = hidden_keys(query.size(0), self.cp_group, query.device)[None, None]
            key, value = gather_keys(key, self.cp_group), gather_keys(value, self.cp_group)
        dropout = self.dropout if self.training else 0.0
        with get_cuda_rng_tracker().fork() if dropout > 0 and self.forks_rng else nullcontext():
            return self._forward(query, key, value, dropout, attention_mask, packed)

    def _forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout: float,
        hidden: torch.Tensor | None,
        packed: Any,
    ) -> torch.Tensor:
        if packed is None:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            s, b = query.shape[:2]
            return self._attend(q, k, v, dropout, hidden).permute(2, 0, 1, 3).reshape(s, b, -1)
        # One call for each document: what other documents hold is never looked at, and no mask is needed.
        sizes = [end - start for start, end in _segments(packed)]
        parts = []
        for document in zip(*(x.split(sizes) for x in (query, key, value)), strict=True):
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in document)
            parts.append(self._attend(q, k, v, dropout, None).squeeze(0).transpose(0, 1))
        return torch.cat(parts).reshape(query.size(0), -1)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float, hidden: torch.Tensor | None
    ) -> torch.Tensor:
        return attention(q, k, v, mask=None if hidden is None else ~hidden, dropout=dropout, scale=self.softmax_scale)


def padded_causal_mask(lengths: torch.Tensor, width: int) -> torch.Tensor:
    """Causal order without the padding among the keys, for results on the padding itself.

    A query on the padding then sees the real tokens alone, as under a Hugging Face ``attention_mask`` of 0. Takes
    ``b * width^2`` bytes.

    Args:
        lengths: ``[b]``, keys of each row that exist, at least 1.
        width: slots per row.

    Returns:
        bool ``[b, 1, width, width]``, True where query (third dimension) does not see key (fourth), as Megatron has it.
    """
    slots = torch.arange(width, device=lengths.device)
    later = slots[None, :] > slots[:, None]
    return (later[None] | (slots >= lengths.unsqueeze(1))[:, None, :]).unsqueeze(1)


def _segments(packed: Any) -> Sequence[tuple[int, int]]:
    """``(start, end)`` of every document."""
    known: Sequence[tuple[int, int]] = getattr(packed, "segments", ())
    return known or list(pairwise(packed.cu_seqlens_q.tolist()))


class CachedSelfAttention(SelfAttention):
    """Megatron's self-attention with a key-value cache for generation."""

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        """As Megatron's; with ``inference_context`` a `CacheContext`, ``hidden_states`` is ``[T (/ TP), 1, h]``."""
        context = kwargs.get("inference_context")
        if context is None:
            if self.pg_collection.cp.size() > 1:
                kwargs["rotary_pos_emb"] = self._own_part(kwargs.get("rotary_pos_emb"))
            return super().forward(hidden_states, attention_mask, **kwargs)
        query, key, value = self.get_query_key_value_tensors(hidden_states, None)[:3]
        rotary = kwargs.get("rotary_pos_emb")
        if rotary is not None:
            table = rotary[0] if isinstance(rotary, tuple) else rotary
            table = table[context.positions]
            query = apply_rotary_pos_emb(query, table, config=self.config, cp_group=self.pg_collection.cp)
            key = apply_rotary_pos_emb(key, table, config=self.config, cp_group=self.pg_collection.cp)
        query = query.squeeze(1).unflatten(1, (key.size(2), -1))
        entries = torch.stack((key.squeeze(1), value.squeeze(1)), dim=2)
        out = cached_attention(query, entries, context, self.layer_number, self.config.softmax_scale)
        return self.linear_proj(out.unsqueeze(1))

    def _own_part(self, rotary: Any) -> Any:
        """The rotary table of this rank's slots, from that of whole rows."""
        if rotary is None or isinstance(rotary, tuple):
            return rotary and tuple(self._own_part(table) for table in rotary)
        cp = self.pg_collection.cp
        return rotary[part_of_rank(rotary.size(0), cp.rank(), cp.size(), rotary.device)]
