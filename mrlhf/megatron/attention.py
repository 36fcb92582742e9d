"""Attention of the local layer spec, and the hook through which generation keeps keys and values.

`SDPAttention` is the core attention for machines without Transformer Engine: torch's fused kernel, no score matrix, no
mask tensor. `CachedSelfAttention` is Megatron's self-attention that, when a `CacheContext` comes along, reads and
writes a key-value cache; without one it is Megatron's own, unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from megatron.core.inference.contexts.base_context import BaseInferenceContext
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig

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


class LayerCache(Protocol):
    """What the attention needs of a key-value cache: the tensors of one layer."""

    def layer(self, layer_number: int) -> torch.Tensor:
        """Keys and values of a layer (global, from 1), ``[2, slots, kv_heads / TP, length, head_dim]``, contiguous."""


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one sequence in a pass.

    Attributes:
        start: place of its first token among the tokens of the pass.
        end: place after the last.
        slot: of the sequence.
        position: of the first token in its sequence; the tokens before it are in the cache already.
    """

    start: int
    end: int
    slot: int
    position: int

    @property
    def length(self) -> int:
        """Tokens."""
        return self.end - self.start


class CacheContext(BaseInferenceContext):
    """One pass of the actor over packed tokens that extend sequences in a key-value cache.

    The ``T`` tokens of all sequences lie one after the other in the sequence dimension of a batch of one, so that no
    padding is computed and sequence parallelism can split them. The first ``steps`` tokens extend one sequence each;
    the others are segments: prompts, or pieces of them.
    """

    def __init__(
        self,
        cache: LayerCache,
        slots: torch.Tensor,
        positions: torch.Tensor,
        *,
        max_sequence_length: int,
        steps: int,
        segments: Sequence[Segment],
        longest: int,
        first_slot: int | None = None,
    ) -> None:
        """Describe the pass.

        Args:
            cache: the cache of this stage's layers.
            slots: ``[T]`` int64, the slot of each token's sequence.
            positions: ``[T]`` int64, its position there.
            max_sequence_length: length of the rotary table; positions are below it.
            steps: tokens at the beginning that are alone in their sequences.
            segments: what the tokens after them are, in order, without gaps.
            longest: tokens of the longest sequence among the first ``steps``, the new one included.
            first_slot: of those, where they are in slots that follow each other (the cache is then read in place).
        """
        super().__init__(materialize_only_last_token_logits=False)
        self.cache = cache
        self.slots = slots
        self.positions = positions
        self.max_sequence_length = max_sequence_length
        self.steps = steps
        self.segments = segments
        self.longest = longest
        self.first_slot = first_slot
        self.rotary: tuple[torch.Tensor, torch.Tensor] | None = None
        """Cosines and sines of the positions, kept by the first layer for the others."""
        self._rows: torch.Tensor | None = None
        self._reach: torch.Tensor | None = None
        self._reach_of_heads: torch.Tensor | None = None
        self._masks: dict[tuple[int, int], torch.Tensor] = {}

    def is_static_batching(self) -> bool:
        """Always; Megatron's dynamic batching needs flash-attention."""
        return True

    def is_decode_only(self) -> bool:
        """Never; Megatron's own decode path is not used."""
        return False

    def rows(self, cache: torch.Tensor) -> torch.Tensor:
        """Where keys and values go in a layer's cache seen as ``[2 * slots * kv_heads * length, head_dim]``.

        ``[T * kv_heads * 2]`` int64; the values of all slots lie behind the keys of all slots.
        """
        if self._rows is None:
            slots, heads, length = cache.shape[1:4]
            first = self.slots * (heads * length) + self.positions
            head, value = (torch.arange(n, device=first.device) for n in (heads, 2))
            offsets = head[:, None] * length + value * (slots * heads * length)
            self._rows = (first[:, None, None] + offsets).flatten()
        return self._rows

    def reach(self, dtype: torch.dtype) -> torch.Tensor:
        """What is added to the scores of the first ``steps`` tokens: ``[steps, 1, 1, longest]``, 0 or -inf."""
        if self._reach is None:
            places = torch.arange(self.longest, device=self.positions.device)
            hidden = places[None, :] > self.positions[: self.steps, None]
            zeros = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._reach = zeros.masked_fill_(hidden, float("-inf"))[:, None, None, :]
        return self._reach

    def reach_of_heads(self, dtype: torch.dtype, heads: int) -> torch.Tensor:
        """`reach` for every key head by itself: ``[steps * heads, 1, longest]``."""
        if self._reach_of_heads is None:
            reach = self.reach(dtype).view(self.steps, 1, self.longest)
            self._reach_of_heads = reach.repeat_interleave(heads, 0)
        return self._reach_of_heads

    def mask(self, segment: Segment) -> torch.Tensor:
        """Which keys a segment in the middle of its sequence sees: bool ``[length, position + length]``."""
        key = (segment.position, segment.length)
        if key not in self._masks:
            total = segment.position + segment.length
            ones = torch.ones(segment.length, total, dtype=torch.bool, device=self.positions.device)
            self._masks[key] = ones.tril_(segment.position)
        return self._masks[key]


