"""Jobs from configurations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mrlhf.config import check_run
from mrlhf.config_cache import rows_at_once
from mrlhf.config_preferences import DPOConfig, PreferenceConfig, RewardTrainingConfig
from mrlhf.config_schema import PPOConfig
from mrlhf.config_sections import OffloadConfig, RunConfig
from mrlhf.config_supervised import SupervisedConfig
from mrlhf.errors import ConfigError, join_problems
from mrlhf.model_config import ModelConfig
from mrlhf.planner import ParallelSizes, size_problems, token_multiple
from mrlhf.planning.fp8 import layer_problems
from mrlhf.planning.job import ELEMENT_BYTES, Job, Role, Rollout, Rows
from mrlhf.planning.parameters import Head

TRAINED = ("actor", "critic", "model")
"""Roles with an optimizer."""


@dataclass(frozen=True)
class MeanLengths:
    """Mean tokens of prompts and responses (of whole examples, where nothing is generated); None: the longest."""

    prompt: int | None = None
    response: int | None = None


def role_paths(config: RunConfig) -> dict[str, str]:
    """Model folders by role, in the order of `Job.roles`."""
    if isinstance(config, PPOConfig):
        paths = {"actor": config.actor.path}
        if config.ppo.needs_critic:
            paths["critic"] = config.critic_path
        if config.needs_reference:
            paths["reference"] = config.reference_path
        return paths | {f"reward{index}": path for index, path in enumerate(config.reward_model_paths)}
    if isinstance(config, SupervisedConfig):
        paths = {"model": config.model.path}
        return paths | ({"reference": config.reference_path} if isinstance(config, DPOConfig) else {})
    raise TypeError(f"there is no plan of a {type(config).__name__}")


def head_of(config: RunConfig, role: str) -> Head:
    """What stands on top of a role's model."""
    value = role == "critic" or role.startswith("reward") or isinstance(config, RewardTrainingConfig)
    return "value" if value else "lm"


def fp8_role(config: RunConfig, role: str) -> str:
    """The name in ``precision.fp8_roles`` of a run's model: the trained one of SFT and DPO is an actor."""
    if role != "model":
        return role.rstrip("0123456789")
    return "reward" if isinstance(config, RewardTrainingConfig) else "actor"


def check_job(config: RunConfig, world_size: int, models: Mapping[str, ModelConfig]) -> None:
    """Raise one `ConfigError` with everything about the sizes that cannot work, as the run itself would."""
    _check_sizes(config, world_size, models)
    precision, problems = config.precision, []
    for role, model in models.items():
        if precision.fp8_in(fp8_role(config, role), trained=role in TRAINED):
            problems += layer_problems(
                role,
                model,
                role_sizes(config, role, world_size),
                recipe=precision.fp8_recipe,
                bf16_ends=precision.fp8_first_last_layers_bf16,
                emulated=precision.fp8_emulation,
            )
    if problems:
        raise ConfigError(join_problems("these models cannot be in FP8:", problems))


def _check_sizes(config: RunConfig, world_size: int, models: Mapping[str, ModelConfig]) -> None:
    if isinstance(config, PPOConfig):
        check_run(config, world_size, models)
        return
    assert isinstance(config, SupervisedConfig)
    problems = size_problems(
        config.parallel.sizes(world_size),
        models,
        minibatch_size=config.train.batch_size,
        micro_batch_size=config.train.micro_batch_size,
        micro_batch_tokens=config.train.micro_batch_tokens,
        batch_name="train.batch_size",
    )
    if problems:
        raise ConfigError(join_problems("these sizes cannot work together:", problems))


def make_job(
    config: RunConfig, models: Mapping[str, ModelConfig], world_size: int, means: MeanLengths = MeanLengths()
) -> Job:
    """The job of a configuration whose sizes `check_job` has found to work.

    Args:
        config: of a PPO, SFT, reward or DPO run.
        models: architectures by the roles of `role_paths`.
        world_size: ranks.
        means: lengths for FLOPs and times; memory is planned for the longest rows.

    Raises:
        ConfigError: a mean that is longer than the longest, or below 1.
    """
    if isinstance(config, PPOConfig):
        return _ppo_job(config, models, world_size, means)
    assert isinstance(config, SupervisedConfig)
    return _supervised_job(config, models, world_size, means)


def role_sizes(config: RunConfig, role: str, world_size: int) -> ParallelSizes:
    """The layout of a role."""
    return config.sizes_of(role, world_size)


def make_role(config: RunConfig, name: str, model: ModelConfig, world_size: int) -> Role:
    """One model of a run."""
    trained = name in TRAINED
    precision = config.precision
    average = isinstance(config, PPOConfig) and name == "actor" and config.ppo.ema_decay is not None
    return Role(
        name,
        model,
        role_sizes(config, name, world_size),
        head_of(config, name),
        trained=trained,
        average=average,
        fp8=precision.fp8_in(fp8_role(config, name), trained=trained) and not precision.fp8_emulation,
        bf16_ends=precision.fp8_first_last_layers_bf16,
        fp8_recipe=precision.fp8_recipe,
        fp8_history=precision.fp8_amax_history_len,
        recompute=trained and config.parallel_of(name).recompute == "full",
        recompute_modules=config.parallel_of(name).recomputed_modules if trained else (),
        first=config.ranks_of(name, world_size).start,
        offloaded=isinstance(config, PPOConfig) and _offloaded(config.offload, name),
    )


