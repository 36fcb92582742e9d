"""The parts of a configuration that every kind of run shares: layout, precision, tokenizer, optimizer, launch, output.

The objects are frozen and refuse unknown keys.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from mrlhf.config_base import Dropout as Dropout
from mrlhf.config_base import FiniteFloat as FiniteFloat
from mrlhf.config_base import Fraction as Fraction
from mrlhf.config_base import NaturalInt, NonNegativeFloat, PositiveFloat, PositiveInt, Section, Seed
from mrlhf.config_base import Temperature as Temperature
from mrlhf.config_parallel import ParallelConfig
from mrlhf.planner import ParallelSizes

Dtype = Literal["fp32", "bf16", "fp16"]

Fp8Recipe = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]
Fp8Role = Literal["actor", "critic", "reference", "reward"]
FP8_TOKENS: dict[Fp8Recipe, int] = {"delayed": 16, "tensorwise": 16, "blockwise": 16, "mxfp8": 32}
"""Tokens of a rank in every FP8 product are a multiple of this (Megatron-Core's ``get_fp8_align_size``)."""


class PrecisionConfig(Section):
    """Number formats and kernels."""

    dtype: Dtype = Field("fp32", description="format of weights and activations; optimizer states stay in fp32")
    kernels: Literal["auto", "local", "te"] = Field(
        "auto",
        description="layers and optimizer: auto: fused ones where they are installed and run; local: Megatron's and "
        "torch's own; te: Transformer Engine's, or the run is refused",
    )
    compile: bool = Field(
        False,
        description="torch.compile of dense layers in training passes; needs a C++ compiler on CPUs, and no "
        "collectives in layers",
    )
    fp8: Literal["hybrid", "e4m3"] | None = Field(
        None, description="linear layers in FP8; hybrid: e4m3, gradients e5m2; e4m3: all e4m3; null: no FP8"
    )
    fp8_recipe: Fp8Recipe = Field(
        "tensorwise",
        description="scales: tensorwise: from each tensor itself; delayed: from the steps before; blockwise, mxfp8: by "
        "block (mxfp8 needs Blackwell)",
    )
    fp8_margin: NaturalInt = Field(0, description="delayed: scales are divided by 2 to this power")
    fp8_amax_history_len: PositiveInt = Field(1024, description="delayed: steps whose largest values are remembered")
    fp8_amax_compute_algo: Literal["max", "most_recent"] = Field(
        "max", description="delayed: scale by the largest value of the history, or by the newest"
    )
    fp8_first_last_layers_bf16: NaturalInt = Field(
        0, description="layers at either end that stay in precision.dtype; not with delayed"
    )
    fp8_roles: tuple[Fp8Role, ...] | None = Field(
        None, description="models with FP8 layers; null: all (delayed: those that are trained)"
    )
    fp8_emulation: bool = Field(
        False, description="round to FP8 values in ordinary kernels (tensorwise and delayed), on any machine"
    )

    def fp8_in(self, role: str, *, trained: bool) -> bool:
        """Whether the model of ``role`` (``reward0``, ``reward1``, ... too) has FP8 layers."""
        if self.fp8 is None:
            return False
        if self.fp8_roles is None:
            # Delayed scales come from training passes; a frozen model would keep the first one, 1, for ever.
            return trained or self.fp8_recipe != "delayed"
        return role.rstrip("0123456789") in self.fp8_roles

    @property
    def token_multiple(self) -> int:
        """Tokens on a rank are a multiple of it, in every pass of the run; 1 without FP8."""
        return FP8_TOKENS[self.fp8_recipe] if self.fp8 is not None else 1

    @model_validator(mode="after")
    def _formats_that_exist(self) -> PrecisionConfig:
        # Without fp8 the rest may stay, so that one override turns FP8 off.
        problems = self._fp8_problems() if self.fp8 is not None else self._unused("fp8_emulation", "without fp8")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _unused(self, prefix: str, why: str) -> list[str]:
        fields = type(self).model_fields
        given = [n for n, f in fields.items() if n.startswith(prefix) and getattr(self, n) != f.default]
        return [f"{name} has no meaning {why}; leave it out" for name in given]

    def _fp8_problems(self) -> list[str]:
        recipe, problems = self.fp8_recipe, []
        if recipe == "delayed":
            if self.fp8_first_last_layers_bf16:
                problems.append(
                    f"fp8_first_last_layers_bf16 {self.fp8_first_last_layers_bf16} cannot go with fp8_recipe delayed, "
                    "which collects its scales over all layers of a pass; use fp8_recipe=tensorwise, or 0 layers"
                )
        else:
            why = f"with fp8_recipe {recipe}, which keeps no history"
            problems += self._unused("fp8_margin", why) + self._unused("fp8_amax_", why)
        if self.fp8_roles is not None and not self.fp8_roles:
            problems.append("fp8_roles is empty; name at least one model, or leave fp8 out")
        if not self.fp8_emulation:
            if self.dtype == "fp32":
                problems.append(
                    "fp8 needs dtype bf16 or fp16, since Transformer Engine's layers are not used for fp32; set "
                    "dtype=bf16, or fp8_emulation=true"
                )
            if self.kernels == "local":
                problems.append(
                    "kernels=local leaves out Transformer Engine, which fp8 needs; set kernels=auto, or "
                    "fp8_emulation=true"
                )
            return problems
        if recipe in ("blockwise", "mxfp8"):
            problems.append(
                f"fp8_emulation knows the recipes tensorwise and delayed, not {recipe}; choose one of them, or run on "
                "a GPU without fp8_emulation"
            )
        if self.kernels == "te":
            problems.append("fp8_emulation is in the local layers; set kernels=auto, or fp8_emulation=false")
        return problems


class TokenizerConfig(Section):
    """Text to token ids and back."""

    path: str | None = Field(None, description="Hugging Face folder or SentencePiece .model file; null: the actor's")
    chat_template: str | None = Field(None, description="Jinja source or a file with it; null: the tokenizer's")


class InferenceConfig(Section):
    """The passes without gradient: log-probs, values and scores of the sampled rows."""

    micro_batch_size: PositiveInt = Field(8, description="rows of one forward pass on one rank")
    micro_batch_tokens: PositiveInt | None = Field(
        None,
        description="tokens of one forward pass, padding included, instead of micro_batch_size rows; a longer row is "
        "passed alone",
    )
    packing: bool = Field(
        False, description="lay the rows of a micro-batch one after the other without padding; changes speed only"
    )


class AdamConfig(Section):
    """AdamW and its learning rate schedule; the rate changes once per iteration."""

    lr: NonNegativeFloat = Field(1e-6, description="highest learning rate")
    min_lr: NonNegativeFloat = Field(0.0, description="learning rate at the end of a linear or cosine schedule")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="course after the warm-up")
    warmup_iterations: NaturalInt = Field(0, description="iterations over which the rate rises from 0")
    weight_decay: NonNegativeFloat = Field(0.0, description="decoupled decay of matrices; biases and norms have none")
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="decay of the mean of gradients")
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(0.95, description="decay of the mean of squared gradients")
    eps: PositiveFloat = Field(1e-8, description="added to the root of the mean square")
    clip_grad: NonNegativeFloat = Field(1.0, description="largest gradient norm; 0: no clipping")

    @model_validator(mode="after")
    def _order_of_rates(self) -> AdamConfig:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr} is over lr {self.lr}; lower min_lr or raise lr")
        return self


