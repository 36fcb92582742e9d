"""Per-token estimates of the KL divergence between the policy and a reference."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from mrlhf.rl.masked import compute_dtype

KLKind = Literal["k1", "k2", "k3", "abs"]

LOG_RATIO_LIMIT = 20.0
"""Bound of every exponent taken here: exp(20) = 4.85e8 is finite in fp32 and fp64, exp(89) is not in fp32."""


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: KLKind) -> Tensor:
    """Estimate KL(policy || reference) from one sampled token per position (Schulman, "Approximating KL divergence").

    With ``d = logprobs - ref_logprobs``:

    - ``k1``: ``d``, unbiased, of either sign;
    - ``k2``: ``d^2 / 2``;
    - ``k3``: ``exp(-d) - 1 + d``, unbiased and never negative; ``-d`` is bounded above by 20;
    - ``abs``: ``|d|``.

    Args:
        logprobs: log-probabilities of the policy, any shape.
        ref_logprobs: those of the reference, same shape.
        kind: see above.

    Returns:
        same shape, a new tensor in at least fp32; differentiable in both inputs.

    Raises:
        ValueError: for another ``kind``.
    """
    dtype = compute_dtype(torch.promote_types(logprobs.dtype, ref_logprobs.dtype))
    difference = logprobs.to(dtype) - ref_logprobs.to(dtype)
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference.square()
    if kind == "k3":
        # Only the upper side can overflow. Both terms take the bounded value, else the gradient there turns its sign.
        bounded = torch.clamp(-difference, max=LOG_RATIO_LIMIT)
        return torch.expm1(bounded) - bounded
    if kind == "abs":
        return difference.abs()
    raise ValueError(f"kl kind must be one of {', '.join(get_args(KLKind))}, not {kind!r}")
