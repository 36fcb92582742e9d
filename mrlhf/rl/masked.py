"""Sums, means and moments over the True positions of a mask.

Positions outside a mask may hold NaN or inf. Every function selects with ``torch.where``: a multiplication by the
mask would turn ``0 * inf`` into NaN, in the value or in the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a quantity stored as ``dtype`` is worked on: at least fp32, fp64 stays."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else torch.float32


def select(x: Tensor, mask: Tensor) -> Tensor:
    """``x`` in its compute dtype where ``mask`` is True, 0 elsewhere; the gradient elsewhere is exactly 0."""
    x = x.to(compute_dtype(x.dtype))
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def masked_sum(x: Tensor, mask: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Sum of ``x`` over the True positions of ``mask``.

    Args:
        x: any shape; fp16 and bf16 are added up in fp32.
        mask: bool, broadcastable to ``x``.
        dim: dimension(s) to reduce; all by default.

    Returns:
        the sum; an empty mask gives 0 and stays connected to the graph of ``x``.
    """
    selected = select(x, mask)
    return selected.sum() if dim is None else selected.sum(dim=dim)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``x`` over the True positions of ``mask``; 0 with a connected graph where there are none."""
    count = mask.expand(x.shape).sum().clamp(min=1)
    return masked_sum(x, mask) / count


def masked_moments(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and sum of squared deviations of the selected values: what whitening needs from one rank.

    `mrlhf.parallel.collectives.all_reduce_moments` combines those of several ranks. The second pass over the
    data avoids the cancellation of ``E[x^2] - E[x]^2``.

    Args:
        x: any shape.
        mask: bool, broadcastable to ``x``.

    Returns:
        ``(count, mean, m2)``, fp64 scalars without gradient; all 0 for an empty mask.
    """
    with torch.no_grad():
        mask = mask.expand(x.shape)
        selected = select(x, mask).double()
        count = mask.sum().double()
        mean = selected.sum() / count.clamp(min=1)
        deviation = torch.where(mask, selected - mean, torch.zeros_like(selected))
        return count, mean, deviation.square().sum()


def whiten(
    x: Tensor, mask: Tensor, mean: Tensor | float, var: Tensor | float, eps: float = 1e-8, shift_mean: bool = True
) -> Tensor:
    """Scale the selected values to unit variance, and to mean 0 unless ``shift_mean`` is False.

    Args:
        x: any shape.
        mask: bool, broadcastable to ``x``.
        mean: mean over everything that is whitened together (all ranks).
        var: population variance over the same values (``m2 / count``).
        eps: added to the variance, so that a single value gives a finite number.
        shift_mean: False keeps the mean (rewards), True removes it (advantages).

    Returns:
        like ``x`` in its compute dtype, 0 outside the mask.
    """
    dtype = compute_dtype(x.dtype)
    mean = torch.as_tensor(mean, dtype=torch.float64, device=x.device)
    var = torch.as_tensor(var, dtype=torch.float64, device=x.device)
    result = (select(x, mask).double() - mean) * torch.rsqrt(var + eps)
    if not shift_mean:
        result = result + mean
    return torch.where(mask, result, torch.zeros_like(result)).to(dtype)
