"""PPO's losses as sums with their counts."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mrlhf.rl.kl import LOG_RATIO_LIMIT, KLKind, kl_estimate
from mrlhf.rl.masked import select
from mrlhf.types import Metric


@dataclass
class LossTerms:
    """One loss over some rows, ready to be added up over micro-batches and ranks.

    ``loss_sum`` is a differentiable scalar: the sum over tokens (or pairs), not a mean. ``count`` is what the sum is
    divided by after everything is added up: the number of tokens or pairs; with ``row_weights`` the sum of
    ``row_weight * tokens``, which is 1 over a whole minibatch for the weights of `ds_group_row_weights`, so the trainer
    uses the denominator 1 there. ``metrics`` carry their own sums and counts and have no gradient.
    """

    loss_sum: Tensor
    count: Tensor
    metrics: dict[str, Metric] = field(default_factory=dict)


class _Tokens:
    """The tokens that take part in a loss, and how they are added up."""

    def __init__(self, mask: Tensor, row_weights: Tensor | None, dtype: torch.dtype):
        self.weights = None
        if row_weights is not None:
            # A row of weight 0 must not bring in its NaN as 0 * NaN.
            mask = mask & (row_weights != 0).unsqueeze(1)
            self.weights = row_weights.to(dtype).unsqueeze(1)
        self.mask = mask
        self.count = self.total(torch.ones((), dtype=dtype, device=mask.device).expand(mask.shape)).detach()

    def total(self, x: Tensor) -> Tensor:
        """Weighted sum over the tokens that take part."""
        x = select(x, self.mask)
        return (x if self.weights is None else x * self.weights).sum()

    def mean(self, x: Tensor) -> Metric:
        """A metric with the sum and the count of the tokens that take part."""
        return Metric("mean", self.total(x.detach().to(self.count.dtype)), self.count)

    def max(self, x: Tensor) -> Metric:
        """A metric with the largest value."""
        return Metric("max", _extreme(x.detach(), self.mask, largest=True), self.count)

    def min(self, x: Tensor) -> Metric:
        """A metric with the smallest value."""
        return Metric("min", _extreme(x.detach(), self.mask, largest=False), self.count)


def _extreme(x: Tensor, mask: Tensor, *, largest: bool) -> Tensor:
    neutral = torch.full((1,), -torch.inf if largest else torch.inf, dtype=x.dtype, device=x.device)
    selected = torch.cat([torch.where(mask, x, neutral).flatten(), neutral])
    return selected.amax() if largest else selected.amin()


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_eps: float,
    dual_clip: float | None = None,
    row_weights: Tensor | None = None,
    importance_weights: Tensor | None = None,
) -> LossTerms:
    """PPO's clipped surrogate, ``max(-A r, -A clamp(r, 1 - eps, 1 + eps))`` (Schulman et al. 2017, eq. 7), summed.

    ``r = exp(clamp(logprobs - old_logprobs, -20, 20))``. With ``dual_clip = c > 1`` the loss of a token with ``A < 0``
    is at most ``-c A`` (Ye et al. 2020, eq. 5).

    Args:
        logprobs: ``[B, W]`` of the policy that is trained.
        old_logprobs: ``[B, W]`` of the policy that sampled.
        advantages: ``[B, W]``.
        response_mask: bool ``[B, W]``; what lies outside is not read and gets a gradient of exactly 0.
        clip_eps: clipping range of the ratio.
        dual_clip: see above; off by default.
        row_weights: ``[B]``, see `LossTerms`.
        importance_weights: ``[B, W]`` without gradient, factors of the tokens' losses (`truncated_weights`); they do
            not enter the count.

    Returns:
        terms with metrics ``ratio_mean``, ``ratio_max``, ``ratio_min``, ``clip_fraction`` (tokens whose clipped branch
        decided), ``approx_kl_k1`` and ``approx_kl_k3`` (of old to new), and ``dual_clip_fraction`` where it is on.

    Raises:
        ValueError: ``dual_clip`` not above 1.
    """
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be above 1, not {dual_clip}")
    logprob = select(logprobs, response_mask)
    tokens = _Tokens(response_mask, row_weights, logprob.dtype)
    log_ratio = select(logprob - select(old_logprobs, response_mask), tokens.mask)
    log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    advantage = select(advantages, tokens.mask)
    unclipped = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - clip_eps, 1 + clip_eps)
    loss = torch.maximum(unclipped, clipped)
    metrics = {
        "ratio_mean": tokens.mean(ratio),
        "ratio_max": tokens.max(ratio),
        "ratio_min": tokens.min(ratio),
        "clip_fraction": tokens.mean(clipped > unclipped),
        "approx_kl_k1": tokens.mean(-log_ratio),
        "approx_kl_k3": tokens.mean(ratio - 1 - log_ratio),
    }
    if dual_clip is not None:
        bound = -advantage * dual_clip
        bounded = (advantage < 0) & (loss > bound)
        metrics["dual_clip_fraction"] = tokens.mean(bounded)
        loss = torch.where(bounded, bound, loss)
    if importance_weights is not None:
        weights = select(importance_weights, tokens.mask)
        metrics["importance_weight_mean"] = tokens.mean(weights)
        loss = loss * weights
    return LossTerms(tokens.total(loss), tokens.count, metrics)


def truncated_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor, cap: float) -> Tensor:
    """``min(exp(old - rollout), cap)``: truncated importance sampling (Ionides 2008), token by token.

    Corrects for a sampler whose numbers are not those of the training passes (other kernels, FP8, 16 bits): the tokens
    were drawn from ``exp(rollout)``, while the policy's gradient is one under ``exp(old)``.

    Args:
        old_logprobs: ``[B, W]`` of the training passes before any update.
        rollout_logprobs: ``[B, W]`` of the sampler.
        response_mask: bool ``[B, W]``; what lies outside is not read and has weight 0.
        cap: largest weight, above 0.
    """
    log_ratio = select(old_logprobs, response_mask) - select(rollout_logprobs, response_mask)
    weights = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=cap)
    return select(weights, response_mask)


GAP = 0.1
"""A gap of log-probs that counts as large: the token's probability is off by a tenth."""


