"""Between Hugging Face tensors and the shards of one Megatron parameter, in both directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mrlhf.checkpoint.families import Kind, Weight
from mrlhf.errors import CheckpointError
from mrlhf.model_config import ModelConfig


@dataclass(frozen=True)
class TensorRanks:
    """A rank's place among the tensor ranks, and their number, of the dense layers and of the experts."""

    rank: int
    size: int
    expert_rank: int
    expert_size: int

    @classmethod
    def of(cls, groups: Any) -> TensorRanks:
        """From process groups ``tp`` and ``expt_tp``."""
        return cls(groups.tp.rank(), groups.tp.size(), groups.expt_tp.rank(), groups.expt_tp.size())

    def for_weight(self, weight: Weight) -> tuple[int, int]:
        """The place and the number that count for ``weight``."""
        return (self.rank, self.size) if weight.expert is None else (self.expert_rank, self.expert_size)


Read = Callable[[str, int, int, int | None], torch.Tensor]
"""``read(name, dim, start, stop)``: the part ``start:stop`` along ``dim`` of a Hugging Face tensor."""


def interleave_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Fuse ``q [G*r*d, ...]``, ``k`` and ``v [G*d, ...]`` into Megatron's ``[G*(r+2)*d, ...]``: per group q..q k v.

    Weights and biases alike (Megatron-Core's ``SelfAttention.get_query_key_value_tensors`` is the reader).
    """
    parts = [tensor.reshape(num_groups, -1, *tensor.shape[1:]) for tensor in (q, k, v)]
    return torch.cat(parts, dim=1).reshape(-1, *q.shape[1:])


def split_qkv(fused: torch.Tensor, num_groups: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The inverse of `interleave_qkv`; ``head_dim`` is the rows of one head."""
    grouped = fused.reshape(num_groups, -1, *fused.shape[1:])
    q, k, v = grouped.split([grouped.shape[1] - 2 * head_dim, head_dim, head_dim], dim=1)
    rest = fused.shape[1:]
    return q.reshape(-1, *rest), k.reshape(-1, *rest), v.reshape(-1, *rest)


def _range(size: int, tp_rank: int, tp_size: int, what: str) -> tuple[int, int]:
    if size % tp_size != 0:
        raise CheckpointError(f"{what}: {size} cannot be split over {tp_size} tensor ranks")
    part = size // tp_size
    return tp_rank * part, (tp_rank + 1) * part


def read_shard(weight: Weight, read: Read, config: ModelConfig, param: torch.Tensor, ranks: TensorRanks) -> None:
    """Fill ``param``, this rank's shard of ``weight``, in place; only this rank's part of each tensor is read."""
    first, shape = weight.sources[0], weight.shapes[0]
    tp_rank, tp_size = ranks.for_weight(weight)
    if weight.kind == "replicated":
        value = read(first, 0, 0, None)
    elif weight.kind == "vocab":
        # Megatron pads the vocabulary and splits the padded rows; padding rows are zero.
        rows = param.shape[0]
        start, stop = min(tp_rank * rows, shape[0]), min((tp_rank + 1) * rows, shape[0])
        param.zero_()
        if start < stop:
            param[: stop - start].copy_(read(first, 0, start, stop))
        return
    elif weight.kind in ("column", "row"):
        dim = 0 if weight.kind == "column" else 1
        value = read(first, dim, *_range(shape[dim], tp_rank, tp_size, first))
    elif weight.kind == "qkv":
        begin, end = _range(config.num_query_groups, tp_rank, tp_size, "num_key_value_heads")
        parts = []
        for name, (rows, *_) in zip(weight.sources, weight.shapes, strict=True):
            per_group = rows // config.num_query_groups
            parts.append(read(name, 0, begin * per_group, end * per_group))
        value = interleave_qkv(parts[0], parts[1], parts[2], end - begin)
    else:
        value = torch.cat(
            [
                read(name, 0, *_range(shape[0], tp_rank, tp_size, name))
                for name, shape in zip(weight.sources, weight.shapes, strict=True)
            ]
        )
    if value.shape != param.shape:
        raise CheckpointError(
            f"{weight.name}: the model's shard is {tuple(param.shape)}, the checkpoint's {tuple(value.shape)}"
        )
    param.copy_(value)


def join_shards(weight: Weight, shards: Sequence[torch.Tensor], config: ModelConfig) -> list[torch.Tensor]:
    """The Hugging Face tensors of ``weight`` (in the order of its sources) from the shards of all TP ranks."""
    kind: Kind = weight.kind
    if kind == "replicated":
        return [shards[0]]
    if kind == "vocab":
        return [torch.cat(list(shards))[: weight.shapes[0][0]]]
    if kind == "column":
        return [torch.cat(list(shards))]
    if kind == "row":
        return [torch.cat(list(shards), dim=1)]
    if kind == "qkv":
        return list(split_qkv(torch.cat(list(shards)), config.num_query_groups, config.head_dim))
    halves = [shard.chunk(2) for shard in shards]
    return [torch.cat([half[part] for half in halves]) for part in range(2)]
