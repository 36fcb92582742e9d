"""The critic: predicts the return of every token."""

from __future__ import annotations

import torch

from mrlhf.rl import value_loss
from mrlhf.roles.micro_batches import Cut, Plan
from mrlhf.roles.model import Gradients, LossFunction, TrainedModel, in_label_frame
from mrlhf.types import Metric, RolloutBatch


def critic_loss(value_clip: float | None, fixed_length: int | None = None) -> LossFunction:
    """The critic's loss of a micro-batch, as a sum over its response tokens; ``fixed_length`` as for the actor."""

    def loss(batch: RolloutBatch, output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Metric]]:
        """From a micro-batch and the value head's output ``[b, S]``."""
        assert batch.values is not None
        assert batch.returns is not None
        assert batch.response_mask is not None
        terms = value_loss(
            in_label_frame(output),
            batch.values,
            batch.returns,
            batch.response_mask,
            value_clip=value_clip,
            row_weights=batch.row_weights,
        )
        count = terms.count if fixed_length is None else float(batch.size * fixed_length)
        return terms.loss_sum, {**terms.metrics, "loss": Metric("mean", terms.loss_sum.detach().clone(), count)}

    return loss


class Critic(TrainedModel):
    """The trained value model."""

    def values(self, batch: RolloutBatch, cut: Cut) -> torch.Tensor:
        """``V(tokens[:t+1])`` for every slot but the last: ``[B, S-1]`` fp32 on every rank."""
        return self.inferred(batch, cut)

    def value_gradients(
        self,
        minibatch: RolloutBatch,
        plan: Plan,
        value_clip: float | None,
        denominator: float,
        fixed_length: int | None = None,
        *,
        packed: bool = False,
    ) -> Gradients:
        """Gradients of the value loss; see `TrainedModel.gradients`."""
        return self.gradients(minibatch, plan, critic_loss(value_clip, fixed_length), denominator, packed=packed)