def template_file(chat_template: str | None) -> str | None:
    """The file that ``tokenizer.chat_template`` names; None where it is Jinja source itself."""
    if chat_template is None or "{" in chat_template or "\n" in chat_template:
        return None
    return chat_template


class LaunchConfig(Section):
    """How ranks talk to each other."""

    backend: Literal["auto", "gloo", "nccl"] = Field("auto", description="auto: nccl where CUDA is present, else gloo")
    timeout_minutes: PositiveFloat = Field(60.0, description="longest wait in any collective of any group")


class OffloadConfig(Section):
    """What waits in (pinned) host memory while nothing needs it; for GPUs, whose memory it frees for other phases."""

    reference: bool = Field(False, description="the reference's weights, outside inference")
    reward: bool = Field(False, description="the reward models' weights, outside inference")
    optimizer: bool = Field(
        False, description="moments and fp32 weights of actor and critic, outside the updates; gradients are freed"
    )


class OutputConfig(Section):
    """Output of a run; each kind of run adds its length."""

    overwrite: bool = Field(False, description="take the place of an earlier run in output_dir; else it is refused")
    export: bool = Field(True, description="write the trained models as Hugging Face folders at the end")
    export_dtype: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="number format of exported weights; auto: the wider of the start's and precision.dtype"
    )
    export_interval: NaturalInt = Field(
        0, description="iterations between exports to actor-000100, critic-000100, ...; 0: only at the end"
    )
    resume: str = Field(
        "never",
        min_length=1,
        description="auto: go on from the newest checkpoint in output_dir, else begin; never; or a checkpoint's folder",
    )
    weights_only: bool = Field(
        False, description="take the weights of the checkpoint alone, and begin at 0 with fresh optimizers"
    )
    allow_changes: bool = Field(False, description="go on though data, models or seed are not those of the checkpoint")
    time_limit: PositiveFloat | None = Field(
        None,
        description="minutes since the start (under torchrun: its own) in which to save and stop (exit status 75)",
    )
    tensorboard: bool = Field(True, description="write TensorBoard events beside metrics.jsonl")
    wandb: bool = Field(False, description="log to Weights & Biases, where installed")
    progress: Literal["auto", "rich", "plain", "off"] = Field(
        "auto", description="display on rank 0; auto: rich in a terminal, else one plain line per iteration"
    )

    profile: tuple[PositiveInt, ...] = Field(
        (),
        description="numbers (from 1) of iterations whose torch profiler trace and time by phase and kind of work are "
        "written to OUTPUT_DIR/profile",
    )
    profile_ranks: tuple[NaturalInt, ...] = Field((0,), description="ranks that are profiled")

    @field_validator("profile", "profile_ranks", mode="before")
    @classmethod
    def _one_number(cls, value: object) -> object:
        """``profile: 3`` means ``[3]``."""
        if isinstance(value, int) and not isinstance(value, bool):
            return (value,)
        return tuple(value) if isinstance(value, list) else value

    @field_validator("progress", mode="before")
    @classmethod
    def _unquoted_off(cls, value: object) -> object:
        """YAML 1.1 reads a bare ``off`` as false."""
        return "off" if value is False else value

    @model_validator(mode="after")
    def _weights_of_something(self) -> Self:
        if self.weights_only and self.resume in ("auto", "never"):
            raise ValueError(
                f"weights_only needs the checkpoint whose weights are taken, but resume is {self.resume!r}; set resume "
                "to its folder"
            )
        return self


