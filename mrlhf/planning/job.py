"""A run as the planner sees it: models, layouts and batch sizes as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from mrlhf.config_sections import Fp8Recipe
from mrlhf.model_config import ModelConfig
from mrlhf.planner import ParallelSizes
from mrlhf.planning.parameters import Head, StageParameters, stage_parameters

Dtype = Literal["fp32", "bf16", "fp16"]
ELEMENT_BYTES: dict[Dtype, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Role:
    """One model of a run.

    Attributes:
        name: ``actor``, ``critic``, ``reference``, ``reward0``, ... or ``model``.
        model: its architecture.
        sizes: its layout over its ranks.
        head: language model or one number a token.
        trained: whether it has gradients and an optimizer.
        average: whether an fp32 average of its weights is kept.
        fp8: whether its linear layers compute in FP8.
        bf16_ends: layers at either end that do not.
        fp8_recipe: where the scales of FP8 come from.
        fp8_history: steps whose largest values delayed scales remember.
        value_bias: whether its value head has a bias.
        recompute: whether its layers are computed again in the backward pass instead of kept.
        recompute_modules: parts of layers of which that is so instead: core_attn, layernorm, mlp, moe.
        first: the first of its ranks, which follow each other.
        offloaded: whether its weights (trained: its optimizer's states) wait on the host while nothing needs them.
    """

    name: str
    model: ModelConfig
    sizes: ParallelSizes
    head: Head
    trained: bool = False
    average: bool = False
    fp8: bool = False
    bf16_ends: int = 0
    fp8_recipe: Fp8Recipe = "tensorwise"
    fp8_history: int = 1024
    value_bias: bool = False
    recompute: bool = False
    recompute_modules: tuple[str, ...] = ()
    first: int = 0
    offloaded: bool = False

    def again(self, module: str) -> bool:
        """Whether a part of its layers is computed again in the backward pass."""
        return self.recompute or module in self.recompute_modules

    @property
    def ranks(self) -> range:
        """The ranks that hold parts of it."""
        return range(self.first, self.first + self.sizes.world_size)

    @cached_property
    def stages(self) -> list[StageParameters]:
        """Parameters by pipeline rank."""
        return stage_parameters(self.model, self.sizes, self.head, value_bias=self.value_bias)

    @property
    def sequence_split(self) -> int:
        """Ranks over which norms and residuals are divided."""
        return self.sizes.tensor_model_parallel_size if self.sizes.sequence_parallel else 1

    def replicas(self, stage: int) -> list[tuple[int, int]]:
        """Parameters of a pipeline rank with the number of ranks that hold the same: the dense ones, the experts."""
        parameters, sizes = self.stages[stage], self.sizes
        dense = sizes.data_parallel_size * sizes.context_parallel_size
        found = [(parameters.total - parameters.experts, dense)]
        if parameters.experts:
            found.append((parameters.experts, max(sizes.stage_ranks // sizes.expert_block, 1)))
        return found

    def fp8_layers(self, stage: int) -> int:
        """Layers of a pipeline rank that compute in FP8."""
        stages, p = self.stages, self.sizes.pipeline_model_parallel_size
        if not self.fp8:
            return 0
        # With virtual stages the ends of the model are still on the first and the last pipeline rank.
        at_ends = self.bf16_ends * ((stage == 0) + (stage == p - 1))
        return max(stages[stage].layers - at_ends, 0)

    def stage_of(self, rank: int) -> int:
        """The pipeline rank of a global rank: pipeline stages are the slowest in Megatron's order."""
        return (rank - self.first) // (self.sizes.world_size // self.sizes.pipeline_model_parallel_size)


@dataclass(frozen=True)
class Rows:
    """Rows of one micro-batch on one rank.

    Attributes:
        count: rows.
        width: slots of each, padding included.
        wanted: positions of each whose log-prob the head computes.
    """

    count: int
    width: int
    wanted: int

    @property
    def tokens(self) -> int:
        """Slots of all rows."""
        return self.count * self.width


@dataclass(frozen=True)
class Rollout:
    """Generation on the actor.

    Attributes:
        slots: rows generated at once on one data-parallel rank.
        longest_prompt: tokens.
        longest_response: tokens.
        mean_prompt: tokens, for FLOPs and times.
        mean_response: tokens, for FLOPs and times.
    """

    slots: int
    longest_prompt: int
    longest_response: int
    mean_prompt: int
    mean_response: int


@dataclass(frozen=True)
class Job:
    """Everything that memory, FLOPs, traffic and time follow from.

    Attributes:
        kind: the command that would run it.
        roles: the models; the first one says how many ranks a replica has.
        dtype: of weights and activations.
        distributed_optimizer: whether optimizer states are divided over data-parallel ranks.
        rows: rows of one iteration over all ranks.
        minibatch: rows of one optimizer step over all ranks.
        epochs: passes over the rows.
        train: the largest micro-batch of training.
        train_mean: the same at mean lengths, for FLOPs and times.
        inference: the largest micro-batch of the passes without gradient; None where there are none.
        inference_mean: the same at mean lengths.
        idle_in_inference: names of roles that make no such passes, though others of their kind do.
        rollout: None where nothing is generated.
        entropy: whether the actor's head computes entropies in training.
        row_slots: slots of a row as they are kept for a whole iteration.
        row_bytes: bytes kept for every slot of every row (token ids, masks, numbers per token).
        text_rows: rows of a language modelling step after each step of the actor; 0: none.
        text_micro_batch: their micro-batch.
        save_optimizer: whether checkpoints hold the optimizer states.
        evaluates: whether there are evaluations between iterations.
        cuda: whether it runs on GPUs, or on CPUs.
        fused_kernels: whether bf16 and fp16 layers on GPUs may be Transformer Engine's.
    """

    kind: str
    roles: tuple[Role, ...]
    dtype: Dtype
    distributed_optimizer: bool
    rows: int
    minibatch: int
    epochs: int
    train: Rows
    train_mean: Rows
    inference: Rows | None = None
    inference_mean: Rows | None = None
    idle_in_inference: tuple[str, ...] = ()
    rollout: Rollout | None = None
    entropy: bool = False
    row_slots: int = 0
    row_bytes: int = 38
    text_rows: int = 0
    text_micro_batch: Rows | None = None
    save_optimizer: bool = True
    evaluates: bool = False
    cuda: bool = True
    fused_kernels: bool = True

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight or an activation."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def sizes(self) -> ParallelSizes:
        """The layout of the first role."""
        return self.roles[0].sizes

    @property
    def world_size(self) -> int:
        """Ranks of all roles together."""
        return max(role.ranks.stop for role in self.roles)

    @property
    def transformer_engine(self) -> bool:
        """Whether layers are Transformer Engine's (see `mrlhf.megatron.spec.choose_parts`)."""
        return self.cuda and self.fused_kernels and self.dtype != "fp32"

    @property
    def steps(self) -> int:
        """Optimizer steps of an iteration."""
        return self.epochs * math.ceil(self.rows / self.minibatch)

    def away(self, role: Role, phase: str) -> bool:
        """Whether in a phase the host has what `Role.offloaded` is about; gradients are freed then as well.

        Frozen models that make no passes in inference stay away then; after an evaluation all of them stay until the
        next rollout.
        """
        if not role.offloaded:
            return False
        if role.trained:
            return phase in ("rollout", "inference", "evaluation")
        if phase == "inference":
            return role.name in self.idle_in_inference
        return phase != "evaluation" and not (phase == "save" and self.evaluates)

    def trained(self) -> Iterator[Role]:
        """The roles with an optimizer."""
        return (role for role in self.roles if role.trained)

    def inferred(self) -> list[Role]:
        """The roles that make passes without gradient in an iteration: of PPO's all but idle ones, else the frozen."""
        if self.inference is None:
            return []
        there = [role for role in self.roles if role.name not in self.idle_in_inference]
        return [role for role in there if self.rollout is not None or not role.trained]

    def rank_classes(self) -> list[tuple[range, dict[str, int]]]:
        """Ranks that hold the same stages, in order: ``(ranks, {role: pipeline rank})``, of the roles they have."""
        classes: list[tuple[range, dict[str, int]]] = []
        # Stages change at multiples of a stage's size, whichever role it is of.
        starts = sorted({rank for role in self.roles for rank in role.ranks[:: role.sizes.stage_ranks]})
        for start, end in zip(starts, [*starts[1:], self.world_size], strict=True):
            held = [role for role in self.roles if start in role.ranks]
            classes.append((range(start, end), {role.name: role.stage_of(start) for role in held}))
        return classes
