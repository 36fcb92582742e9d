"""The updates of one iteration: several passes over the rows in minibatches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from mrlhf.metrics import MetricAccumulator
from mrlhf.parallel.collectives import all_reduce_metrics
from mrlhf.parallel.layout import data_parallel_slice
from mrlhf.rl import Aggregation, Semantics, ds_group_row_weights, sequence_row_weights
from mrlhf.roles.actor import Actor, PolicyLossSettings
from mrlhf.roles.critic import Critic
from mrlhf.roles.micro_batches import Plan, make_plan
from mrlhf.roles.model import Gradients, TrainedModel, Update
from mrlhf.trainer.ema import WeightAverage
from mrlhf.trainer.ptx import PTX
from mrlhf.trainer.skipped import count_skipped
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
    packing: bool = False
    shuffle: bool = True
    value_clip: float | None = 0.2
    ds_group_size: int = 1
    loss_aggregation: Aggregation = "token"
    max_response_length: int = 1
    target_approx_kl: float | None = None
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

    ``standard`` divides by the response tokens of the minibatch, or as ``loss_aggregation`` says; ``deepspeed_chat``
    weights rows (over the whole minibatch, so that ranks and micro-batches do not matter) and divides by 1.
    """
    minibatch = batch.select(rows)
    mask = minibatch.response_mask
    assert mask is not None
    if settings.semantics == "deepspeed_chat":
        weights = ds_group_row_weights(mask, settings.ds_group_size, valid_rows=minibatch.response_lengths > 1)
        minibatch = minibatch.replace(row_weights=weights)
        denominator = 1.0
    elif settings.loss_aggregation == "sequence":
        weights, denominator = sequence_row_weights(mask)
        minibatch = minibatch.replace(row_weights=weights)
    elif settings.loss_aggregation == "fixed_length":
        denominator = float(len(rows) * settings.max_response_length)
    else:
        denominator = float(mask.sum())
    return minibatch.select(data_parallel_slice(len(rows), dp_rank, dp_size)), denominator


def share_minibatch(
    model: TrainedModel, batch: RolloutBatch, rows: list[int], settings: UpdateSettings
) -> tuple[RolloutBatch, Plan, float]:
    """`prepare_minibatch` for this rank's replica of a model, with the micro-batches of its rows between the two."""
    dp = model.groups.dp
    mine, denominator = prepare_minibatch(batch, rows, settings, dp_rank=dp.rank(), dp_size=dp.size())
    plan = make_plan(
        mine,
        rows=settings.micro_batch_size,
        tokens=settings.micro_batch_tokens,
        multiple=model.micro_batch_multiple,
        packed=settings.packing,
    )
    return mine, plan, denominator


RATES = {"actor": "optimizer.actor.lr", "critic": "optimizer.critic.lr", "ptx": "optimizer.actor.lr"}
"""Configuration keys of the learning rates."""


class Step(NamedTuple):
    """The updates of one minibatch, in their order; None where a model took no part."""

    actor: Update | None
    critic: Update | None
    ptx: Update | None = None

    @property
    def updates(self) -> dict[str, Update]:
        """Those of the models that took part."""
        return {name: update for name, update in self._asdict().items() if update is not None}

    @property
    def updated(self) -> bool:
        """Whether every model that took part made its step."""
        return all(update.updated for update in self.updates.values())


class OtherPart(Protocol):
    """The ranks that train the other one of actor and critic, see `mrlhf.trainer.split`."""

    trains: str
    """What they train: ``actor``, ``critic``, or nothing."""

    def agree(self, own: Mapping[str, Gradients], stop: bool) -> tuple[dict[str, Gradients], bool]:
        """Gradients of both parts by model, and whether the actor stops; all ranks of the job call this together."""

    def agree_on_texts(self, own: Update | None) -> Update | None:
        """The step on texts after the actor's one, where the run makes any; all ranks of the job call this together."""