def sampler_gap(old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor) -> dict[str, Metric]:
    """How far the sampler's log-probs are from those of the training passes, before any update.

    Args:
        old_logprobs: ``[B, W]`` of the training passes.
        rollout_logprobs: ``[B, W]`` of the sampler.
        response_mask: bool ``[B, W]``; what lies outside is not read.

    Returns:
        ``rollout_logprob_gap_mean``, ``rollout_logprob_gap_max`` and ``rollout_logprob_gap_share``, the share of
        tokens where it is over `GAP`.
    """
    gap = (select(old_logprobs, response_mask) - select(rollout_logprobs, response_mask)).abs()
    tokens = _Tokens(response_mask, None, gap.dtype)
    return {
        "rollout_logprob_gap_mean": tokens.mean(gap),
        "rollout_logprob_gap_max": tokens.max(gap),
        "rollout_logprob_gap_share": tokens.mean(gap > GAP),
    }


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    *,
    value_clip: float | None,
    row_weights: Tensor | None = None,
) -> LossTerms:
    """``0.5 max((V - R)^2, (clamp(V, V_old - c, V_old + c) - R)^2)``, summed (OpenAI baselines' ppo2, DeepSpeed-Chat).

    Args:
        values: ``[B, W]`` of the critic that is trained.
        old_values: ``[B, W]`` at the time of the rollout.
        returns: ``[B, W]``.
        response_mask: bool ``[B, W]``; what lies outside is not read and gets a gradient of exactly 0.
        value_clip: ``c``; None turns the clipping off.
        row_weights: ``[B]``, see `LossTerms`.

    Returns:
        terms with metrics ``value_clip_fraction``, ``value_mean``, ``value_max``, ``value_min``, ``return_mean`` and
        ``value_error`` (mean of ``(V - R)^2``).
    """
    value = select(values, response_mask)
    tokens = _Tokens(response_mask, row_weights, value.dtype)
    value = select(value, tokens.mask)
    target = select(returns, tokens.mask)
    old = select(old_values, tokens.mask)
    error = (value - target).square()
    loss = error
    clipped_error = error
    if value_clip is not None:
        clipped_error = (torch.clamp(value, old - value_clip, old + value_clip) - target).square()
        loss = torch.maximum(error, clipped_error)
    metrics = {
        "value_clip_fraction": tokens.mean(clipped_error > error),
        "value_mean": tokens.mean(value),
        "value_max": tokens.max(value),
        "value_min": tokens.min(value),
        "return_mean": tokens.mean(target),
        "value_error": tokens.mean(error),
    }
    return LossTerms(tokens.total(0.5 * loss), tokens.count, metrics)


