"""Builds what a configuration describes: the world, the groups and the models of this rank."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from mrlhf.checkpoint.convert import DTYPES, is_megatron_folder, load_weights
from mrlhf.checkpoint.hf import has_value_bias, read_head, read_model_config
from mrlhf.checkpoint.safetensors_io import SafetensorsReader
from mrlhf.config import check_run
from mrlhf.config_schema import AdamConfig, PPOConfig
from mrlhf.errors import ConfigError
from mrlhf.megatron import device
from mrlhf.megatron.groups import ProcessGroupCollection, build_groups
from mrlhf.megatron.model import Head, build_model
from mrlhf.megatron.optimizer import AdamSettings, Trainable
from mrlhf.model_config import ModelConfig
from mrlhf.parallel.launch import LaunchEnv, detect_launch, initialize
from mrlhf.planner import ParallelSizes, check_sizes
from mrlhf.roles.actor import Actor
from mrlhf.roles.critic import Critic
from mrlhf.roles.policy import PolicyModel
from mrlhf.roles.reference import Reference
from mrlhf.roles.reward import RewardModel


@dataclass(frozen=True)
class Job:
    """This rank's part of a run, before any model exists."""

    config: PPOConfig
    models: dict[str, ModelConfig]
    env: LaunchEnv
    sizes: ParallelSizes
    groups: ProcessGroupCollection
    device: torch.device
    dtype: torch.dtype

    @property
    def dp_rank(self) -> int:
        """Which replica this rank belongs to."""
        return int(self.groups.dp.rank())

    @property
    def dp_size(self) -> int:
        """Number of replicas."""
        return int(self.groups.dp.size())


def read_models(config: PPOConfig) -> dict[str, ModelConfig]:
    """The architectures of all roles; ``reward0``, ``reward1``, ... for the reward models.

    Raises:
        CheckpointError: a folder has no readable configuration or weights.
        ConfigError: a folder holds another kind of model than its role needs.
    """
    paths = {"actor": config.actor.path, "reference": config.reference_path, "critic": config.critic_path}
    paths |= {f"reward{index}": path for index, path in enumerate(config.reward_model_paths)}
    models = {role: read_model_config(path) for role, path in paths.items()}
    for path in sorted(set(paths.values())):
        if not is_megatron_folder(path):
            # Opening it reads the headers: a missing or cut-off file is found before any rank waits for another.
            with SafetensorsReader(path) as reader:
                reader.check()
    problems = [_kind_problem(role, path, config) for role, path in paths.items()]
    found = [problem for problem in problems if problem]
    if found:
        raise ConfigError("\n".join(found))
    return models


def _kind_problem(role: str, path: str, config: PPOConfig) -> str | None:
    head = read_head(path)
    if role.startswith("reward") and head != "value":
        return f"reward.sources: {path} is a language model; a reward model is a one-label sequence classifier"
    if role in ("actor", "reference") and head != "lm":
        return f"{role}.path: {path} is a sequence classifier; the {role} is a language model"
    if role == "critic" and config.critic.head == "loaded" and head != "value":
        return f"critic.path: {path} is a language model without a value head; set critic.head to fresh or auto"
    return None


def check_job(config: PPOConfig, models: dict[str, ModelConfig]) -> LaunchEnv:
    """Find the launcher and check all sizes against its world; nothing is started.

    Raises:
        ConfigError: the launcher's variables are inconsistent, or layout, batch sizes, lengths and models do not fit
            together.
    """
    env = detect_launch(os.environ)
    check_run(config, env.world_size, models)
    return env


def start_job(config: PPOConfig, models: dict[str, ModelConfig]) -> Job:
    """Join the other ranks and make the process groups, once `check_job` has found nothing wrong."""
    return _join(config, models, check_job(config, models))


def start_generation_job(config: PPOConfig, model: ModelConfig) -> Job:
    """`start_job` for the actor alone: batch sizes of the training are not looked at."""
    env = detect_launch(os.environ)
    check_sizes(
        config.parallel.sizes(env.world_size),
        {"actor": model},
        max_prompt_length=config.data.max_prompt_length or 1,
        max_response_length=config.rollout.max_response_length,
    )
    return _join(config, {"actor": model}, env)


def _join(config: PPOConfig, models: dict[str, ModelConfig], env: LaunchEnv) -> Job:
    device.install()
    timeout = timedelta(minutes=config.launch.timeout_minutes)
    if not dist.is_initialized():
        env = initialize(env, config.launch.backend, timeout)
    sizes = config.parallel.sizes(env.world_size)
    groups = build_groups(sizes, timeout)
    device.seed_rng_tracker(config.seed, groups.tp.rank())
    return Job(config, models, env, sizes, groups, device.device(), DTYPES[config.precision.dtype])


def build_actor(job: Job) -> Actor:
    """The actor with its optimizer."""
    config = job.config
    chunks = _load(job, "actor", config.actor.path, "lm", dropout=config.actor.dropout, trainable=True)
    trainable = _trainable(job, chunks, config.optimizer.actor)
    return Actor("actor", job.models["actor"], trainable, job.groups)


def build_policy(job: Job) -> PolicyModel:
    """The actor without an optimizer, for generation."""
    chunks = _load(job, "actor", job.config.actor.path, "lm")
    return PolicyModel("actor", job.models["actor"], chunks, job.groups)


def build_critic(job: Job) -> Critic:
    """The critic with its optimizer."""
    chunks = _load(job, "critic", job.config.critic_path, "value", trainable=True, head_init=job.config.critic.head)
    trainable = _trainable(job, chunks, job.config.optimizer.critic)
    return Critic("critic", job.models["critic"], trainable, job.groups)


def build_reference(job: Job) -> Reference:
    """The frozen reference."""
    chunks = _load(job, "reference", job.config.reference_path, "lm")
    return Reference("reference", job.models["reference"], chunks, job.groups)


def build_reward_model(job: Job, index: int) -> RewardModel:
    """The ``index``-th reward model."""
    name = f"reward{index}"
    chunks = _load(job, name, job.config.reward_model_paths[index], "value", head_init="loaded")
    return RewardModel(name, job.models[name], chunks, job.groups)


def _load(
    job: Job,
    role: str,
    path: str,
    head: Head,
    *,
    dropout: float = 0.0,
    trainable: bool = False,
    head_init: str = "auto",
) -> list[torch.nn.Module]:
    model = job.models[role]
    bias = head == "value" and head_init != "fresh" and not is_megatron_folder(path) and has_value_bias(path)
    chunks = build_model(
        model,
        job.sizes,
        job.groups,
        head=head,
        dtype=job.dtype,
        dropout=dropout,
        trainable=trainable,
        value_bias=bias,
    )
    load_weights(
        chunks,
        model,
        Path(path),
        groups=job.groups,
        head=head,
        head_init=head_init,  # type: ignore[arg-type]
        seed=job.config.seed,
    )
    return list(chunks)


def _trainable(job: Job, chunks: list[torch.nn.Module], adam: AdamConfig) -> Trainable:
    settings = AdamSettings(
        lr=adam.lr,
        min_lr=adam.min_lr,
        lr_schedule=adam.lr_schedule,
        warmup_steps=adam.warmup_iterations,
        total_steps=job.config.trainer.iterations,
        weight_decay=adam.weight_decay,
        beta1=adam.beta1,
        beta2=adam.beta2,
        eps=adam.eps,
        clip_grad=adam.clip_grad,
    )
    return Trainable(chunks, job.groups, settings, distributed_optimizer=job.config.optimizer.distributed)
