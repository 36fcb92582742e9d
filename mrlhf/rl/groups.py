"""Advantages without a critic: from the returns of a group of responses, or from the tokens that follow."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from mrlhf.rl.advantages import discounted_suffix_sum
from mrlhf.rl.masked import compute_dtype, select

Estimator = Literal["gae", "grpo", "rloo", "reinforce_plus_plus"]
Aggregation = Literal["token", "sequence", "fixed_length"]
GroupEstimator = Literal["grpo", "rloo"]
STD_EPS = 1e-6
"""Added to the standard deviation of a group, so that equal returns give advantages of 0 and not 0 / 0."""


def group_advantages(
    returns: Tensor, group_ids: Tensor, estimator: GroupEstimator, *, normalize_std: bool = True
) -> Tensor:
    """One advantage for each response, against the other responses to the same prompt.

    - ``grpo``: ``(R_i - mean(R)) / (std(R) + 1e-6)`` over the group (Shao et al. 2024, section 4.1.2), with the sample
      standard deviation (divisor N - 1), as TRL and verl take it. ``normalize_std=False`` leaves the division out
      (Dr. GRPO, Liu et al. 2025, section 3.2).
    - ``rloo``: ``R_i - mean of the others`` (Ahmadian et al. 2024, section 3.2), an unbiased baseline; it is
      ``N / (N - 1)`` times ``R_i - mean(R)``.

    Args:
        returns: ``[B]``, what each response earned.
        group_ids: ``[B]`` int, equal for the responses to one prompt, in any order.
        estimator: see above.
        normalize_std: only for ``grpo``.

    Returns:
        ``[B]`` in at least fp32.

    Raises:
        ValueError: an unknown estimator, or a group of one response, which has nothing to be compared with.
    """
    if estimator not in get_args(GroupEstimator):
        raise ValueError(f"estimator must be one of {', '.join(get_args(GroupEstimator))}, not {estimator!r}")
    dtype = compute_dtype(returns.dtype)
    if not returns.numel():
        return returns.to(dtype)
    _, group = torch.unique(group_ids, return_inverse=True)
    value = returns.double()
    groups = int(group.max()) + 1

    def per_group(x: Tensor) -> Tensor:
        """Sums ``[groups]`` of one number per response ``[B]``."""
        return torch.zeros(groups, dtype=torch.float64, device=x.device).index_add_(0, group, x)

    count = per_group(torch.ones_like(value))
    if float(count.min()) < 2:
        alone = group_ids[count[group] < 2].tolist()
        raise ValueError(f"{estimator} compares responses to the same prompt; group(s) {alone[:8]} have only one")
    deviation = value - (per_group(value) / count)[group]
    if estimator == "rloo":
        advantage = deviation * (count / (count - 1))[group]
    elif normalize_std:
        std = (per_group(deviation.square()) / (count - 1)).sqrt()
        advantage = deviation / (std[group] + STD_EPS)
    else:
        advantage = deviation
    return advantage.to(dtype)


def returns_to_go(rewards: Tensor, gae_mask: Tensor, *, gamma: float) -> Tensor:
    """``sum over s >= t of gamma^(s - t) * reward_s`` within each response: REINFORCE's return of every token.

    REINFORCE++ (Hu 2025, eq. 3) takes it of the shaped rewards and whitens it over the whole batch.

    Args:
        rewards: ``[B, W]``.
        gae_mask: bool ``[B, W]``, contiguous in every row; what lies outside is not read.
        gamma: discount.

    Returns:
        ``[B, W]`` in at least fp32, 0 outside the mask.
    """
    dtype = compute_dtype(rewards.dtype)
    total = discounted_suffix_sum(select(rewards, gae_mask).double(), gamma)
    return select(total, gae_mask).to(dtype)


def sequence_row_weights(response_mask: Tensor) -> tuple[Tensor, float]:
    """Weights under which a sum over tokens, divided by the number that comes with them, is a mean over sequences.

    ``sum over rows (1 / tokens of the row * sum of the row's token losses) / rows``: every response counts the same
    whatever its length (the loss of Shao et al. 2024, eq. 3). Rows without a token take no part.

    Args:
        response_mask: bool ``[B, W]`` of the whole minibatch, over all ranks.

    Returns:
        ``[B]`` fp64, and the number of rows that have a token.
    """
    tokens = response_mask.sum(dim=1).double()
    weights = torch.where(tokens > 0, 1.0 / tokens.clamp(min=1), torch.zeros_like(tokens))
    return weights, float((tokens > 0).sum())
