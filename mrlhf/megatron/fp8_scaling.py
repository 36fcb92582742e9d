"""FP8 values in ordinary tensors: formats, scales and rounding, by the rules of NVIDIA's Transformer Engine.

A tensor ``x`` is kept as ``q = fp8(x * scale)`` with one fp32 scale, and ``q / scale`` stands for it. Formats and their
largest values are those of Micikevicius et al. 2022 (arXiv:2209.05433): e4m3 448, e5m2 57344. As in Transformer
Engine's ``recipe_common.cuh`` and ``delayed_scaling.cu``, a scale is ``largest / amax`` and not rounded to a power of
two, values beyond the largest saturate, infinities too, and NaN stays NaN.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
AmaxAlgorithm = Literal["max", "most_recent"]
_LARGEST_FP32 = torch.finfo(torch.float32).max


def largest(dtype: torch.dtype) -> float:
    """The largest finite value of an FP8 format: 448 or 57344."""
    return torch.finfo(dtype).max


def amax_of(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude in ``x`` as an fp32 scalar; NaN is passed over, as ``fmaxf`` does, and nothing gives 0."""
    if not x.numel():
        return torch.zeros((), device=x.device)
    return x.detach().abs().nan_to_num(nan=0.0, posinf=torch.inf).amax().float()


def current_scale(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scale that takes ``amax`` to the format's largest value; 1 where ``amax`` is 0 or infinite.

    An ``amax`` so small that the scale is not an fp32 number gets the largest one.
    """
    scale = _divided(largest(dtype), amax)
    return torch.where((amax > 0) & torch.isfinite(amax), scale, torch.ones_like(scale))


def _divided(top: float, amax: torch.Tensor) -> torch.Tensor:
    """``top / amax`` rounded once, at most the largest fp32 number."""
    # torch takes a number over a tensor for the number times the reciprocal, which is rounded twice.
    return (torch.full_like(amax, top) / amax).clamp(max=_LARGEST_FP32)


def quantize(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x * scale`` in an FP8 ``dtype``, to the nearest (ties to even), saturating."""
    # torch's own cast gives NaN (e4m3) or infinity (e5m2) beyond the largest value.
    return (x.float() * scale).clamp(-largest(dtype), largest(dtype)).to(dtype)


def dequantize(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What ``q`` stands for, in fp32."""
    return q.float() * scale.reciprocal()


def product(a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
    """``a @ b`` of two FP8 matrices, accumulated in fp32 and unscaled afterwards, as the tensor cores do."""
    # FP8 values are exact in fp32, and so is the product of any two.
    return (a.float() @ b.float()) * a_scale.reciprocal() * b_scale.reciprocal()


class DelayedScales(torch.nn.Module):
    """Scales of some tensors for their next use, from the largest values of uses before.

    The first scale is 1. ``history[0]`` collects the largest values since the last `update`; the rows after it hold
    those of earlier updates, the newest last. Buffers are not part of the model's state dict: like Transformer
    Engine's they are no weights, and each rank has its own (see `scaling_state`).
    """

    history: torch.Tensor
    scale: torch.Tensor

    def __init__(
        self, tensors: int, dtype: torch.dtype, *, history_len: int, algorithm: AmaxAlgorithm, margin: int
    ) -> None:
        """Scales of ``tensors`` tensors of FP8 ``dtype``; ``margin`` halves the range that often."""
        super().__init__()
        self.algorithm = algorithm
        self.scaled_max = largest(dtype) * 2.0**-margin
        self.register_buffer("history", torch.zeros(history_len, tensors), persistent=False)
        self.register_buffer("scale", torch.ones(tensors), persistent=False)

    @torch.no_grad()
    def record(self, amaxes: torch.Tensor) -> None:
        """Take note of the largest values ``[tensors]`` of a use."""
        self.history[0] = torch.maximum(self.history[0], amaxes)

    @torch.no_grad()
    def update(self, groups: Sequence[dist.ProcessGroup] = ()) -> None:
        """Compute the next scales from what was recorded on all ranks of ``groups``, which call this together.

        A tensor whose largest value is 0, infinite or NaN keeps its scale; 0 does not enter its history either.
        """
        for group in groups:
            if group.size() > 1:
                dist.all_reduce(self.history[0], op=dist.ReduceOp.MAX, group=group)
        newest = self.history[0].clone()
        amax = newest if self.algorithm == "most_recent" else self.history.amax(dim=0)
        seen = newest != 0
        usable = seen & torch.isfinite(amax)
        scale = _divided(self.scaled_max, amax)
        self.scale.copy_(torch.where(usable, scale, self.scale))
        rolled = self.history.roll(-1, dims=0)
        rolled[0] = 0.0
        self.history.copy_(torch.where(seen, rolled, self.history))


class UsedScales:
    """Scales of the first pass of recomputed layers, for the second pass to use the same ones, first in first out."""

    def __init__(self) -> None:
        """None yet."""
        self._waiting: deque[torch.Tensor] = deque()

    def keep(self, scale: torch.Tensor) -> None:
        """A copy for the second pass."""
        self._waiting.append(scale.clone())

    def take(self) -> torch.Tensor | None:
        """The oldest, which is forgotten; None where no second pass is due."""
        return self._waiting.popleft() if self._waiting else None
