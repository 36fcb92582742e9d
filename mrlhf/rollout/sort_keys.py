"""Integers that sort as logits with their token ids do, so that equal logits have one order everywhere."""

from __future__ import annotations

import torch
from torch import Tensor

_LOWEST_KEY = torch.iinfo(torch.int64).min
_INT32_MAX = 0x7FFFFFFF


def order(x: Tensor) -> Tensor:
    """Map fp32 to int64 in [-2**31, 2**31), keeping the order and making -0.0 equal 0.0."""
    bits = (x + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & _INT32_MAX)).long()


def from_order(order: Tensor) -> Tensor:
    """The inverse of `order`."""
    bits = order.to(torch.int32)
    return (bits ^ ((bits >> 31) & _INT32_MAX)).view(torch.float32)


def _keys(x: Tensor, ids: Tensor) -> Tensor:
    """Sort keys: larger logit first, then lower id."""
    return (order(x) << 32) | (0xFFFFFFFF - ids)


def decode_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (-inf for the lowest key) and token ids."""
    values = from_order(keys >> 32)
    return torch.where(keys == _LOWEST_KEY, float("-inf"), values), 0xFFFFFFFF - (keys & 0xFFFFFFFF)


def best_keys(x: Tensor, start: int, count: int) -> Tensor:
    """Keys of this shard's ``count`` best columns ``[N, count]`` in any order, padded with the lowest key."""
    width = min(count, x.shape[1])
    out = torch.full((x.shape[0], count), _LOWEST_KEY, dtype=torch.int64, device=x.device)
    if width:
        values, index = x.topk(width, sorted=False)
        out[:, :width] = _keys(values, index + start)
        # topk may take any of the columns that tie at its edge: those rows are done again on unique keys.
        edge = values.amin(1, keepdim=True)
        tied = ((x == edge).sum(1) > (values == edge).sum(1)).nonzero().squeeze(1)
        if tied.numel():
            ids = torch.arange(start, start + x.shape[1], device=x.device)
            out[tied, :width] = _keys(x[tied], ids).topk(width, sorted=False).values
    return out
