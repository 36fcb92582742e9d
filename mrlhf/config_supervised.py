"""The configuration of training on written examples: what all such runs share, and supervised fine-tuning.

The objects are frozen and refuse unknown keys. Read one with ``mrlhf.config.load_config(path, overrides, SFTConfig)``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from mrlhf.config_sections import (
    AdamConfig,
    Dropout,
    NaturalInt,
    NonNegativeFloat,
    OutputConfig,
    PositiveFloat,
    PositiveInt,
    RunConfig,
    Section,
    template_file,
)


def _as_tuple(value: object) -> object:
    """One file may be given without the brackets of a list."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


Files = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_as_tuple)]


class StartModelConfig(Section):
    """The model that is trained."""

    path: str = Field(description="Hugging Face folder of the model, or one written by `mrlhf convert import`")
    init: Literal["loaded", "random"] = Field(
        "loaded", description="random: only the architecture is read (config.json), the weights are drawn by the seed"
    )
    dropout: Dropout = Field(0.0, description="dropout of the training passes")


class ExampleDataConfig(Section):
    """The examples to learn from."""

    train: Files = Field(description="file or list of files with the training examples, one a line")
    validation: Files = Field((), description="file or list of files with held-out examples")
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="share of the training examples that is held out, instead of files; the seed says which"
    )
    max_length: Annotated[int, Field(ge=2)] | None = Field(
        None, description="longest example in tokens; null: the model's length"
    )
    overlong: Literal["error", "drop", "truncate"] = Field(
        "error", description="longer examples: refuse, leave out and count, or cut at the end and count"
    )
    skip_bad_lines: bool = Field(False, description="leave malformed lines out and count them")
    shuffle: bool = Field(True, description="a new order of the examples in every pass over them")

    @model_validator(mode="after")
    def _one_validation_set(self) -> ExampleDataConfig:
        problems = []
        if not self.train:
            problems.append("train names no file; give at least one")
        if self.validation and self.validation_fraction:
            problems.append(
                f"validation_fraction {self.validation_fraction} and validation files exclude each other; set one"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self


class SFTDataConfig(ExampleDataConfig):
    """The texts to learn. A line has ``messages``, or a prompt and a response, or plain ``text``."""

    prompt_key: str = Field("prompt", min_length=1, description="field of the prompt, beside a response")
    response_key: str = Field("response", min_length=1, description="field of the response")
    messages_key: str = Field("messages", min_length=1, description="field of chat messages")
    text_key: str = Field("text", min_length=1, description="field of plain text, which is learned as a whole")
    learn_on: Literal["response", "all"] = Field(
        "response", description="tokens in the loss: responses (the assistant's messages), or all"
    )


class BatchConfig(Section):
    """What one optimizer step works on."""

    batch_size: PositiveInt = Field(description="examples of one optimizer step, over all ranks")
    micro_batch_size: PositiveInt = Field(1, description="examples of one forward and backward pass on one rank")
    micro_batch_tokens: PositiveInt | None = Field(
        None, description="tokens of one forward and backward pass, padding included, instead of a number of examples"
    )
    packing: bool = Field(
        False, description="lay the rows of a micro-batch one after the other without padding; changes speed only"
    )


class SupervisedAdamConfig(AdamConfig):
    """AdamW and its learning rate schedule; the rate changes with every step."""

    lr: NonNegativeFloat = Field(1e-5, description="highest learning rate")
    distributed: bool = Field(False, description="divide optimizer states over data-parallel ranks")


class SupervisedTrainerConfig(OutputConfig):
    """Length and output of the run."""

    epochs: PositiveFloat = Field(1.0, description="passes over the training examples, rounded up to whole batches")
    iterations: PositiveInt | None = Field(None, description="optimizer steps; null: as many as epochs says")
    eval_interval: NaturalInt = Field(0, description="steps between validations; 0: only at the end")
    max_bad_steps: NaturalInt = Field(
        10, description="steps in a row that may be skipped, as their gradients are not finite, before the run is ended"
    )
    output_dir: str = Field("runs/sft", min_length=1, description="folder for metrics and the exported model")
    export_interval: NaturalInt = Field(0, description="steps between exports to model-000100, ...; 0: only at the end")


class SupervisedConfig(RunConfig):
    """What runs on written examples share; subclasses add their objective and set the type of ``data``."""

    model: StartModelConfig = Field(description="the trained model")
    data: ExampleDataConfig = Field(description="the examples")
    train: BatchConfig = Field(description="batches")
    optimizer: SupervisedAdamConfig = Field(default_factory=SupervisedAdamConfig, description="the optimizer")
    trainer: SupervisedTrainerConfig = Field(default_factory=SupervisedTrainerConfig, description="length and output")

    @property
    def tokenizer_path(self) -> str:
        """The folder or file of the tokenizer."""
        return self.tokenizer.path or self.model.path

    @property
    def output_dir(self) -> Path:
        """The run's folder."""
        return Path(self.trainer.output_dir)

    def model_folders(self) -> dict[str, str]:
        """Folders that must hold a model, by key."""
        return {"model.path": self.model.path}

    def data_files(self) -> dict[str, str | None]:
        """Files that must exist where they are given, by key."""
        files: dict[str, str | None] = {"tokenizer.chat_template": template_file(self.tokenizer.chat_template)}
        for key, paths in (("train", self.data.train), ("validation", self.data.validation)):
            names = [f"data.{key}"] if len(paths) == 1 else [f"data.{key}[{i}]" for i in range(len(paths))]
            files |= dict(zip(names, paths, strict=True))
        return files

    @model_validator(mode="after")
    def _fits_together(self) -> SupervisedConfig:
        problems = []
        steps, warmup = self.trainer.iterations, self.optimizer.warmup_iterations
        if steps is not None and warmup > steps:
            problems.append(f"optimizer.warmup_iterations {warmup} are over trainer.iterations {steps}")
        held_out = self.data.validation or self.data.validation_fraction
        if self.trainer.eval_interval and not held_out:
            problems.append(
                f"trainer.eval_interval {self.trainer.eval_interval} needs held-out examples; set data.validation or "
                "data.validation_fraction"
            )
        tokens, longest = self.train.micro_batch_tokens, self.data.max_length
        if tokens is not None and longest is not None and tokens < longest + 1:
            problems.append(
                f"train.micro_batch_tokens {tokens} cannot hold one example of data.max_length {longest} and the slot "
                f"after it; raise it to at least {longest + 1}"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self


class SFTConfig(SupervisedConfig):
    """Everything that defines a run of supervised fine-tuning."""

    data: SFTDataConfig = Field(description="the texts to learn")