class Updater:
    """Runs the updates of an iteration.

    The order within a minibatch is DeepSpeed-Chat's in both semantics: the policy's step, the critic's, the step on
    texts, then the average of the weights.
    """

    def __init__(
        self,
        actor: Actor | None,
        critic: Critic | None,
        settings: UpdateSettings,
        *,
        ptx: PTX | None = None,
        ema: WeightAverage | None = None,
        other: OtherPart | None = None,
        working: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Keep references.

        Args:
            actor: is trained; None where other ranks do it.
            critic: is trained beside it, where the advantages need one; None also where other ranks do it.
            settings: see `UpdateSettings`.
            ptx: steps on texts.
            ema: average of the actor.
            other: the ranks that train the other one of the two.
            working: entered while this rank computes, and does not wait for the others.
        """
        self.actor = actor
        self.critic = critic
        self.settings = settings
        self.ptx = ptx
        self.ema = ema
        self.other = other
        self.working = working
        self.bad_steps = 0
        """Steps in a row, up to the last one, whose gradients were not finite."""

    def run(
        self, batch: RolloutBatch, iteration: int, *, train_actor: bool = True
    ) -> tuple[MetricAccumulator, list[Step]]:
        """All epochs over ``batch``, the rows of all ranks.

        Once the approximate KL of a minibatch is above ``target_approx_kl``, the actor makes no further step in this
        iteration, this one included (Spinning Up's early stopping); the critic goes on.

        Args:
            batch: with advantages.
            iteration: decides the order of the rows.
            train_actor: False trains the critic alone.

        Returns:
            Metrics of this rank's share (to be reduced over ranks) and every step in order.

        Raises:
            MrlhfError: more than ``max_bad_steps`` steps in a row had a gradient that is not finite, or the loss scale
                of fp16 is as low as it goes.
        """
        settings = self.settings
        metrics = MetricAccumulator()
        steps: list[Step] = []
        for epoch in range(settings.epochs):
            for rows in minibatch_rows(
                batch.size,
                settings.minibatch_size,
                shuffle=settings.shuffle,
                seed=settings.seed,
                iteration=iteration,
                epoch=epoch,
            ):
                if not train_actor and not self._trains_critic:
                    return metrics, steps
                step, stop = self._step(batch, rows, metrics, train_actor=train_actor, first=not steps)
                self.bad_steps = count_skipped(
                    self.bad_steps,
                    step.updates,
                    where=f"iteration {iteration}",
                    rates=RATES,
                    limit=settings.max_bad_steps,
                )
                steps.append(step)
                train_actor = train_actor and not stop
        return metrics, steps

    def _step(
        self, batch: RolloutBatch, rows: list[int], metrics: MetricAccumulator, *, train_actor: bool, first: bool
    ) -> tuple[Step, bool]:
        """The step on one minibatch, and whether the actor has come too far from where it sampled."""
        with self.working():
            policy, value = self._gradients(batch, rows, train_actor=train_actor)
        if policy is not None and self.actor is not None and self.actor.counts_metrics:
            metrics.add(policy.metrics, "policy/")
            # A ratio of 1 by construction checks nothing.
            checked = first and not self.settings.policy.on_policy
            metrics.add(_ratio_error(policy.metrics) if checked else {})
        if value is not None and self.critic is not None and self.critic.counts_metrics:
            metrics.add(value.metrics, "value/")
        stop = policy is not None and self._too_far(policy)
        made = {"actor": None if stop else policy, "critic": value}
        found = {name: gradients for name, gradients in made.items() if gradients is not None}
        if self.other is not None:
            found, stop = self.other.agree(found, stop)
        # One without the other would pair a policy with values of another one.
        finite = all(gradients.finite for gradients in found.values())
        with self.working():
            actor = _applied(self.actor, found.get("actor"), finite)
            critic = _applied(self.critic, found.get("critic"), finite)
            texts = self._after_the_actor(metrics) if actor is not None else None
        if self.other is not None and actor is not None:
            texts = self.other.agree_on_texts(texts)
        return Step(actor, critic, texts), stop

    @property
    def _trains_critic(self) -> bool:
        return self.critic is not None or (self.other is not None and self.other.trains == "critic")

    def _gradients(
        self, batch: RolloutBatch, rows: list[int], *, train_actor: bool
    ) -> tuple[Gradients | None, Gradients | None]:
        """Of the actor and the critic, as far as this rank trains them in this step."""
        settings = self.settings
        policy = value = None
        shared = share_minibatch(self.actor, batch, rows, settings) if self.actor is not None else None
        if train_actor and self.actor is not None and shared is not None:
            mine, plan, denominator = shared
            policy = self.actor.policy_gradients(mine, plan, settings.policy, denominator, packed=settings.packing)
        if self.critic is not None:
            if shared is None or self.critic.home is not None:
                shared = share_minibatch(self.critic, batch, rows, settings)
            mine, plan, denominator = shared
            value = self.critic.value_gradients(
                mine,
                plan,
                settings.value_clip,
                denominator,
                settings.policy.fixed_length,
                packed=settings.packing,
            )
        return policy, value

    def _after_the_actor(self, metrics: MetricAccumulator) -> Update | None:
        update = None
        if self.ptx is not None:
            update = self.ptx.step()
            if self.ptx.actor.counts_metrics:
                metrics.add(update.metrics, "ptx/")
        if self.ema is not None:
            self.ema.update()
        return update

    def _too_far(self, policy: Gradients) -> bool:
        target = self.settings.target_approx_kl
        if target is None or self.actor is None:
            return False
        mine = {"kl": policy.metrics["approx_kl_k3"]} if self.actor.counts_metrics else {}
        # Every rank of the actor comes to the same answer; NaN is left to the check of the gradients.
        return all_reduce_metrics(mine, self.actor.groups.intra_dist_opt)["kl"].result() > target


def _applied(model: TrainedModel | None, gradients: Gradients | None, wanted: bool) -> Update | None:
    """The step on ``gradients``; without a model it is made by other ranks."""
    if gradients is None:
        return None
    if model is not None:
        return model.apply(gradients, wanted)
    return Update(wanted, gradients.norm, {}, gradients.scale_exhausted)


def _ratio_error(policy: dict[str, Metric]) -> dict[str, Metric]:
    """Largest |ratio - 1| in the first minibatch, before any update: rounding only, if all is well."""
    high, low = policy.get("ratio_max"), policy.get("ratio_min")
    if high is None or low is None:
        return {}
    error = max(float(high.value) - 1.0, 1.0 - float(low.value))
    return {"ratio_error_before_update": Metric("max", error, high.count)}