def cached_attention(
    query: torch.Tensor, entries: torch.Tensor, context: CacheContext, layer_number: int, scale: float | None
) -> torch.Tensor:
    """Put keys and values into the cache and attend to what each token's sequence has there.

    Args:
        query: ``[T, kv_heads / TP, queries of a key head, head_dim]`` after the rotary embedding.
        entries: ``[T, kv_heads / TP, 2, head_dim]``, the keys after the rotary embedding, and the values.
        context: the pass.
        layer_number: global, from 1.
        scale: of the scores; None for ``head_dim ** -0.5``.

    Returns:
        ``[T, heads / TP * head_dim]``.
    """
    cache = context.cache.layer(layer_number)
    size = cache.size(-1)
    cache.view(-1, size).index_copy_(0, context.rows(cache), entries.reshape(-1, size).to(cache.dtype))
    parts = []
    if context.steps:
        parts.append(_step(query[: context.steps], cache, context, scale))
    for run in _alike(context.segments):
        parts.append(_prompts(query, entries, run, cache, context, scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _step(query: torch.Tensor, cache: torch.Tensor, context: CacheContext, scale: float | None) -> torch.Tensor:
    """One token per slot against its cached keys.

    The query heads of a group stand as query positions of their one key head, so that neither keys nor values are
    repeated.
    """
    first, count = context.first_slot, context.steps
    if first is not None and cache.dtype is torch.float32 and cache.device.type == "cpu":
        return _products(query, cache, first, context, scale)
    slots: Any = context.slots[:count] if first is None else slice(first, first + count)
    k, v = cache[0][slots, :, : context.longest], cache[1][slots, :, : context.longest]
    out = attention(query.to(k.dtype), k, v, mask=context.reach(k.dtype), scale=scale)
    return out.reshape(count, -1).to(query.dtype)


def _products(
    query: torch.Tensor, cache: torch.Tensor, first: int, context: CacheContext, scale: float | None
) -> torch.Tensor:
    """The same as two batched products: on a CPU faster than the fused kernel, which is made for many queries."""
    heads, size = cache.size(2), cache.size(-1)
    flat = cache.view(2, -1, cache.size(3), size)[:, first * heads : (first + context.steps) * heads, : context.longest]
    k, v = flat.unbind(0)
    q = query.to(k.dtype).reshape(k.size(0), -1, size)
    scores = torch.baddbmm(
        context.reach_of_heads(k.dtype, heads), q, k.transpose(1, 2), alpha=size**-0.5 if scale is None else scale
    )
    return torch.bmm(torch.softmax(scores, -1), v).view(context.steps, -1).to(query.dtype)


def _alike(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Whole prompts of one length that follow each other are one call; every other segment is alone."""
    runs: list[list[Segment]] = []
    for segment in segments:
        last = runs[-1][-1] if runs else None
        alike = last is not None and last.position == segment.position == 0 and last.length == segment.length
        if alike:
            runs[-1].append(segment)
        else:
            runs.append([segment])
    return runs


def _prompts(
    query: torch.Tensor,
    entries: torch.Tensor,
    run: list[Segment],
    cache: torch.Tensor,
    context: CacheContext,
    scale: float | None,
) -> torch.Tensor:
    """Causal attention inside every segment of ``run``, and to what its sequence has in the cache before it."""
    start, count, length = run[0].start, len(run), run[0].length
    q = query[start : start + count * length].unflatten(0, (count, length)).flatten(2, 3).transpose(1, 2)
    if run[0].position == 0:
        new = entries[start : start + count * length].unflatten(0, (count, length)).transpose(1, 2)
        k, v = new.unbind(3)
        out = attention(q, k, v, scale=scale)
    else:
        slot, end = run[0].slot, run[0].position + length
        k, v = cache[:, slot : slot + 1, :, :end].to(q.dtype)
        out = attention(q, k, v, mask=context.mask(run[0]), scale=scale)
    return out.transpose(1, 2).reshape(count * length, -1)


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
