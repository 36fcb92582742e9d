"""What a training on written examples reads and checks before anything is started."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

from mrlhf.checkpoint.hf_config import read_model_config
from mrlhf.config_preferences import RewardTrainingConfig
from mrlhf.config_supervised import Files, SupervisedConfig
from mrlhf.data.stream import ExampleSet, split_examples
from mrlhf.data.tokenizer import Tokenizer, load_tokenizer
from mrlhf.data.vocabulary import check_same_vocabulary
from mrlhf.errors import ConfigError, join_problems
from mrlhf.model_config import ModelConfig
from mrlhf.parallel.launch_env import LaunchEnv, detect_launch, explained
from mrlhf.planner import size_problems
from mrlhf.trainer.job import read_architectures
from mrlhf.trainer.outputs import check_output_folder, check_writers
from mrlhf.trainer.precision import precision_problems

E = TypeVar("E")
MODEL = "model"
"""Name of the trained model's role and of its exported folder."""


def check_job(config: SupervisedConfig, models: dict[str, ModelConfig]) -> LaunchEnv:
    """Find the launcher and check all sizes against its world; nothing is started.

    Raises:
        ConfigError: the launcher's variables are inconsistent, or layout, batch sizes, lengths and models do not fit
            together.
    """
    env = detect_launch(os.environ)
    train = config.train
    problems = size_problems(
        config.parallel.sizes(env.world_size),
        models,
        minibatch_size=train.batch_size,
        micro_batch_size=train.micro_batch_size,
        micro_batch_tokens=train.micro_batch_tokens,
        batch_name="train.batch_size",
    )
    longest = config.data.max_length
    problems += [
        f"{role}: data.max_length {longest} is over the model's length of {model.max_position_embeddings}; lower it"
        for role, model in models.items()
        if longest is not None and longest > model.max_position_embeddings
    ]
    with explained(env, config.smallest_world):
        masked = isinstance(config, RewardTrainingConfig) and config.reward.loss == "deepspeed_chat"
        problems += _context_problems(config, masked)
        if problems:
            raise ConfigError(join_problems("these sizes cannot work together:", problems))
    formats = precision_problems(config, models, env, trained=(MODEL,), masked=masked)
    if formats:
        raise ConfigError(join_problems("these number formats and kernels cannot be had:", formats))
    return env


def _context_problems(config: SupervisedConfig, masked: bool) -> list[str]:
    """What does not go together with context parallelism."""
    size, found = config.parallel.context_parallel_size, []
    if size > 1 and config.train.packing:
        found.append(f"train.packing and context_parallel_size {size} exclude each other; set train.packing=false")
    if size > 1 and masked:
        found.append(f"reward.loss deepspeed_chat has attention masks, which context_parallel_size {size} cannot cut; "
                     "set reward.loss=pairwise or context_parallel_size=1")  # fmt: skip
    return found


def read_start_model(config: SupervisedConfig) -> ModelConfig:
    """The architecture of ``model.path``, after a look at its weight files unless they are not needed.

    Raises:
        CheckpointError: no readable configuration or weights.
    """
    if config.model.init == "random":
        return read_model_config(config.model.path)
    return read_architectures({MODEL: config.model.path})[MODEL]


def example_length(config: SupervisedConfig, model: ModelConfig) -> int:
    """The longest example in tokens."""
    return config.data.max_length or model.max_position_embeddings


def check_supervised_output(config: SupervisedConfig) -> None:
    """`check_output_folder` for everything that the configuration reads. Raises `ConfigError`."""
    files = [path for path in config.data_files().values() if path]
    inputs = [*config.model_folders().values(), config.tokenizer_path, *files]
    trainer = config.trainer
    check_output_folder(config.output_dir, [MODEL], inputs, overwrite=trainer.overwrite, resume=trainer.resume)
    check_writers(config.trainer)


def check_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuse a tokenizer whose ids the model has no embedding for. Raises `ConfigError`."""
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"tokenizer.path: {tokenizer.path} has {tokenizer.vocab_size} ids, the model's vocabulary is "
            f"{vocab_size}; use the tokenizer of the model"
        )


def check_tokens_of_start(config: SupervisedConfig) -> None:
    """Refuse a tokenizer that means other text by the ids that the start model has learned.

    One id in twenty may differ: fine-tuning often gives reserved tokens new names.

    Raises:
        ConfigError: naming the first id that differs.
    """
    if config.model.init == "loaded":
        folders = {"tokenizer.path": config.tokenizer_path, **config.model_folders()}
        check_same_vocabulary(folders, tolerated_share=0.05)


def read_start(config: SupervisedConfig, models: Mapping[str, ModelConfig]) -> tuple[Tokenizer, int]:
    """The tokenizer, checked against the models, and the longest example that all of them take.

    Raises:
        ConfigError: naming the key.
        DataError: no tokenizer can be read.
    """
    tokenizer = load_tokenizer(config.tokenizer_path, config.tokenizer.chat_template)
    for model in models.values():
        check_tokenizer(tokenizer, model.vocab_size)
    check_tokens_of_start(config)
    return tokenizer, min(example_length(config, model) for model in models.values())


def read_and_hold_out(
    config: SupervisedConfig, read: Callable[[Files], ExampleSet[E]], key: Callable[[E], Hashable]
) -> tuple[ExampleSet[E], ExampleSet[E] | None]:
    """Training and held-out examples as the ``data`` section says.

    Args:
        config: of the run.
        read: reads files.
        key: examples with the same one stay together, so that nothing held out was trained on.
    """
    train, data = read(config.data.train), config.data
    if data.validation:
        return train, read(data.validation)
    if data.validation_fraction:
        return split_examples(train, data.validation_fraction, seed=config.seed, key=key)
    return train, None


def total_steps(config: SupervisedConfig, examples: int) -> int:
    """Optimizer steps of the run.

    Raises:
        ConfigError: the warm-up is longer.
    """
    steps = config.trainer.iterations or math.ceil(config.trainer.epochs * examples / config.train.batch_size)
    warmup = config.optimizer.warmup_iterations
    if warmup > steps:
        raise ConfigError(
            f"optimizer.warmup_iterations {warmup} are over the run's {steps} steps ({examples} examples in batches of "
            f"{config.train.batch_size}, {config.trainer.epochs:g} epochs); shorten the warm-up or lengthen the run"
        )
    return steps
