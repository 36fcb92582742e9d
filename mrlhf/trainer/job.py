"""Starts a run on this rank: the world, the groups, and models loaded onto them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch
import torch.distributed as dist

from mrlhf.checkpoint.convert import DTYPES, is_megatron_folder, load_weights
from mrlhf.checkpoint.hf import has_value_bias, read_model_config
from mrlhf.checkpoint.random_init import draw_weights
from mrlhf.checkpoint.safetensors_io import SafetensorsReader
from mrlhf.checkpoint.transforms import TensorRanks
from mrlhf.config_sections import AdamConfig, RunConfig
from mrlhf.megatron import device
from mrlhf.megatron.compiled import compile_layers
from mrlhf.megatron.groups import ProcessGroupCollection, build_groups
from mrlhf.megatron.model import Head, build_model
from mrlhf.megatron.optimizer import AdamSettings, Trainable
from mrlhf.model_config import ModelConfig
from mrlhf.parallel.bridge import Bridge
from mrlhf.parallel.collectives import Group
from mrlhf.parallel.launch import LaunchEnv, initialize
from mrlhf.planner import ParallelSizes, token_multiple
from mrlhf.trainer.precision import fp8_for

C = TypeVar("C", bound=RunConfig)
C_co = TypeVar("C_co", bound=RunConfig, covariant=True)


@dataclass(frozen=True)
class Layout:
    """How a model is divided over the ranks, and this rank's groups."""

    sizes: ParallelSizes
    groups: ProcessGroupCollection


@dataclass(frozen=True)
class Split:
    """The two parts of a world in which critic and reward models have ranks of their own.

    Attributes:
        bridge: between the parts.
        sizes: layouts of all models by role, the actor's among them.
        critic_ranks: those of critic and reward models.
    """

    bridge: Bridge
    sizes: Mapping[str, ParallelSizes]
    critic_ranks: range


@dataclass(frozen=True)
class Job(Generic[C_co]):
    """This rank's part of a run, before any model exists."""

    config: C_co
    models: dict[str, ModelConfig]
    env: LaunchEnv
    sizes: ParallelSizes
    groups: ProcessGroupCollection
    device: torch.device
    dtype: torch.dtype
    own_layouts: Mapping[str, Layout] = field(default_factory=dict)
    """Of the models that have another one than ``sizes`` and ``groups``, by role."""
    split: Split | None = None
    """With parts of the world, ``sizes`` and ``groups`` are those of this rank's part; else they are the actor's."""
    weights: bool = True
    """False leaves the models' weights as they are built: a dry run reads none."""

    @property
    def dp_rank(self) -> int:
        """Which replica this rank belongs to."""
        return int(self.groups.dp.rank())

    @property
    def dp_size(self) -> int:
        """Number of replicas."""
        return int(self.groups.dp.size())

    def layout_of(self, role: str) -> Layout:
        """Of one model."""
        return self.own_layouts.get(role) or Layout(self.sizes, self.groups)

    def home_of(self, role: str) -> Group:
        """The data-parallel group that shares out a run's rows, for a model whose own one is another; else None."""
        return self.groups.dp if role in self.own_layouts else None

    def described_layout(self) -> dict[str, Any]:
        """All parallel sizes, as a checkpoint names them."""
        if self.split is None:
            sizes, others = asdict(self.sizes), {role: layout.sizes for role, layout in self.own_layouts.items()}
        else:
            sizes, others = asdict(self.split.sizes["actor"]), dict(self.split.sizes)
        found = dict(sizes)
        for role, other in others.items():
            found |= {f"{role}.{key}": value for key, value in asdict(other).items() if value != sizes[key]}
        if self.split is not None:
            found["critic_ranks"] = len(self.split.critic_ranks)
        return found

    @property
    def pad_to_multiple(self) -> int:
        """Row widths are multiples of it, so that sequence parallelism can split them, and FP8 compute every part."""
        every = (self.sizes, *(layout.sizes for layout in self.own_layouts.values()))
        return math.lcm(*(token_multiple(sizes, self.config.precision.token_multiple) for sizes in every))


def read_architectures(paths: Mapping[str, str]) -> dict[str, ModelConfig]:
    """The architectures in the folders of ``paths`` (role -> folder), after a look at the weight files' headers.

    Raises:
        CheckpointError: a folder has no readable configuration or weights.
    """
    models = {role: read_model_config(path) for role, path in paths.items()}
    for path in sorted(set(paths.values())):
        if not is_megatron_folder(path):
            # Opening it reads the headers: a missing or cut-off file is found before any rank waits for another.
            with SafetensorsReader(path) as reader:
                reader.check()
    return models