class CheckpointConfig(Section):
    """Saved states of the run in OUTPUT_DIR/checkpoints, for trainer.resume."""

    interval: NaturalInt = Field(0, description="iterations between saves, and one at the end; 0: none")
    keep_last: PositiveInt = Field(
        2, description="newest checkpoints that are kept; older ones of this run are deleted"
    )
    keep_every: NaturalInt = Field(0, description="also keep those of every n-th iteration; 0: none")
    best_metric: str | None = Field(None, description="also keep the best by this metric of metrics.jsonl")
    best_mode: Literal["max", "min"] = Field("max", description="whether the best has the highest or the lowest value")
    optimizer: bool = Field(True, description="save optimizers too; without them only trainer.weights_only can resume")
    asynchronous: bool = Field(False, description="write while training goes on; takes memory for a copy of the state")
    on_save_error: Literal["warn", "stop"] = Field(
        "warn", description="after a save that failed: go on with a warning, or end the run"
    )


class RunConfig(Section):
    """What every run has; `mrlhf.config.load_config` reads one of its subclasses."""

    seed: Seed = Field(0, description="seed of sampling, shuffling, dropout and fresh heads")
    parallel: ParallelConfig = Field(default_factory=ParallelConfig, description="layout")
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig, description="number formats")
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig, description="text and token ids")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="saved states of the run")
    launch: LaunchConfig = Field(default_factory=LaunchConfig, description="communication")

    @model_validator(mode="after")
    def _passes_that_can_be(self) -> Self:
        problems = self.recompute_problems()
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def trained_roles(self) -> tuple[Fp8Role, ...]:
        """The models with an optimizer, as ``precision.fp8_roles`` names them."""
        return ("actor",)

    def norms_again_in_fp8(self) -> dict[str, list[Fp8Role]]:
        """Trained models of which Transformer Engine's FP8 layers compute norms again, by what to set to keep them."""
        found: dict[str, list[Fp8Role]] = {}
        for role in self.trained_roles if not self.precision.fp8_emulation else ():
            layout = self.parallel_of(role)
            if self.precision.fp8_in(role, trained=True) and "layernorm" in layout.recomputed_modules:
                section = "parallel" if layout is self.parallel else f"{role}.parallel"
                found.setdefault(f"{section}.{layout.without_norms}", []).append(role)
        return found

    def recompute_problems(self) -> list[str]:
        """Delayed scales are told at the end of a pass, and Megatron-Core refuses norms that run twice before it."""
        if self.precision.fp8_recipe != "delayed":
            return []
        return [
            f"layernorm of {', '.join(roles)} cannot be computed again with precision.fp8_recipe delayed; set {keys}, "
            "or choose another recipe"
            for keys, roles in self.norms_again_in_fp8().items()
        ]

    @property
    def tokenizer_path(self) -> str:
        """The folder or file of the tokenizer."""
        raise NotImplementedError

    @property
    def output_dir(self) -> Path:
        """The run's folder."""
        raise NotImplementedError

    @property
    def metrics_path(self) -> Path:
        """The JSONL file with one object per iteration."""
        return self.output_dir / "metrics.jsonl"

    def model_folders(self) -> dict[str, str]:
        """Folders that must hold a model, by key."""
        raise NotImplementedError

    def parallel_of(self, role: str) -> ParallelConfig:
        """The layout of one model; ``parallel`` unless it has one of its own."""
        return self.parallel

    def ranks_of(self, role: str, world_size: int) -> range:
        """The ranks that hold parts of a model: all of them, unless the run has placed it on some."""
        return range(world_size)

    def sizes_of(self, role: str, world_size: int) -> ParallelSizes:
        """The layout of one model on its ranks."""
        return self.parallel_of(role).sizes(len(self.ranks_of(role, world_size)))

    @property
    def smallest_world(self) -> int:
        """Ranks without which there is no place for all models."""
        return self.parallel.sizes(1).model_parallel_size

    def data_files(self) -> dict[str, str | None]:
        """Files that must exist where they are given, by key."""
        raise NotImplementedError

    def with_derived_paths(self) -> Self:
        """The same configuration with the paths that follow from others written out."""
        return self.model_copy(update={"tokenizer": self.tokenizer.model_copy(update={"path": self.tokenizer_path})})
