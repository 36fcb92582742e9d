"""The models of a PPO run on this rank."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TypeAlias, TypeVar

import torch

from mrlhf.checkpoint.convert import stand_by_load
from mrlhf.checkpoint.hf import read_head
from mrlhf.config import check_run, layout_problems
from mrlhf.config_cache import cache_problems
from mrlhf.config_rewards import RewardModelSource
from mrlhf.config_schema import PPOConfig
from mrlhf.config_sections import AdamConfig
from mrlhf.data.prompts import PromptDataset
from mrlhf.errors import ConfigError, join_problems
from mrlhf.megatron.optimizer import Trainable
from mrlhf.model_config import ModelConfig
from mrlhf.parallel.launch_env import LaunchEnv, detect_launch, explained
from mrlhf.roles.actor import Actor
from mrlhf.roles.critic import Critic
from mrlhf.roles.model import RoleModel
from mrlhf.roles.policy import PolicyModel
from mrlhf.roles.reference import Reference
from mrlhf.roles.reward import RewardModel
from mrlhf.trainer.inputs import response_limit
from mrlhf.trainer.job import Job, join, load_model, make_trainable, read_architectures
from mrlhf.trainer.precision import cache_element_bytes, precision_problems

PPOJob: TypeAlias = Job[PPOConfig]
R = TypeVar("R", bound=RoleModel)
TRAINED = ("actor", "critic")
"""Roles with an optimizer."""


def read_models(
    config: PPOConfig, roles: Collection[str] = ("actor", "reference", "critic", "reward")
) -> dict[str, ModelConfig]:
    """The architectures of ``roles``; ``reward0``, ``reward1``, ... for the reward models.

    Raises:
        CheckpointError: a folder has no readable configuration or weights.
        ConfigError: a folder holds another kind of model than its role needs.
    """
    paths = {"actor": config.actor.path}
    if config.needs_reference:
        paths["reference"] = config.reference_path
    if config.ppo.needs_critic:
        paths["critic"] = config.critic_path
    paths |= {f"reward{index}": path for index, path in enumerate(config.reward_model_paths)}
    paths = {role: path for role, path in paths.items() if role.rstrip("0123456789") in roles}
    models = read_architectures(paths)
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
    each = cache_element_bytes(config, models, trained=TRAINED)
    with explained(env, config.smallest_world):
        check_run(config, env.world_size, models, cache_element_bytes=each)
    _check_precision(config, models, env, trained=TRAINED)
    return env


def _check_precision(
    config: PPOConfig, models: dict[str, ModelConfig], env: LaunchEnv, *, trained: Collection[str]
) -> None:
    problems = precision_problems(config, models, env, trained=trained)
    if problems:
        raise ConfigError(join_problems("these number formats and kernels cannot be had:", problems))


def start_job(config: PPOConfig, models: dict[str, ModelConfig]) -> PPOJob:
    """Join the other ranks and make the process groups, once `check_job` has found nothing wrong."""
    return join(config, models, check_job(config, models))


def check_inference(config: PPOConfig, models: dict[str, ModelConfig], *, max_response_length: int) -> LaunchEnv:
    """`check_job` for a run without training, whose batch sizes are not looked at."""
    env = detect_launch(os.environ)
    each = cache_element_bytes(config, models, trained=())
    with explained(env, config.smallest_world):
        problems = layout_problems(
            config,
            env.world_size,
            models,
            max_response_length=max_response_length,
            training=False,
            cache_element_bytes=each,
        )
        if problems:
            raise ConfigError(join_problems("these sizes cannot work together:", problems))
    _check_precision(config, models, env, trained=())
    return env


def check_cache(
    config: PPOConfig,
    models: dict[str, ModelConfig],
    env: LaunchEnv,
    dataset: PromptDataset,
    max_response_length: int,
    *,
    held_out: PromptDataset | None = None,
    trained: Collection[str] = TRAINED,
) -> None:
    """Check ``rollout.kv_cache_memory`` again, now that the longest prompts are known.

    Args:
        config: of the run.
        models: architectures by role.
        env: from `check_job` or `check_inference`.
        dataset: prompts of responses of ``max_response_length``.
        max_response_length: in tokens.
        held_out: prompts of evaluations during training.
        trained: roles that are.

    Raises:
        ConfigError: it does not hold the rows that generation needs at least.
    """
    each = cache_element_bytes(config, models, trained=trained)
    for prompts, limit in ((dataset, max_response_length), (held_out, response_limit(config))):
        longest = 0 if prompts is None else max((len(prompt.ids) for prompt in prompts.prompts), default=0)
        if not longest:
            continue
        problems = cache_problems(config, env.world_size, models, limit, element_bytes=each, longest_prompt=longest)
        if problems:
            raise ConfigError(join_problems("these sizes cannot work together:", problems))


def build_actor(job: PPOJob) -> Actor:
    """The actor with its optimizer."""
    config = job.config
    chunks = load_model(
        job,
        "actor",
        config.actor.path,
        "lm",
        dropout=config.actor.dropout,
        trainable=True,
        moe_aux_loss_coef=config.actor.moe_aux_loss_coef,
    )
    # Its schedule rests while the critic warms up.
    steps = config.trainer.iterations - config.ppo.critic_warmup_iterations
    trainable = _trainable(job, "actor", chunks, config.optimizer.actor, steps)
    return Actor("actor", job.models["actor"], trainable, job.groups)


def build_policy(job: PPOJob) -> PolicyModel:
    """The actor without an optimizer, for generation."""
    chunks = load_model(job, "actor", job.config.actor.path, "lm")
    return PolicyModel("actor", job.models["actor"], chunks, job.groups)


def build_critic(job: PPOJob) -> Critic:
    """The critic with its optimizer."""
    chunks = load_model(
        job, "critic", job.config.critic_path, "value", trainable=True, head_init=job.config.critic.head
    )
    trainable = _trainable(job, "critic", chunks, job.config.optimizer.critic, job.config.trainer.iterations)
    return _at_home(job, Critic("critic", job.models["critic"], trainable, job.layout_of("critic").groups))


def build_reference(job: PPOJob) -> Reference:
    """The frozen reference."""
    chunks = load_model(job, "reference", job.config.reference_path, "lm")
    return Reference("reference", job.models["reference"], chunks, job.groups)


def build_reward_model(job: PPOJob, index: int) -> RewardModel:
    """The ``index``-th reward model."""
    name = f"reward{index}"
    chunks = load_model(job, name, job.config.reward_model_paths[index], "value", head_init="loaded")
    return _at_home(job, RewardModel(name, job.models[name], chunks, job.layout_of(name).groups))


def build_reward_models(job: PPOJob) -> list[tuple[RewardModel, float]]:
    """All of them, with their weights."""
    sources = [source for source in job.config.reward.sources if isinstance(source, RewardModelSource)]
    return [(build_reward_model(job, index), source.weight) for index, source in enumerate(sources)]


def wait_for_critic_ranks(job: PPOJob) -> None:
    """On the actor's ranks, at the place where those of critic and reward models build theirs."""
    for role in job.config.on_critic_ranks:
        stand_by_load(job.config.critic_path if role == "critic" else _reward_path(job, role))


