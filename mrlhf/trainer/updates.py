"""The updates of one iteration: several passes over the rows in minibatches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mrlhf.errors import MrlhfError
from mrlhf.megatron.optimizer import MIN_LOSS_SCALE
from mrlhf.metrics import MetricAccumulator
from mrlhf.parallel.layout import data_parallel_slice
from mrlhf.rl import Semantics, ds_group_row_weights
from mrlhf.roles.actor import Actor, PolicyLossSettings
from mrlhf.roles.critic import Critic
from mrlhf.roles.micro_batches import make_plan
from mrlhf.roles.model import Update
from mrlhf.types import Metric, RolloutBatch


@dataclass(frozen=True)
class UpdateSettings:
    """How the rows of an iteration are turned into optimizer steps."""

    policy: PolicyLossSettings
    semantics: Semantics = "standard"
    epochs: int = 1
    minibatch_size: int = 1
    micro_batch_size: int = 1
    micro_batch_tokens: int | None = None
    shuffle: bool = True
    value_clip: float = 0.2
    ds_group_size: int = 1
    max_bad_steps: int = 10
    seed: int = 0


def minibatch_rows(
    count: int, size: int, *, shuffle: bool, seed: int, iteration: int, epoch: int
) -> Iterator[list[int]]:
    """Row numbers of each minibatch of a pass; the order depends on seed, iteration and epoch alone."""
    order = list(range(count))
    if shuffle:
        mixed = hashlib.sha256(f"minibatches {seed} {iteration} {epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(mixed[:8], "little") >> 1)
        order = torch.randperm(count, generator=generator).tolist()
    for start in range(0, count, size):
        yield order[start : start + size]


def prepare_minibatch(
    batch: RolloutBatch, rows: list[int], settings: UpdateSettings, *, dp_rank: int, dp_size: int
) -> tuple[RolloutBatch, float]:
    """This rank's rows of a minibatch, and the denominator of the whole of it.

    ``standard`` divides by the response tokens of the minibatch; ``deepspeed_chat`` weights rows (over the whole
    minibatch, so that ranks and micro-batches do not matter) and divides by 1.
    """
    minibatch = batch.select(rows)
    mask = minibatch.response_mask
    assert mask is not None
    if settings.semantics == "deepspeed_chat":
        weights = ds_group_row_weights(mask, settings.ds_group_size, valid_rows=minibatch.response_lengths > 1)
        minibatch = minibatch.replace(row_weights=weights)
        denominator = 1.0
    else:
        denominator = float(mask.sum())
    return minibatch.select(data_parallel_slice(len(rows), dp_rank, dp_size)), denominator


class Updater:
    """Runs the updates of an iteration on actor and critic."""

    def __init__(self, actor: Actor, critic: Critic, settings: UpdateSettings) -> None:
        self.actor = actor
        self.critic = critic
        self.settings = settings
        self.bad_steps = 0
        """Steps in a row, up to the last one, whose gradients were not finite."""

    def run(self, batch: RolloutBatch, iteration: int) -> tuple[MetricAccumulator, list[tuple[Update, Update]]]:
        """All epochs over ``batch``, the rows of all ranks.

        Returns:
            Metrics of this rank's share (to be reduced over ranks) and every update in order: (actor's, critic's).

        Raises:
            MrlhfError: more than ``max_bad_steps`` steps in a row had a gradient that is not finite, or the loss scale
                of fp16 is as low as it goes.
        """
        settings, groups = self.settings, self.actor.groups
        # Tensor ranks hold the same numbers; only one of them counts.
        counts = self.actor.is_last_stage and groups.tp.rank() == 0
        metrics = MetricAccumulator()
        updates: list[tuple[Update, Update]] = []
        for epoch in range(settings.epochs):
            for rows in minibatch_rows(
                batch.size,
                settings.minibatch_size,
                shuffle=settings.shuffle,
                seed=settings.seed,
                iteration=iteration,
                epoch=epoch,
            ):
                actor, critic = self._step(batch, rows)
                self._check_steps(iteration, actor, critic)
                if counts:
                    metrics.add(actor.metrics, "policy/")
                    metrics.add(critic.metrics, "value/")
                    if not updates:
                        metrics.add(_ratio_error(actor.metrics))
                updates.append((actor, critic))
        return metrics, updates

    def _step(self, batch: RolloutBatch, rows: list[int]) -> tuple[Update, Update]:
        settings, groups = self.settings, self.actor.groups
        mine, denominator = prepare_minibatch(batch, rows, settings, dp_rank=groups.dp.rank(), dp_size=groups.dp.size())
        virtual = len(self.actor.chunks) > 1
        plan = make_plan(
            mine,
            rows=settings.micro_batch_size,
            tokens=settings.micro_batch_tokens,
            multiple=groups.pp.size() if virtual else 1,
        )
        actor = self.actor.policy_gradients(mine, plan, settings.policy, denominator)
        critic = self.critic.value_gradients(mine, plan, settings.value_clip, denominator)
        # One without the other would pair a policy with values of another one.
        both = actor.finite and critic.finite
        return self.actor.apply(actor, both), self.critic.apply(critic, both)

    def _check_steps(self, iteration: int, actor: Update, critic: Update) -> None:
        """Count skipped steps and stop a run that gets nowhere; every rank comes to the same answer."""
        if actor.updated and critic.updated:
            self.bad_steps = 0
            return
        self.bad_steps += 1
        norms = f"gradient norms in iteration {iteration}: actor {actor.grad_norm}, critic {critic.grad_norm}"
        for model in (self.actor, self.critic):
            if model.trainable.scale_exhausted:
                raise MrlhfError(
                    f"the {model.name}'s gradient overflows fp16 even with a loss scale of {MIN_LOSS_SCALE}; {norms}; "
                    f"use precision.dtype=bf16 or fp32, or lower optimizer.{model.name}.lr"
                )
        if self.bad_steps > self.settings.max_bad_steps:
            raise MrlhfError(
                f"{self.bad_steps} optimizer steps in a row were skipped, since a gradient was not finite; {norms}; look "
                "at the scores and log-probs that went in, lower optimizer.actor.lr and optimizer.critic.lr, use "
                "precision.dtype=fp32, or raise trainer.max_bad_steps to wait longer"
            )


def _ratio_error(policy: dict[str, Metric]) -> dict[str, Metric]:
    """Largest |ratio - 1| in the first minibatch, before any update: rounding only, if all is well."""
    high, low = policy.get("ratio_max"), policy.get("ratio_min")
    if high is None or low is None:
        return {}
    error = max(float(high.value) - 1.0, 1.0 - float(low.value))
    return {"ratio_error_before_update": Metric("max", error, high.count)}