def entropy_loss(entropy: Tensor, response_mask: Tensor, *, row_weights: Tensor | None = None) -> LossTerms:
    """Sum of the policy's entropy over response tokens. The sign is the entropy's own: the trainer subtracts it.

    Args:
        entropy: ``[B, W]``.
        response_mask: bool ``[B, W]``.
        row_weights: ``[B]``, see `LossTerms`.

    Returns:
        terms with the metric ``entropy``.
    """
    selected = select(entropy, response_mask)
    tokens = _Tokens(response_mask, row_weights, selected.dtype)
    return LossTerms(tokens.total(selected), tokens.count, {"entropy": tokens.mean(selected)})


def kl_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    response_mask: Tensor,
    *,
    kind: KLKind,
    row_weights: Tensor | None = None,
) -> LossTerms:
    """Sum over response tokens of the KL estimate to the reference, as a loss (Shao et al. 2024, eq. 4, with ``k3``).

    Args:
        logprobs: ``[B, W]`` of the policy that is trained.
        ref_logprobs: ``[B, W]`` of the reference.
        response_mask: bool ``[B, W]``.
        kind: see `mrlhf.rl.kl.kl_estimate`.
        row_weights: ``[B]``, see `LossTerms`.

    Returns:
        terms with the metric ``kl_loss``.
    """
    logprob = select(logprobs, response_mask)
    tokens = _Tokens(response_mask, row_weights, logprob.dtype)
    kl = kl_estimate(select(logprob, tokens.mask), select(ref_logprobs, tokens.mask), kind)
    return LossTerms(tokens.total(kl), tokens.count, {"kl_loss": tokens.mean(kl)})


def ds_group_row_weights(response_mask: Tensor, group_size: int, valid_rows: Tensor | None = None) -> Tensor:
    """Row weights under which a plain sum over tokens is DeepSpeed-Chat's loss of one minibatch.

    DeepSpeed-Chat takes the mean over the tokens of every group of rows (what one rank trains on at once) and averages
    the groups. With the weights ``1 / (tokens of the row's group * number of groups)``,

        ``sum over rows (row_weight * sum of the row's token losses) == mean over groups (token mean of the group)``

    so the denominator of the whole minibatch is 1, however rows are split over micro-batches and ranks. The weights
    must therefore be computed from **all** rows of the minibatch (over all data-parallel ranks, in minibatch order).

    DeepSpeed-Chat drops rows that are not valid before it trains. So they have no part in the token mean of their
    group, and a group without any valid token does not exist: it is left out of the mean over groups.

    Args:
        response_mask: bool ``[B, W]`` of the minibatch, or the response tokens per row as an integer tensor ``[B]``.
        group_size: consecutive rows per group; the last group may be shorter.
        valid_rows: bool ``[B]``; rows that are False get weight 0. All rows are valid by default.

    Returns:
        ``[B]`` fp64; all 0 when no row has a valid token.

    Raises:
        ValueError: ``group_size`` below 1.
    """
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, not {group_size}")
    tokens = (response_mask if response_mask.dim() == 1 else response_mask.sum(dim=1)).double()
    if valid_rows is not None:
        tokens = torch.where(valid_rows, tokens, torch.zeros_like(tokens))
    group = torch.arange(tokens.shape[0], device=tokens.device) // group_size
    groups = -(-tokens.shape[0] // group_size)
    group_tokens = torch.zeros(groups, dtype=torch.float64, device=tokens.device).index_add_(0, group, tokens)
    live = (group_tokens > 0).sum().clamp(min=1)
    weight = 1.0 / (group_tokens[group].clamp(min=1) * live)
    return torch.where(tokens > 0, weight, torch.zeros_like(weight))
