"""Seconds of each phase: a roofline over the layout, for comparing layouts rather than for promises.

A phase takes its work at the assumed share of the peaks (`Efficiency`) plus all communication: sums over tensor ranks
do not overlap with computation, and sums of gradients are counted in full, although ``parallel.overlap_grad_reduce:
true`` hides part of them. A pipeline of ``p`` stages takes ``(m + (p - 1) / v)`` times its slowest stage for ``m``
micro-batches (Narayanan et al. 2021, section 2.2).

Generation passes groups of slots through the stages, as many at a time as there are stages: a token of all groups takes
as long as the slowest stage needs for them, or one group needs for all stages; a step of decoding takes as long as
reading weights and cache (`mrlhf.planning.batching`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from mrlhf.planning import experts, flops, fp8
from mrlhf.planning.batching import Batching, batching
from mrlhf.planning.hardware import Efficiency, Hardware
from mrlhf.planning.job import Job, Role, Rollout, Rows
from mrlhf.planning.memory import checkpoint_bytes
from mrlhf.planning.offload import Transfers, transfers
from mrlhf.planning.parameters import StageParameters
from mrlhf.planning.traffic import Traffic, generation_traffic, pass_traffic, step_traffic


@dataclass(frozen=True)
class Seconds:
    """Where the time of a phase goes.

    Attributes:
        compute: matrix products and attention, or reading weights and cache where that takes longer.
        launch: what launching kernels adds where layers are shorter than that.
        tensor: tensor-parallel communication.
        context: keys and values of context-parallel ranks.
        expert: tokens on their way to experts and back.
        pipeline: messages between stages.
        bubble: waiting of the slowest stage for the pipeline to fill and to drain.
        data: gradients and weights over data-parallel ranks.
        host: waiting for what is in host memory (`mrlhf.planning.offload`).
        other: optimizer, writing to disk.
    """

    compute: float = 0.0
    launch: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    pipeline: float = 0.0
    bubble: float = 0.0
    data: float = 0.0
    host: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return sum(getattr(self, field.name) for field in fields(self))

    def __add__(self, other: Seconds) -> Seconds:
        """One after the other."""
        return Seconds(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __mul__(self, times: float) -> Seconds:
        """The same ``times`` over."""
        return Seconds(**{f.name: getattr(self, f.name) * times for f in fields(self)})

    def as_dict(self) -> dict[str, float]:
        """Every part and the total."""
        return {**{f.name: getattr(self, f.name) for f in fields(self)}, "total": self.total}


def _together(parts: list[tuple[Role, Seconds]]) -> Seconds:
    """Roles on the same ranks one after the other; of those on other ranks, at work at the same time, the slower."""
    sums: dict[int, Seconds] = {}
    for role, seconds in parts:
        sums[role.first] = sums.get(role.first, Seconds()) + seconds
    return max(sums.values(), key=lambda seconds: seconds.total, default=Seconds())


def _overlapped(stages: list[Seconds], groups: int) -> Seconds:
    """All passes of each pipeline rank, of which as many are at work at the same time as there are ``groups``."""
    slowest, all_of_them = max(stages, key=lambda seconds: seconds.total), Seconds()
    for seconds in stages:
        all_of_them += seconds * (1 / groups)
    return slowest if slowest.total >= all_of_them.total else all_of_them


@dataclass(frozen=True)
class Clock:
    """Times of single passes on some hardware."""

    job: Job
    hardware: Hardware
    efficiency: Efficiency = Efficiency()

    def phases(self) -> dict[str, Seconds]:
        """Every phase of an iteration; ``save`` is one checkpoint and not part of an iteration."""
        job, found = self.job, {}
        inferred = self._inferred()
        waits = self.transfers()
        first = {role.first: role for role in reversed(job.roles)}
        if job.rollout is not None:
            actor, out = job.roles[0], {start: Seconds(host=wait.rollout) for start, wait in waits.items()}
            others = [(first[start], seconds) for start, seconds in out.items() if start != actor.first]
            own = self.generation(actor, job.rollout) + out.get(actor.first, Seconds())
            found["rollout"] = _together([(actor, own), *others])
        if job.inference_mean is not None:
            parts = [(first[start], Seconds(host=wait.inference)) for start, wait in waits.items()]
            found["inference"] = _together([*inferred, *parts])
        train = [(role, self._training(role, job.train_mean, job.minibatch) * job.steps) for role in job.trained()]
        train += [(first[start], Seconds(host=wait.train)) for start, wait in waits.items()]
        if job.text_rows and job.text_micro_batch is not None:
            texts = self._training(job.roles[0], job.text_micro_batch, job.text_rows) * job.steps
            train.append((job.roles[0], texts))
        found["train"] = _together(train)
        updates = [(role, self._step(role) * job.steps) for role in job.trained()]
        if job.text_rows:
            updates.append((job.roles[0], self._step(job.roles[0]) * job.steps))
        found["optimizer"] = _together(updates)
        found["save"] = Seconds(other=checkpoint_bytes(job) / self.efficiency.disk)
        return found

    def transfers(self) -> dict[int, Transfers]:
        """Waiting for the host, by the first rank of each part of the ranks; empty where nothing is offloaded."""
        job = self.job
        if not any(role.offloaded for role in job.roles):
            return {}
        passes = {role.name: seconds.total for role, seconds in self._inferred()}
        trained = {role.name: self._training(role, job.train_mean, job.minibatch).total for role in job.trained()}
        return transfers(job, self.hardware.pcie * self.efficiency.link, passes, trained)

    def _inferred(self) -> list[tuple[Role, Seconds]]:
        """All passes without gradient, by role."""
        rows = self.job.inference_mean
        return [(role, self._inference(role, rows)) for role in self.job.inferred()] if rows is not None else []

    def generation(self, role: Role, rollout: Rollout) -> Seconds:
        """Of a whole rollout, on a data-parallel replica."""
        made = batching(self.job, role, rollout)
        stages = range(role.sizes.pipeline_model_parallel_size)
        total = _overlapped([self._prefill(role, i, rollout, made) for i in stages], made.groups)
        if not made.steps:
            return total
        steps = [self._decode_step(role, i, rollout, made) * (made.groups * made.steps) for i in stages]
        return total + _overlapped(steps, made.groups)

    def _prefill(self, role: Role, index: int, rollout: Rollout, made: Batching) -> Seconds:
        stage, job, rows, groups = role.stages[index], self.job, made.rows, made.prefills
        linear = flops.linear(stage, rows * rollout.mean_prompt)
        work = self._compute(role, index, flops.prefill(role, stage, rollout, rows), linear)
        traffic = generation_traffic(job, role, index, rows * rollout.mean_prompt / groups, rows / groups) * groups
        return self._with_launch(work, stage.layers * groups) + self._communication(role, traffic)

    def _decode_step(self, role: Role, index: int, rollout: Rollout, made: Batching) -> Seconds:
        """One token of one group of slots."""
        stage, job, active = role.stages[index], self.job, made.active / made.groups
        t, e = role.sizes.tensor_model_parallel_size, job.element_bytes
        # The embedding is looked up, not read. FP8 layers read their copies of one byte.
        share = experts.read_share(role, active)
        weights = (stage.layers_total - stage.experts * (1 - share) + stage.output) * e
        weights -= fp8.elements(role, index, read=share) * (e - 1)
        context = rollout.mean_prompt + max(rollout.mean_response - 1, 0) / 2
        keys = 2 * stage.layers * max(role.model.num_query_groups // t, 1) * role.model.head_dim * e * active * context
        reading = (weights + keys) / (self.hardware.bandwidth * self.efficiency.bandwidth)
        linear = flops.linear(stage, active)
        operations = flops.decode(role, stage, rollout, made.rows) / (made.steps * made.groups)
        work = max(self._compute(role, index, operations, linear), reading)
        traffic = generation_traffic(job, role, index, max(active, 1.0), max(active, 1.0))
        return self._with_launch(work, stage.layers) + self._communication(role, traffic)

    def _inference(self, role: Role, rows: Rows) -> Seconds:
        count = math.ceil(math.ceil(self.job.rows / role.sizes.data_parallel_size) / rows.count)
        stages = role.stages
        passes = [
            self._with_launch(self._forward(role, i, stage, rows), stage.layers)
            + self._communication(role, pass_traffic(self.job, role, i, rows, backward=False))
            for i, stage in enumerate(stages)
        ]
        # A pass without gradient does not interleave virtual stages any better than it fills the pipeline once.
        return self._pipelined(role, passes, count)

    def _training(self, role: Role, rows: Rows, minibatch: int) -> Seconds:
        count = math.ceil(math.ceil(minibatch / role.sizes.data_parallel_size) / rows.count)
        tokens, passes = rows.tokens / role.sizes.context_parallel_size, []
        for index, stage in enumerate(role.stages):
            once, again = flops.linear(stage, tokens), flops.linear_again(role, stage, tokens)
            linear, factor = 3 * once + again, 3 + (again / once if once else 0)
            work = self._compute(role, index, flops.training(self.job, role, stage, rows), linear)
            traffic = pass_traffic(self.job, role, index, rows, backward=True)
            passes.append(self._with_launch(work, factor * stage.layers) + self._communication(role, traffic))
        return self._pipelined(role, passes, count)

    def _pipelined(self, role: Role, passes: list[Seconds], count: int) -> Seconds:
        slowest = max(passes, key=lambda seconds: seconds.total)
        waits = (role.sizes.pipeline_model_parallel_size - 1) / role.sizes.virtual_stages
        return slowest * count + Seconds(bubble=waits * slowest.total)

    def _step(self, role: Role) -> Seconds:
        stages = role.stages
        index = max(range(len(stages)), key=lambda i: stages[i].total)
        e = self.job.element_bytes
        # The gradient is read for its norm, for clipping (and written) and for the step; moments and fp32 copy are
        # read and written, the weight is written.
        touched = 0.0
        for count, replicas in role.replicas(index):
            share = replicas if self.job.distributed_optimizer else 1
            touched += count * 8 + count / share * (4 + 16 + (8 if e < 4 else 0) + e)
        reading = touched / (self.hardware.bandwidth * self.efficiency.bandwidth)
        return self._communication(role, step_traffic(self.job, role, index)) + Seconds(other=reading)

    def _forward(self, role: Role, index: int, stage: StageParameters, rows: Rows) -> float:
        linear = flops.linear(stage, rows.tokens / role.sizes.context_parallel_size)
        return self._compute(role, index, flops.forward(role, stage, rows), linear)

    def _compute(self, role: Role, index: int, operations: float, linear: float) -> float:
        """Seconds of ``operations``, of which ``linear`` are of the linear layers and so may be in FP8."""
        layers = role.stages[index].layers
        fast = linear * role.fp8_layers(index) / layers if layers else 0.0
        slow = operations - fast
        peak = self.hardware.peak
        return (slow / peak(self.job.dtype) + fast / peak(self.job.dtype, fp8=True)) / self.efficiency.flops

    def _with_launch(self, work: float, layers: float) -> Seconds:
        return Seconds(compute=work, launch=max(layers * self.efficiency.layer_seconds - work, 0.0))

    def _communication(self, role: Role, traffic: Traffic) -> Seconds:
        sizes = role.sizes
        t, c = sizes.tensor_model_parallel_size, sizes.context_parallel_size
        stage = sizes.world_size // sizes.pipeline_model_parallel_size
        near = self._link(t)
        # Ranks of a data-parallel group lie within one stage, TP x CP apart; neighbouring stages lie a stage apart.
        data = self._link(stage)
        pipeline = self._link(stage * sizes.pipeline_model_parallel_size)
        context = self._link(t * c)
        expert = self._link(sizes.expert_block)
        return Seconds(
            tensor=traffic.tensor / near[0] + traffic.tensor_calls * near[1],
            context=traffic.context / context[0] + traffic.context_calls * context[1],
            expert=traffic.expert / expert[0] + traffic.expert_calls * expert[1],
            pipeline=traffic.pipeline / pipeline[0] + traffic.pipeline_calls * pipeline[1],
            data=traffic.data / data[0] + traffic.data_calls * data[1],
        )

    def _link(self, span: int) -> tuple[float, float]:
        """Bytes per second and seconds per call among ``span`` consecutive ranks."""
        if span <= self.hardware.gpus_per_node:
            return self.hardware.link * self.efficiency.link, self.efficiency.link_seconds
        return self.hardware.network * self.efficiency.link, self.efficiency.network_seconds