def join(config: C, models: dict[str, ModelConfig], env: LaunchEnv) -> Job[C]:
    """Join the other ranks and make the process groups; all sizes have been checked before."""
    device.install()
    if config.precision.kernels == "local":
        device.use_torch_optimizers()
    timeout = timedelta(minutes=config.launch.timeout_minutes)
    if not dist.is_initialized():
        env = initialize(env, config.launch.backend, timeout)
    places = {role: (config.ranks_of(role, env.world_size), config.sizes_of(role, env.world_size)) for role in models}
    main = config.ranks_of("actor", env.world_size), config.sizes_of("actor", env.world_size)
    made = {}
    for ranks, sizes in (main, *places.values()):
        if (ranks, sizes) not in made:
            made[ranks, sizes] = build_groups(sizes, timeout, first=ranks.start)
    split = None
    if len({ranks for ranks, _ in made}) > 1:
        rest = range(main[0].stop, env.world_size)
        sizes_of = {"actor": main[1], **{role: sizes for role, (_, sizes) in places.items()}}
        split = Split(Bridge(main[0], rest, timeout), sizes_of, rest)
        if dist.get_rank() in rest:
            # The first one's layout shares out the rows of this part.
            main = next(place for place in places.values() if place[0] == rest)
    groups, sizes = made[main], main[1]
    device.seed_rng_tracker(config.seed, groups.tp.rank(), pp_rank=groups.pp.rank(), dp_rank=groups.dp_cp.rank())
    own = {role: Layout(place[1], made[place]) for role, place in places.items() if place != main}
    return Job(config, models, env, sizes, groups, device.device(), DTYPES[config.precision.dtype], own, split)


def load_model(
    job: Job[C],
    role: str,
    path: str,
    head: Head,
    *,
    dropout: float = 0.0,
    trainable: bool = False,
    head_init: str = "auto",
    init: Literal["loaded", "random"] = "loaded",
    masked: bool = False,
    moe_aux_loss_coef: float = 0.0,
) -> list[torch.nn.Module]:
    """This rank's stages of ``job.models[role]`` with the weights in ``path``; ``head_init`` as `load_weights`.

    With ``init="random"`` nothing is read, and the weights are drawn by the run's seed (`draw_weights`). A model that
    will get attention masks is ``masked``, see `build_model`, also for ``moe_aux_loss_coef``.
    """
    model, layout = job.models[role], job.layout_of(role)
    loaded = init == "loaded" and job.weights
    bias = loaded and head == "value" and head_init != "fresh" and not is_megatron_folder(path) and has_value_bias(path)
    chunks = build_model(
        model,
        layout.sizes,
        layout.groups,
        head=head,
        dtype=job.dtype,
        dropout=dropout,
        trainable=trainable,
        value_bias=bias,
        masked=masked,
        fp8=fp8_for(job.config, role, trained=trainable),
        recompute=trainable and job.config.parallel_of(role).recompute == "full",
        recompute_modules=job.config.parallel_of(role).recomputed_modules if trainable else (),
        kernels=job.config.precision.kernels,
        moe_aux_loss_coef=moe_aux_loss_coef,
    )
    if not job.weights:
        return list(chunks)
    if trainable and job.config.precision.compile:
        compile_layers(chunks)
    if not loaded:
        draw_weights(
            chunks,
            model,
            ranks=TensorRanks.of(layout.groups),
            head=head,
            seed=job.config.seed,
        )
        return list(chunks)
    load_weights(
        chunks,
        model,
        Path(path),
        groups=layout.groups,
        head=head,
        head_init=head_init,  # type: ignore[arg-type]
        seed=job.config.seed,
    )
    return list(chunks)


def make_trainable(
    job: Job[C], role: str, chunks: list[torch.nn.Module], adam: AdamConfig, *, total_steps: int, distributed: bool
) -> Trainable:
    """The stages of a role in DDP with their optimizer, whose schedule ends after ``total_steps``."""
    settings = AdamSettings(
        lr=adam.lr,
        min_lr=adam.min_lr,
        lr_schedule=adam.lr_schedule,
        warmup_steps=adam.warmup_iterations,
        total_steps=total_steps,
        weight_decay=adam.weight_decay,
        beta1=adam.beta1,
        beta2=adam.beta2,
        eps=adam.eps,
        clip_grad=adam.clip_grad,
    )
    return Trainable(
        chunks,
        job.layout_of(role).groups,
        settings,
        distributed_optimizer=distributed,
        overlap_grad_reduce=job.config.parallel_of(role).overlap_grad_reduce,
    )