def wait_for_actor_ranks(job: PPOJob) -> None:
    """On the ranks of critic and reward models, at the place where the others build actor and reference."""
    stand_by_load(job.config.actor.path)
    if job.config.needs_reference:
        stand_by_load(job.config.reference_path)


def described_places(job: PPOJob) -> str:
    """The layout in one line; of both parts where critic and reward models have ranks of their own."""
    if job.split is None:
        return job.sizes.describe()
    theirs, critics = job.split.critic_ranks, ", ".join(job.config.on_critic_ranks)
    actors = "actor, reference" if job.config.needs_reference else "actor"
    main = job.split.sizes[job.config.on_critic_ranks[0]]
    return (
        f"{actors} on ranks 0-{theirs.start - 1}: {job.split.sizes['actor'].describe()}; {critics} on ranks "
        f"{theirs.start}-{theirs.stop - 1}: {main.describe()}"
    )


def _reward_path(job: PPOJob, role: str) -> str:
    return job.config.reward_model_paths[int(role.removeprefix("reward"))]


def _at_home(job: PPOJob, model: R) -> R:
    model.home = job.home_of(model.name)
    return model


def _trainable(job: PPOJob, role: str, chunks: list[torch.nn.Module], adam: AdamConfig, steps: int) -> Trainable:
    return make_trainable(job, role, chunks, adam, total_steps=steps, distributed=job.config.optimizer.distributed)
