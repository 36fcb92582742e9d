"""The actor: samples, gives log-probs, and is trained with the clipped policy loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from mrlhf.rl import entropy_loss, kl_loss, policy_loss, sampler_gap, truncated_weights
from mrlhf.roles.micro_batches import Plan
from mrlhf.roles.model import Gradients, LossFunction, TrainedModel, in_label_frame
from mrlhf.roles.policy import PolicyModel, logprob_request
from mrlhf.types import Metric, RolloutBatch


@dataclass(frozen=True)
class PolicyLossSettings:
    """``policy + kl_loss_coef * kl_loss - entropy_coef * entropy`` over one denominator; see `mrlhf.rl.losses`."""

    clip_eps: float = 0.2
    dual_clip: float | None = None
    importance_cap: float | None = None
    entropy_coef: float = 0.0
    log_entropy: bool = False
    kl_loss_coef: float = 0.0
    kl_loss_kind: Literal["k1", "k2", "k3", "abs"] = "k3"
    temperature: float = 1.0
    fixed_length: int | None = None
    """Tokens that each row counts for in the mean of the logged losses; None: those it has, by their weights."""
    on_policy: bool = False
    """The policy has made no step since it sampled, so that its log-probs are the old ones too: the ratio is 1."""

    @property
    def with_entropy(self) -> bool:
        """Whether the head has to compute the entropy."""
        return self.log_entropy or self.entropy_coef != 0


def actor_loss(settings: PolicyLossSettings) -> LossFunction:
    """The actor's loss of a micro-batch, as a sum over its tokens."""

    def loss(batch: RolloutBatch, output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Metric]]:
        """From a micro-batch and the head's output ``[(2,) b, S]``."""
        assert batch.advantages is not None
        assert batch.response_mask is not None
        frame = in_label_frame(output)
        logprobs, entropy = (frame[0], frame[1]) if settings.with_entropy else (frame, None)
        mask, weights = batch.response_mask, batch.row_weights
        old = logprobs.detach() if settings.on_policy else batch.old_logprobs
        assert old is not None
        terms = policy_loss(
            logprobs,
            old,
            batch.advantages,
            mask,
            clip_eps=settings.clip_eps,
            dual_clip=settings.dual_clip,
            row_weights=weights,
            importance_weights=_importance(old, batch.rollout_logprobs, mask, settings.importance_cap),
        )
        total, metrics = terms.loss_sum, dict(terms.metrics)
        if settings.on_policy and batch.rollout_logprobs is not None:
            metrics.update(sampler_gap(old, batch.rollout_logprobs, mask))
        count = terms.count if settings.fixed_length is None else float(batch.size * settings.fixed_length)
        metrics["policy_loss"] = Metric("mean", terms.loss_sum.detach(), count)
        if entropy is not None:
            bonus = entropy_loss(entropy, mask, row_weights=weights)
            metrics.update(bonus.metrics)
            total = total - settings.entropy_coef * bonus.loss_sum
        if settings.kl_loss_coef:
            assert batch.ref_logprobs is not None
            penalty = kl_loss(logprobs, batch.ref_logprobs, mask, kind=settings.kl_loss_kind, row_weights=weights)
            metrics.update(penalty.metrics)
            total = total + settings.kl_loss_coef * penalty.loss_sum
        metrics["loss"] = Metric("mean", total.detach().clone(), count)
        return total, metrics

    return loss


def _importance(
    old: torch.Tensor, sampled: torch.Tensor | None, mask: torch.Tensor, cap: float | None
) -> torch.Tensor | None:
    if cap is None:
        return None
    assert sampled is not None, "the sampler keeps its log-probs where weights are made of them"
    return truncated_weights(old, sampled, mask, cap)


class Actor(TrainedModel, PolicyModel):
    """The trained policy."""

    def policy_gradients(
        self,
        minibatch: RolloutBatch,
        plan: Plan,
        settings: PolicyLossSettings,
        denominator: float,
        *,
        packed: bool = False,
    ) -> Gradients:
        """Gradients of the policy's loss; see `TrainedModel.gradients`."""
        request = logprob_request(settings.temperature, with_entropy=settings.with_entropy)
        return self.gradients(minibatch, plan, actor_loss(settings), denominator, request, packed=packed)
