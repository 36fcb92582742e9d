"""Generalised advantage estimation by a blocked scan."""

from __future__ import annotations

import torch
from torch import Tensor

from mrlhf.rl.masked import compute_dtype, select
from mrlhf.rl.rewards import last_true

BLOCK = 32
"""Positions handled by one triangular matrix: large enough for a real matrix product, small enough to be cheap."""


def discounted_suffix_sum(x: Tensor, decay: float, block: int = BLOCK) -> Tensor:
    """``y[:, t] = sum over s >= t of decay^(s - t) * x[:, s]`` without a loop over time.

    Within a block this is a product with the triangular matrix of powers of ``decay``. What enters a block from the
    right is the same sum over the block heads with ``decay^block``: one more scan, ``block`` times shorter.

    Args:
        x: ``[B, W]`` floating point.
        decay: factor per position, normally in ``[0, 1]``.
        block: positions per block, at least 2.

    Returns:
        ``[B, W]``, same dtype.
    """
    rows, width = x.shape
    size = min(block, width)
    if width == 0:
        return x.clone()
    exponent = torch.arange(size, device=x.device)
    exponent = exponent.unsqueeze(1) - exponent.unsqueeze(0)
    base = torch.tensor(decay, dtype=x.dtype, device=x.device)
    # powers[s, t] = decay^(s - t) for s >= t
    powers = torch.where(exponent >= 0, base ** exponent.clamp(min=0), torch.zeros_like(base))
    if width <= block:
        return x @ powers
    blocks = -(-width // block)
    padded = torch.nn.functional.pad(x, (0, blocks * block - width))
    local = (padded.view(-1, block) @ powers).view(rows, blocks, block)
    heads = discounted_suffix_sum(local[:, :, 0], decay**block, block)
    carry = torch.nn.functional.pad(heads[:, 1:], (0, 1)).unsqueeze(2)
    distance = block - torch.arange(block, device=x.device)
    return local.addcmul_(carry, base**distance).view(rows, -1)[:, :width]


def gae(
    rewards: Tensor,
    values: Tensor,
    gae_mask: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (Schulman et al. 2016, eq. 16), backwards over each response.

    ``delta_t = reward_t + gamma V_{t+1} - V_t``, ``A_t = delta_t + gamma lambda A_{t+1}``, ``R_t = A_t + V_t``.
    The sums are taken in fp64, so a row's result hardly depends on where its blocks begin, nor on TF32 settings.

    Args:
        rewards: ``[B, W]``.
        values: ``[B, W]``.
        gae_mask: bool ``[B, W]``, contiguous in every row (possibly empty); what lies outside is not read.
        gamma: discount.
        gae_lambda: GAE's lambda.
        bootstrap_values: ``[B]``, V after the last True of each row; 0 where not given. Put 0 on rows that ended.

    Returns:
        ``(advantages, returns)``, ``[B, W]`` in at least fp32, 0 outside the mask. fp64 in gives fp64 out.
    """
    dtype = compute_dtype(torch.promote_types(rewards.dtype, values.dtype))
    outside = ~gae_mask
    reward = select(rewards, gae_mask).double()
    value = select(values, gae_mask).double()
    next_value = torch.nn.functional.pad(value[:, 1:], (0, 1))
    if bootstrap_values is not None:
        next_value = torch.where(last_true(gae_mask), bootstrap_values.double().unsqueeze(1), next_value)
    # In place where a tensor is ours alone: these passes over memory are all there is to pay for.
    delta = next_value.mul_(gamma).add_(reward).sub_(value).masked_fill_(outside, 0.0)
    advantages = discounted_suffix_sum(delta, gamma * gae_lambda).masked_fill_(outside, 0.0)
    return advantages.to(dtype), value.add_(advantages).to(dtype)
