"""Language modelling beside PPO's updates (PPO-ptx; Ouyang et al. 2022, section 3.5)."""

from __future__ import annotations

import torch

from mrlhf.data.sft import SFTExample, sft_batch
from mrlhf.data.stream import ExampleStream
from mrlhf.parallel.layout import data_parallel_slice
from mrlhf.roles.actor import Actor
from mrlhf.roles.language_model import learned_request, nll_loss
from mrlhf.roles.micro_batches import make_plan
from mrlhf.roles.model import LossFunction, Update
from mrlhf.types import Metric, RolloutBatch


def ptx_loss(unsup_coef: float) -> LossFunction:
    """``unsup_coef`` times the negative log-likelihood of the learned tokens; metrics are without the factor."""

    def loss(batch: RolloutBatch, output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Metric]]:
        """From a micro-batch and the head's output."""
        total, metrics = nll_loss(batch, output)
        return unsup_coef * total, metrics

    return loss


class PTX:
    """A step on texts with the actor's own optimizer, DeepSpeed-Chat's ``train_unsupervised``."""

    def __init__(
        self,
        actor: Actor,
        stream: ExampleStream[SFTExample],
        *,
        unsup_coef: float,
        micro_batch_size: int,
        micro_batch_tokens: int | None,
        packing: bool = False,
        pad_id: int,
        pad_to_multiple: int,
        device: torch.device,
    ) -> None:
        """Keep the settings.

        Args:
            actor: is trained.
            stream: global batches, the same on every rank.
            unsup_coef: weight of the loss.
            micro_batch_size: rows of one pass on one rank.
            micro_batch_tokens: tokens of one pass, padding included, instead of rows.
            packing: rows of a pass are laid one after the other without padding.
            pad_id: fills rows.
            pad_to_multiple: row widths are multiples of it.
            device: where batches live.
        """
        self.actor = actor
        self.stream = stream
        self.unsup_coef = unsup_coef
        self.micro_batch_size = micro_batch_size
        self.micro_batch_tokens = micro_batch_tokens
        self.packing = packing
        self.pad_id = pad_id
        self.pad_to_multiple = pad_to_multiple
        self.device = device

    def step(self) -> Update:
        """One optimizer step on the next batch: ``unsup_coef`` times the mean loss of its tokens over all ranks."""
        first = self.stream.position
        batch = sft_batch(
            next(self.stream), pad_id=self.pad_id, pad_to_multiple=self.pad_to_multiple, first_id=first
        ).to(self.device)
        assert batch.response_mask is not None
        denominator = float(batch.response_mask.sum())
        groups = self.actor.groups
        mine = batch.select(data_parallel_slice(batch.size, groups.dp.rank(), groups.dp.size()))
        plan = make_plan(
            mine,
            rows=self.micro_batch_size,
            tokens=self.micro_batch_tokens,
            multiple=self.actor.micro_batch_multiple,
            packed=self.packing,
        )
        loss = ptx_loss(self.unsup_coef)
        return self.actor.update(mine, plan, loss, denominator, learned_request, packed=self.packing)
