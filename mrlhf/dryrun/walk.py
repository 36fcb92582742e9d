"""One rank's part of a PPO iteration, walked with the run's own code on tensors without content."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from mrlhf.checkpoint.optimizer_state import empty_tensors
from mrlhf.checkpoint.plan import SavedTensor, planned_tensors
from mrlhf.checkpoint.training_state import Average, SavedModel
from mrlhf.config_schema import PPOConfig
from mrlhf.dryrun.fake import FakeWorld
from mrlhf.dryrun.results import Lengths, Part, Phase, RankWalk, alike, scaled
from mrlhf.dryrun.rollout import rollout_requests, walk_rollout
from mrlhf.dryrun.traffic import Traffic, group_names
from mrlhf.dryrun.world import fake_world, quiet
from mrlhf.megatron.decode import layer_numbers
from mrlhf.model_config import ModelConfig
from mrlhf.parallel.batches import gather_batch
from mrlhf.planning.from_config import head_of
from mrlhf.roles.critic import Critic
from mrlhf.roles.micro_batches import Cut, Plan
from mrlhf.roles.model import Gradients, RoleModel, TrainedModel
from mrlhf.trainer import ppo_job as jobs
from mrlhf.trainer.ema import WeightAverage
from mrlhf.trainer.experience import add_advantages, add_masks
from mrlhf.trainer.job import Job, join
from mrlhf.trainer.precision import fp8_for
from mrlhf.trainer.settings import sampling_params, shaping_settings, update_settings
from mrlhf.trainer.updates import share_minibatch
from mrlhf.types import RolloutBatch, round_up

ORDINARY, STOP = 1, 0
"""Token ids: of prompts and responses; what ends a response."""


@dataclass(frozen=True)
class PartOfCut(Cut):
    """As the trainer cuts, and then the micro-batches that are ``chosen``."""

    chosen: Callable[[Plan], Plan] = alike

    def __call__(self, batch: RolloutBatch) -> Plan:
        """The micro-batches to go through."""
        return self.chosen(super().__call__(batch))


def walk_rank(
    config: PPOConfig,
    models: Mapping[str, ModelConfig],
    rank: int,
    world_size: int,
    lengths: Lengths,
    *,
    passes: bool = True,
    every_micro_batch: bool = False,
) -> RankWalk:
    """Build ``rank``'s models and walk an iteration.

    Args:
        config: of the run; sizes have been checked.
        models: architectures by role.
        rank: whose part.
        world_size: ranks of the run.
        lengths: of all rows.
        passes: False builds the trained models and plans the checkpoint, and leaves out all else.
        every_micro_batch: walk all of them instead of a few from which the others follow.
    """
    # Building makes cycles that would keep tensors alive in the account.
    gc.collect()
    with fake_world(rank, world_size) as env, quiet():
        job = replace(join(without_fp8(config), dict(models), env), weights=False)
        layouts = [job.groups, *(layout.groups for layout in job.own_layouts.values())]
        stage_ranks = {r for groups in layouts for r in dist.get_process_group_ranks(groups.pp)}
        names = {key: name for groups in reversed(layouts) for key, name in group_names(groups).items()}
        shrinking = any("layernorm" in config.parallel_of(role).recomputed_modules for role in models)
        world = FakeWorld(Traffic(names, stage_ranks), shrinking=shrinking)
        with world:
            return _Walk(job, world, config, lengths, every_micro_batch).run(rank, passes)


def without_fp8(config: PPOConfig) -> PPOConfig:
    """The configuration with linear layers in the run's dtype: FP8 kernels need a GPU even to be asked for a shape.

    Emulated FP8 has no kernels of its own and stays.
    """
    if config.precision.fp8 is None or config.precision.fp8_emulation:
        return config
    precision = type(config.precision)(dtype=config.precision.dtype)
    return config.model_copy(update={"precision": precision})


class _Walk:
    """The state of a walk."""

    def __init__(
        self, job: Job[PPOConfig], world: FakeWorld, config: PPOConfig, lengths: Lengths, every_micro_batch: bool
    ) -> None:
        self.job, self.config, self.world, self.lengths = job, job.config, world, lengths
        self.every = every_micro_batch
        # What FP8 asks of rows and passes holds although its layers are walked in the run's dtype.
        self.asked = config
        self.pad_to_multiple = replace(job, config=config).pad_to_multiple
        self.phases: dict[str, Phase] = {}
        self.parts: dict[str, Part] = {}
        self.kv_cache = 0

    def run(self, rank: int, passes: bool) -> RankWalk:
        """Everything in the order of the trainer."""
        self._begin("build")
        self.actor = self._build("actor", lambda: jobs.build_actor(self.job))
        self.critic = None
        if self.config.ppo.needs_critic:
            self.critic = self._build("critic", lambda: jobs.build_critic(self.job))
        if passes:
            self._build_frozen()
        decay = self.config.ppo.ema_decay
        self.ema = WeightAverage(self.actor, decay) if decay is not None else None
        self._end("build")
        if passes:
            self._roll_out()
            self._train(self._infer())
        saved = self._save()
        return RankWalk(rank, self.parts, self.phases, self.kv_cache, saved)

    def _build_frozen(self) -> None:
        if self.config.needs_reference:
            self.reference = self._build("reference", lambda: jobs.build_reference(self.job))
        self.rewards = [
            self._build(f"reward{index}", partial(jobs.build_reward_model, self.job, index))
            for index in range(len(self.config.reward_model_paths))
        ]

    def _build(self, role: str, build: Callable[[], Any]) -> Any:
        before = self.world.live
        model: RoleModel = build()
        if isinstance(model, TrainedModel):
            # Adam makes its moments at the first step; a walk is like every later iteration.
            peak = self.world.peak
            empty_tensors(model.trainable)
            gc.collect()
            self.world.peak = max(peak, self.world.live)
        fp8 = fp8_for(self.asked, role, trained=isinstance(model, TrainedModel))
        for chunk in model.chunks:
            setattr(chunk, "token_multiple", fp8.token_multiple if fp8 is not None else 1)  # noqa: B010
        gc.collect()
        named = {f"{i}.{name}": p for i, chunk in enumerate(model.chunks) for name, p in chunk.named_parameters()}
        weights = sum(p.numel() * p.element_size() for p in named.values())
        # Scales and histories of emulated FP8.
        scales = sum(
            buffer.untyped_storage().nbytes()
            for chunk in model.chunks
            for buffer in chunk.buffers()
            if buffer.dtype.is_floating_point
        )
        gradients = 0
        if isinstance(model, TrainedModel):
            buffers = {getattr(p, "main_grad").untyped_storage() for p in named.values()}  # noqa: B009
            gradients = sum(storage.nbytes() for storage in buffers)
        self.parts[role] = Part(
            shapes={name: tuple(p.shape) for name, p in named.items()},
            sharded=frozenset(name for name, p in named.items() if getattr(p, "tensor_model_parallel", False)),
            layers=len(layer_numbers(model.chunks)),
            weights=weights,
            gradients=gradients,
            optimizer=max(self.world.live - before - weights - gradients - scales, 0) if gradients else 0,
        )
        return model

    def _roll_out(self) -> None:
        """All passes of the rollout, each kind once."""
        rollout, per_prompt = self.config.rollout, self.config.rollout.samples_per_prompt
        rows = self.config.rows_per_iteration // self.job.dp_size
        requests = rollout_requests(rows, per_prompt, self.lengths.prompt, self.lengths.response)

        def measure(name: str, walk: Callable[[], None]) -> Phase:
            """A pass."""
            self._begin(name)
            walk()
            self._end(name)
            return self.phases.pop(name)

        with torch.no_grad():
            engine, sampling = self.actor.engine(rollout.batch_size), sampling_params(self.config)
            self.kv_cache, phases = walk_rollout(engine, requests, sampling, ORDINARY, measure)
        self.phases.update(phases)

    def _rows(self) -> RolloutBatch:
        count = self.config.rows_per_iteration // self.job.dp_size
        prompt, response = [ORDINARY] * self.lengths.prompt, [ORDINARY] * self.lengths.response
        batch = RolloutBatch.from_sequences(
            [prompt] * count,
            [response] * count,
            pad_id=STOP,
            pad_to_multiple=self.pad_to_multiple,
            truncated=[True] * count,
        )
        return add_masks(batch, self.config.semantics, self.lengths.response)

    def _infer(self) -> RolloutBatch:
        batch, temperature = self._rows(), self.config.rollout.temperature
        asked: dict[str, Any] = {}
        if not self.config.ppo.skip_old_logprobs:
            asked["actor"] = lambda cut: self.actor.logprobs(batch, cut, temperature=temperature)
        if self.config.ppo.uses_reference:
            asked["reference"] = lambda cut: self.reference.logprobs(batch, cut, temperature=temperature)
        if self.critic is not None:
            asked["critic"] = lambda cut: self.critic.values(batch, cut)
        for index, model in enumerate(self.rewards):
            asked[f"reward{index}"] = lambda cut, model=model: model.scores(batch, cut)
        found: dict[str, torch.Tensor] = {}
        scores = torch.zeros(batch.size)
        for role, ask in asked.items():
            twin = next((other for other in found if self._twins(role, other)), None)
            if twin is None:
                found[role] = self._inferred(role, ask, batch.width)
            else:
                # The same passes through a model of the same kind.
                self.phases[f"inference/{role}"] = self.phases[f"inference/{twin}"]
                found[role] = torch.zeros_like(scores if role.startswith("reward") else found[twin])
        if self.config.keeps_rollout_logprobs:
            batch = batch.replace(rollout_logprobs=torch.zeros(batch.size, batch.width - 1))
        batch = batch.replace(
            old_logprobs=found.get("actor"),
            ref_logprobs=found.get("reference"),
            values=found.get("critic"),
            scores=scores,
            raw_scores=scores,
        )
        self._begin("experience")
        group = self.job.groups.dp
        batch = gather_batch(add_advantages(batch, shaping_settings(self.config), group), group)
        self._end("experience")
        return batch

    def _twins(self, role: str, other: str) -> bool:
        """Whether two models have the same architecture, head and layout."""
        models, config = self.job.models, self.config
        same = models[role] == models[other] and head_of(config, role) == head_of(config, other)
        return same and self.job.layout_of(role).sizes == self.job.layout_of(other).sizes

    def _inferred(self, role: str, ask: Callable[[Any], torch.Tensor], width: int) -> torch.Tensor:
        model, settings, result = self._model(role), self.config.inference, torch.zeros(0)

        def once(limit: int | None) -> int:
            """A pass over so many micro-batches; how many there are."""
            nonlocal result
            there = 0

            def first(plan: Plan) -> Plan:
                """The micro-batches that are gone through."""
                nonlocal there
                there = len(plan)
                chosen = alike(plan)[:limit]
                self._expect(model, len(chosen[0]) if chosen else 1, width)
                return chosen

            result = ask(PartOfCut(settings.micro_batch_size, settings.micro_batch_tokens, chosen=first))
            return there

        group = model.micro_batch_multiple
        self._scaled(f"inference/{role}", once, (group, 2 * group), group=group)
        return result

    def _train(self, batch: RolloutBatch) -> None:
        # All rows are of full length here, so that packing would change nothing.
        settings = replace(update_settings(self.config), packing=False)
        steps = settings.epochs * -(-batch.size // settings.minibatch_size)
        trained: list[TrainedModel] = [self.actor, *([self.critic] if self.critic is not None else [])]
        rows = list(range(min(settings.minibatch_size, batch.size)))
        made: dict[str, Gradients] = {}

        def once(model: TrainedModel, mine: RolloutBatch, plan: Plan, denominator: float, limit: int | None) -> int:
            """The gradient of so many micro-batches; how many there are."""
            chosen = alike(plan)[:limit]
            self._expect(model, len(chosen[0]), batch.width)
            if isinstance(model, Critic):
                clip, fixed = settings.value_clip, settings.policy.fixed_length
                made[model.name] = model.value_gradients(mine, chosen, clip, denominator, fixed)
            else:
                made[model.name] = self.actor.policy_gradients(mine, chosen, settings.policy, denominator)
            return len(plan)

        for model in trained:
            mine, plan, denominator = share_minibatch(model, batch, rows, settings)
            multiple = model.micro_batch_multiple
            # As many as a pipeline rank holds at once, so that the peak is that of the whole step.
            stages, stage = model.groups.pp.size(), model.groups.pp.rank()
            sizes = (stages, 2 * stages) if multiple > 1 else (1, max(stages - stage, 2))
            walk = partial(once, model, mine, plan, denominator)
            self._scaled(f"train/{model.name}", walk, sizes, group=multiple, times=steps)
        for model in trained:
            self._step(model, made[model.name], steps)

    def _step(self, model: TrainedModel, gradients: Gradients, steps: int) -> None:
        self._begin(f"step/{model.name}")
        model.apply(gradients)
        if model is self.actor and self.ema is not None:
            self.ema.update()
        self._end(f"step/{model.name}", times=steps)

    def _save(self) -> list[SavedTensor]:
        self._begin("save")
        trained = [self.actor, *([self.critic] if self.critic is not None else [])]
        saved = {model.name: SavedModel(model.trainable, model.config) for model in trained}
        averages = {"ema": Average("actor", self.ema.state_dict())} if self.ema is not None else {}
        tensors = planned_tensors(saved, averages, optimizer=self.config.checkpoint.optimizer)
        self._end("save")
        return tensors

    def _model(self, role: str) -> RoleModel:
        if role.startswith("reward"):
            reward: RoleModel = self.rewards[int(role.removeprefix("reward"))]
            return reward
        model: RoleModel = getattr(self, role)
        return model

    def _expect(self, model: RoleModel, rows: int, width: int) -> None:
        """What a pass of ``rows`` rows receives from other stages."""
        config: Any = model.chunks[0].config
        groups = model.groups
        parts = groups.cp.size() * (groups.tp.size() if config.sequence_parallel else 1)
        self.world.hidden_shape = (width // parts, rows, config.hidden_size)

    def _scaled(
        self, name: str, once: Callable[[int | None], int], sizes: tuple[int, int], *, group: int = 1, times: int = 1
    ) -> None:
        """Walk ``once`` with two numbers of micro-batches, and count what all of them take.

        Every micro-batch of equal rows adds the same messages, whatever their number, so two walks tell the share of
        one; in VPP's schedule that holds for groups of PP micro-batches.
        """
        if self.every:
            self._begin(name)
            there = once(None)
            self._end(name, times=times, walked=there, micro_batches=there)
            return
        self._begin(name)
        there = once(sizes[0])
        self._end(name, times=times, walked=min(sizes[0], there), micro_batches=there)
        # Passes without gradient fill up their last group.
        whole = round_up(there, group)
        if whole <= sizes[0]:
            return
        few, small = self.phases.pop(name), min(sizes[1], whole)
        self._begin(name)
        once(small)
        self._end(name, times=times, walked=small, micro_batches=there)
        many = self.phases[name]
        many.messages = scaled(few.messages, sizes[0], many.messages, small, whole)
        many.peak = max(few.peak, many.peak)

    def _begin(self, name: str) -> None:
        self.world.traffic.phase = name
        self.world.traffic.counts.pop(name, None)
        self.world.reset_peak()

    def _end(self, name: str, **values: Any) -> None:
        messages = self.world.traffic.counts.pop(name, Counter())
        self.phases[name] = Phase(messages=messages, peak=self.world.peak, **values)