def _offloaded(offload: OffloadConfig, role: str) -> bool:
    if role in TRAINED:
        return offload.optimizer
    return offload.reward if role.startswith("reward") else offload.reference


def _ppo_job(config: PPOConfig, models: Mapping[str, ModelConfig], world_size: int, means: MeanLengths) -> Job:
    roles = tuple(make_role(config, name, models[name], world_size) for name in role_paths(config))
    multiple = _width_multiple(config, roles)
    response = config.rollout.max_response_length
    prompt = config.data.max_prompt_length
    if prompt is None:
        prompt = min(model.max_position_embeddings for model in models.values()) - config.longest_response
    mean_prompt = _mean(means.prompt, prompt, "--prompt-length", "data.max_prompt_length")
    mean_response = _mean(means.response, response, "--response-length", "rollout.max_response_length")
    longest, mean = (_round_up(length + 1, multiple) for length in (prompt + response, mean_prompt + mean_response))
    ppo, inference = config.ppo, config.inference

    def rows(count: int, budget: int | None, width: int, wanted: int) -> Rows:
        """A micro-batch of so many rows, or of a budget of tokens."""
        return Rows(count if budget is None else max(budget // width, 1), width, wanted)

    slots = rows_at_once(
        config,
        models["actor"],
        config.sizes_of("actor", world_size),
        prompt + config.longest_response,
        ELEMENT_BYTES[config.precision.dtype],
    )
    text_length = min(config.ptx.max_length or models["actor"].max_position_embeddings, 10**9)
    text = config.ptx.path is not None
    idle = (("actor",) if ppo.skip_old_logprobs else ()) + (() if ppo.uses_reference else ("reference",))
    text_width = _round_up(text_length + 1, multiple)
    return Job(
        kind="ppo",
        roles=roles,
        dtype=config.precision.dtype,
        distributed_optimizer=config.optimizer.distributed,
        rows=config.rows_per_iteration,
        minibatch=ppo.minibatch_size,
        epochs=ppo.epochs,
        train=rows(ppo.micro_batch_size, ppo.micro_batch_tokens, longest, response),
        train_mean=rows(ppo.micro_batch_size, ppo.micro_batch_tokens, mean, mean_response),
        inference=rows(inference.micro_batch_size, inference.micro_batch_tokens, longest, response),
        inference_mean=rows(inference.micro_batch_size, inference.micro_batch_tokens, mean, mean_response),
        idle_in_inference=idle,
        rollout=Rollout(slots, prompt, config.longest_response, mean_prompt, mean_response),
        entropy=ppo.log_entropy or ppo.entropy_coef != 0,
        row_slots=longest,
        text_rows=config.ptx_batch_size if text else 0,
        text_micro_batch=rows(ppo.micro_batch_size, ppo.micro_batch_tokens, text_width, text_length) if text else None,
        save_optimizer=config.checkpoint.optimizer,
        evaluates=bool(config.trainer.eval_interval),
        fused_kernels=config.precision.kernels != "local",
    )


def _supervised_job(
    config: SupervisedConfig, models: Mapping[str, ModelConfig], world_size: int, means: MeanLengths
) -> Job:
    roles = tuple(make_role(config, name, models[name], world_size) for name in role_paths(config))
    multiple = _width_multiple(config, roles)
    longest = config.data.max_length or min(model.max_position_embeddings for model in models.values())
    length = _mean(means.response, longest, "--response-length", "data.max_length")
    # A preference pair is two rows.
    each = 2 if isinstance(config, PreferenceConfig) else 1
    train, kind = config.train, "sft"
    if isinstance(config, RewardTrainingConfig):
        kind = "reward"
    elif isinstance(config, DPOConfig):
        kind = "dpo"

    def rows(tokens: int) -> Rows:
        """A micro-batch of rows of so many tokens."""
        width = _round_up(tokens + 1, multiple)
        count = (
            train.micro_batch_size if train.micro_batch_tokens is None else train.micro_batch_tokens // width // each
        )
        return Rows(max(count, 1) * each, width, tokens)

    frozen = isinstance(config, DPOConfig)
    return Job(
        kind=kind,
        roles=roles,
        dtype=config.precision.dtype,
        distributed_optimizer=config.optimizer.distributed,
        rows=train.batch_size * each,
        minibatch=train.batch_size * each,
        epochs=1,
        train=rows(longest),
        train_mean=rows(length),
        inference=rows(longest) if frozen else None,
        inference_mean=rows(length) if frozen else None,
        row_slots=_round_up(longest + 1, multiple),
        save_optimizer=config.checkpoint.optimizer,
        fused_kernels=config.precision.kernels != "local",
    )


def _width_multiple(config: RunConfig, roles: tuple[Role, ...]) -> int:
    """Widths of rows are multiples of what every model's layout and number format ask for."""
    return math.lcm(*(token_multiple(role.sizes, config.precision.token_multiple) for role in roles))


def _mean(given: int | None, longest: int, option: str, key: str) -> int:
    if given is None:
        return longest
    if not 1 <= given <= longest:
        raise ConfigError(f"{option} {given} must be from 1 to the longest, {longest} ({key})")
    return given


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
