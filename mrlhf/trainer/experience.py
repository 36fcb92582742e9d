"""From sampled rows to advantages: masks, inference passes, shaped rewards, GAE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from mrlhf.parallel.collectives import Group, all_reduce_moments
from mrlhf.rl import Semantics, gae, masked_moments, response_masks, shape_rewards, whiten
from mrlhf.roles.critic import Critic
from mrlhf.roles.micro_batches import Plan
from mrlhf.roles.policy import PolicyModel
from mrlhf.types import RolloutBatch, gather_rows


@dataclass(frozen=True)
class ShapingSettings:
    """The numbers of reward shaping and GAE; see `mrlhf.rl`."""

    semantics: Semantics = "standard"
    kl_coef: float = 0.1
    kl_kind: Literal["k1", "k2", "k3", "abs"] = "k1"
    score_clip: float | None = 5.0
    gamma: float = 1.0
    gae_lambda: float = 0.95
    whiten_rewards: bool = False
    whiten_advantages: bool = False
    bootstrap_truncated: bool = False
    missing_eos_penalty: float | None = None
    temperature: float = 1.0


def add_masks(batch: RolloutBatch, semantics: Semantics, response_width: int) -> RolloutBatch:
    """Set ``response_mask`` and ``gae_mask``; ``response_width`` as in `mrlhf.rl.response_masks`."""
    response_mask, gae_mask = response_masks(
        batch.prompt_lengths,
        batch.response_lengths,
        width=batch.width - 1,
        semantics=semantics,
        response_width=response_width,
    )
    return batch.replace(response_mask=response_mask, gae_mask=gae_mask)


def add_inference(
    batch: RolloutBatch, plan: Plan, *, actor: PolicyModel, reference: PolicyModel, critic: Critic, temperature: float
) -> RolloutBatch:
    """Set ``old_logprobs``, ``ref_logprobs`` and ``values``: what the models say before any update."""
    return batch.replace(
        old_logprobs=actor.logprobs(batch, plan, temperature=temperature),
        ref_logprobs=reference.logprobs(batch, plan, temperature=temperature),
        values=critic.values(batch, plan),
    )


def add_advantages(batch: RolloutBatch, settings: ShapingSettings, dp_group: Group) -> RolloutBatch:
    """Set ``rewards``, ``kl``, ``advantages`` and ``returns`` from scores, log-probs and values.

    Order: missing-EOS penalty, clip and shaping, reward whitening (mean kept), GAE, advantage whitening. Whitening is
    over the rows of all ranks; every rank of ``dp_group`` calls this together.
    """
    assert batch.scores is not None
    assert batch.old_logprobs is not None
    assert batch.ref_logprobs is not None
    assert batch.values is not None
    assert batch.gae_mask is not None
    assert batch.response_mask is not None
    scores = batch.scores
    if settings.missing_eos_penalty:
        scores = torch.where(batch.truncated, scores - settings.missing_eos_penalty, scores)
    rewards, kl = shape_rewards(
        scores,
        batch.old_logprobs,
        batch.ref_logprobs,
        batch.gae_mask,
        kl_coef=settings.kl_coef,
        score_clip=settings.score_clip,
        kl_kind=settings.kl_kind,
    )
    if settings.whiten_rewards:
        rewards = whiten_over_ranks(rewards, batch.gae_mask, dp_group, shift_mean=False)
    bootstrap = None
    if settings.bootstrap_truncated:
        after_last = gather_rows(batch.values, batch.lengths - 1)
        bootstrap = torch.where(batch.truncated, after_last, torch.zeros_like(after_last))
    advantages, returns = gae(
        rewards,
        batch.values,
        batch.gae_mask,
        gamma=settings.gamma,
        gae_lambda=settings.gae_lambda,
        bootstrap_values=bootstrap,
    )
    if settings.whiten_advantages:
        advantages = whiten_over_ranks(advantages, batch.response_mask, dp_group, shift_mean=True)
    return batch.replace(rewards=rewards, kl=kl, advantages=advantages, returns=returns)


def whiten_over_ranks(x: torch.Tensor, mask: torch.Tensor, group: Group, *, shift_mean: bool) -> torch.Tensor:
    """Whiten with the population moments of all ranks; a rank without rows takes part."""
    count, mean, m2 = all_reduce_moments(*masked_moments(x, mask), group)
    return whiten(x, mask, mean, m2 / count.clamp(min=1), shift_mean=shift_mean)
