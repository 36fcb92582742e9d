"""From sampled rows to advantages: masks, inference passes, shaped rewards, the estimators of advantages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from mrlhf.parallel.collectives import Group, all_reduce_moments
from mrlhf.rl import (
    Estimator,
    Semantics,
    gae,
    group_advantages,
    masked_moments,
    masked_sum,
    response_masks,
    returns_to_go,
    shape_rewards,
    whiten,
)
from mrlhf.roles.critic import Critic
from mrlhf.roles.micro_batches import Cut
from mrlhf.roles.policy import PolicyModel
from mrlhf.types import RolloutBatch, gather_rows


@dataclass(frozen=True)
class ShapingSettings:
    """The numbers of reward shaping and of the estimator; see `mrlhf.rl`."""

    semantics: Semantics = "standard"
    estimator: Estimator = "gae"
    grpo_normalize_std: bool = True
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


def add_masks(batch: RolloutBatch, semantics: Semantics, response_width: int | None = None) -> RolloutBatch:
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
    batch: RolloutBatch,
    cut: Cut,
    *,
    actor: PolicyModel | None,
    reference: PolicyModel | None,
    critic: Critic | None,
    temperature: float,
) -> RolloutBatch:
    """Set ``old_logprobs``, ``ref_logprobs`` and ``values``: what the models that are given say before any update."""
    return batch.replace(
        old_logprobs=actor.logprobs(batch, cut, temperature=temperature) if actor is not None else None,
        ref_logprobs=reference.logprobs(batch, cut, temperature=temperature) if reference is not None else None,
        values=critic.values(batch, cut) if critic is not None else None,
    )


def logprobs_before_updates(batch: RolloutBatch) -> torch.Tensor | None:
    """``[B, S-1]`` of the policy that sampled: ``old_logprobs``, or the sampler's own where these were not computed.

    Both are at the temperature of sampling, under the whole distribution. None where neither is known.
    """
    return batch.old_logprobs if batch.old_logprobs is not None else batch.rollout_logprobs


def penalized_scores(batch: RolloutBatch, settings: ShapingSettings) -> torch.Tensor:
    """``[B]``: scores less the missing-EOS penalty, before the clip."""
    assert batch.scores is not None
    if not settings.missing_eos_penalty:
        return batch.scores
    return torch.where(batch.truncated, batch.scores - settings.missing_eos_penalty, batch.scores)


def score_clip_fraction(batch: RolloutBatch, settings: ShapingSettings) -> float:
    """Share of the rows whose score the clip changes."""
    if settings.score_clip is None or not batch.size:
        return 0.0
    return float((penalized_scores(batch, settings).abs() > settings.score_clip).double().mean())


def add_advantages(batch: RolloutBatch, settings: ShapingSettings, dp_group: Group) -> RolloutBatch:
    """Set ``rewards``, ``kl``, ``advantages`` and, with GAE, ``returns`` from scores, log-probs and values.

    Order: missing-EOS penalty, clip and shaping, reward whitening (mean kept), the estimator, advantage whitening.
    Whitening is over the rows of all ranks; every rank of ``dp_group`` calls this together. The responses to one
    prompt are all among this rank's rows.

    - ``gae``: `mrlhf.rl.gae`.
    - ``grpo``, ``rloo``: a response's shaped rewards are added up to what it earned, which `group_advantages` compares
      within its group; all its tokens have that advantage.
    - ``reinforce_plus_plus``: shaped rewards from each token on, always whitened.

    ``kl`` stays None where the log-probs of policy or reference are not known, which needs ``kl_coef`` 0.
    """
    assert batch.gae_mask is not None
    assert batch.response_mask is not None
    logprobs, ref_logprobs = logprobs_before_updates(batch), batch.ref_logprobs
    known = logprobs is not None and ref_logprobs is not None
    if logprobs is None or ref_logprobs is None:
        assert not settings.kl_coef, "there are no log-probs for the KL in the reward"
        logprobs = ref_logprobs = torch.zeros(batch.gae_mask.shape, device=batch.gae_mask.device)
    rewards, kl = shape_rewards(
        penalized_scores(batch, settings),
        logprobs,
        ref_logprobs,
        batch.gae_mask,
        kl_coef=settings.kl_coef,
        score_clip=settings.score_clip,
        kl_kind=settings.kl_kind,
    )
    if settings.whiten_rewards:
        rewards = whiten_over_ranks(rewards, batch.gae_mask, dp_group, shift_mean=False)
    returns = None
    if settings.estimator == "gae":
        advantages, returns = _gae(batch, rewards, settings)
    elif settings.estimator == "reinforce_plus_plus":
        advantages = returns_to_go(rewards, batch.gae_mask, gamma=settings.gamma)
    else:
        earned = masked_sum(rewards, batch.gae_mask, dim=1)
        each = group_advantages(earned, batch.group_ids, settings.estimator, normalize_std=settings.grpo_normalize_std)
        advantages = torch.where(batch.response_mask, each.unsqueeze(1), torch.zeros_like(rewards))
    if settings.whiten_advantages or settings.estimator == "reinforce_plus_plus":
        advantages = whiten_over_ranks(advantages, batch.response_mask, dp_group, shift_mean=True)
    return batch.replace(rewards=rewards, kl=kl if known else None, advantages=advantages, returns=returns)


def _gae(batch: RolloutBatch, rewards: torch.Tensor, settings: ShapingSettings) -> tuple[torch.Tensor, torch.Tensor]:
    assert batch.values is not None
    assert batch.gae_mask is not None
    bootstrap = None
    if settings.bootstrap_truncated:
        after_last = gather_rows(batch.values, batch.lengths - 1)
        bootstrap = torch.where(batch.truncated, after_last, torch.zeros_like(after_last))
    return gae(
        rewards,
        batch.values,
        batch.gae_mask,
        gamma=settings.gamma,
        gae_lambda=settings.gae_lambda,
        bootstrap_values=bootstrap,
    )


def whiten_over_ranks(x: torch.Tensor, mask: torch.Tensor, group: Group, *, shift_mean: bool) -> torch.Tensor:
    """Whiten with the population moments of all ranks; a rank without rows takes part."""
    count, mean, m2 = all_reduce_moments(*masked_moments(x, mask), group)
    return whiten(x, mask, mean, m2 / count.clamp(min=1), shift_mean=shift_mean)
