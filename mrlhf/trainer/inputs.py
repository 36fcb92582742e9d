"""What a run reads besides models: the prompts, the tokenizer's ids, the reward functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from mrlhf.config_rewards import RewardFunctionSource, RewardRemoteSource
from mrlhf.config_schema import PPOConfig
from mrlhf.data.prompts import PromptDataset, load_prompts
from mrlhf.data.sft import SFTExample, load_sft
from mrlhf.data.stream import ExampleSet
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.data.vocabulary import check_same_vocabulary
from mrlhf.errors import ConfigError
from mrlhf.model_config import ModelConfig
from mrlhf.roles.remote_reward import RemoteReward
from mrlhf.roles.reward import RewardFunction, ScoreSource
from mrlhf.rollout.scheduler import Ends
from mrlhf.rollout.stop_strings import StopStrings


def reward_functions(config: PPOConfig) -> list[tuple[ScoreSource, float]]:
    """The functions, imported, and the servers of ``reward.sources``, with their weights."""
    found: list[tuple[ScoreSource, float]] = []
    for source in config.reward.sources:
        if isinstance(source, RewardFunctionSource):
            found.append((RewardFunction(source.target, retries=source.retries), source.weight))
        elif isinstance(source, RewardRemoteSource):
            remote = RemoteReward(
                source.url,
                batch_size=source.batch_size,
                timeout_seconds=source.timeout_seconds,
                retries=source.retries,
                headers=source.headers,
            )
            found.append((remote, source.weight))
    return found


def check_fields(functions: Sequence[tuple[ScoreSource, float]], *datasets: PromptDataset) -> None:
    """Refuse functions that cannot take the other fields of the prompt files. Raises `ConfigError`."""
    for dataset in datasets:
        fields = {key for prompt in dataset.prompts for key in prompt.meta}
        for function, _ in functions:
            function.check_fields(fields)


def check_vocabulary(config: PPOConfig, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuse a tokenizer or end ids that the actor has no embedding for, and models with other tokens by the same ids.

    Raises:
        ConfigError: naming the keys and a way out.
    """
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"tokenizer.path: {tokenizer.path} has {tokenizer.vocab_size} ids, the actor's vocabulary is "
            f"{vocab_size}; use the tokenizer of the actor"
        )
    outside = [token for token in config.rollout.stop_token_ids if token >= vocab_size]
    if outside:
        raise ConfigError(f"rollout.stop_token_ids: {outside} are outside the actor's vocabulary of {vocab_size}")
    # The critic's folder is often that of the reward model, which is the key to name.
    folders = sorted(config.model_folders().items(), key=lambda item: item[0] == "critic.path")
    check_same_vocabulary({"tokenizer.path": config.tokenizer_path, **dict(folders)})


def read_dataset(config: PPOConfig, tokenizer: Tokenizer, models: Iterable[ModelConfig]) -> PromptDataset:
    """The prompts as the ``data`` section says; by default as long as the shortest of ``models`` allows."""
    return _read(config, config.data.prompts, tokenizer, models, config.rollout.max_response_length)


def response_limit(config: PPOConfig) -> int:
    """Longest response of an evaluation, in tokens."""
    return config.evaluation.max_response_length or config.rollout.max_response_length


def read_held_out(config: PPOConfig, tokenizer: Tokenizer, models: Iterable[ModelConfig]) -> PromptDataset:
    """The prompts of evaluations: at most ``evaluation.max_prompts``."""
    path = config.evaluation.prompts or config.data.prompts
    dataset = _read(config, path, tokenizer, models, response_limit(config))
    return replace(dataset, prompts=dataset.prompts[: config.evaluation.max_prompts])


def read_texts(config: PPOConfig, tokenizer: Tokenizer, actor: ModelConfig) -> ExampleSet[SFTExample]:
    """The texts of the ``ptx`` section, every token of which is learned. Raises `DataError` naming file and line."""
    assert config.ptx.path is not None
    return load_sft(
        config.ptx.path,
        tokenizer,
        max_length=config.ptx.max_length or actor.max_position_embeddings,
        learn_on="all",
        overlong=config.ptx.overlong,
        section="ptx",
        skip_bad_lines=config.ptx.skip_bad_lines,
    )


def _read(
    config: PPOConfig, path: str, tokenizer: Tokenizer, models: Iterable[ModelConfig], response_length: int
) -> PromptDataset:
    data = config.data
    longest = min(model.max_position_embeddings for model in models)
    room = longest - response_length
    if room < (data.max_prompt_length or 1):
        raise ConfigError(
            f"responses of {response_length} tokens to prompts of {data.max_prompt_length or 1} and more in {path} are "
            f"over the models' length of {longest}; lower rollout.max_response_length, evaluation.max_response_length "
            "or data.max_prompt_length"
        )
    return load_prompts(
        path,
        tokenizer,
        max_prompt_length=data.max_prompt_length or room,
        prompt_key=data.prompt_key,
        overlong=data.overlong,
        skip_bad_lines=data.skip_bad_lines,
    )


def stop_ids(config: PPOConfig, tokenizer: Tokenizer, model_ids: tuple[int, ...]) -> list[int]:
    """Every id that ends a response: the tokenizer's, the model's, and those of the configuration."""
    return list(dict.fromkeys([*tokenizer.eos_ids, *model_ids, *config.rollout.stop_token_ids]))


def stop_strings(config: PPOConfig, tokenizer: Tokenizer) -> Ends | None:
    """What tells whether ``rollout.stop_strings`` end a response; None without any."""
    strings = config.rollout.stop_strings
    return StopStrings(strings, tokenizer.decode) if strings else None
