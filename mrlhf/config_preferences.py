"""The configuration of training on preference pairs: reward models and direct preference optimisation (DPO).

The objects are frozen and refuse unknown keys. Read one with `mrlhf.config.load_config`, giving it the schema.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mrlhf.config_schema import ReferenceConfig
from mrlhf.config_sections import Fp8Role, NaturalInt, NonNegativeFloat, PositiveFloat, Section
from mrlhf.config_supervised import (
    ExampleDataConfig,
    StartModelConfig,
    SupervisedAdamConfig,
    SupervisedConfig,
    SupervisedTrainerConfig,
)


class PreferenceDataConfig(ExampleDataConfig):
    """The pairs to learn from. A line has a prompt and two answers, or two conversations that differ at the end."""

    prompt_key: str = Field("prompt", min_length=1, description="field of the prompt")
    chosen_key: str = Field("chosen", min_length=1, description="field of the better answer")
    rejected_key: str = Field("rejected", min_length=1, description="field of the other answer")
    margin_key: str = Field("margin", min_length=1, description="field of the margin, which a line may have")


class PreferenceConfig(SupervisedConfig):
    """What runs on preference pairs share. An example, wherever examples are counted, is a pair."""

    data: PreferenceDataConfig = Field(description="the pairs")

    @model_validator(mode="after")
    def _budget_holds_a_pair(self) -> Self:
        tokens, longest = self.train.micro_batch_tokens, self.data.max_length
        if tokens is not None and longest is not None and tokens < 2 * (longest + 1):
            raise ValueError(
                f"train.micro_batch_tokens {tokens} cannot hold a pair of two rows of data.max_length {longest} and "
                f"the slot after each; raise it to at least {2 * (longest + 1)}"
            )
        return self


class RewardStartModelConfig(StartModelConfig):
    """The model that becomes the reward model: a language model, or a one-label classifier to go on with."""

    head: Literal["auto", "loaded", "fresh"] = Field(
        "auto", description="value head: the checkpoint's, a new one, or auto: the checkpoint's where it has one"
    )


class RewardLossConfig(Section):
    """The loss of the reward model."""

    loss: Literal["bradley_terry", "deepspeed_chat"] = Field(
        "bradley_terry",
        description="bradley_terry: on the scores after the last token; deepspeed_chat: the loss of DeepSpeed-Chat's "
        "step 2, on every position from the first difference to the longer row's end",
    )
    use_margin: bool = Field(True, description="bradley_terry: the chosen score shall lead by the line's margin")
    centering_coef: NonNegativeFloat = Field(
        0.0, description="bradley_terry: weight of (chosen + rejected)^2, which keeps the scores around 0"
    )
    num_padding_at_beginning: NaturalInt = Field(
        0, description="deepspeed_chat: pad ids at the start of every row that do not end it (1 for OPT)"
    )

    @model_validator(mode="after")
    def _fits_the_loss(self) -> Self:
        if self.loss == "deepspeed_chat" and self.centering_coef:
            raise ValueError("centering_coef has a meaning with loss=bradley_terry only; set it to 0")
        if self.loss == "bradley_terry" and self.num_padding_at_beginning:
            raise ValueError("num_padding_at_beginning has a meaning with loss=deepspeed_chat only; leave it at 0")
        return self


class RewardTrainerConfig(SupervisedTrainerConfig):
    """Length and output of the run."""

    output_dir: str = Field("runs/reward", min_length=1, description="folder for metrics and the exported model")


class RewardTrainingConfig(PreferenceConfig):
    """Everything that defines the training of a reward model."""

    model: RewardStartModelConfig = Field(description="the trained model")
    reward: RewardLossConfig = Field(default_factory=RewardLossConfig, description="the loss")
    trainer: RewardTrainerConfig = Field(default_factory=RewardTrainerConfig, description="length and output")

    @property
    def trained_roles(self) -> tuple[Fp8Role, ...]:
        """See `RunConfig`."""
        return ("reward",)

    @model_validator(mode="after")
    def _reward_fits_together(self) -> Self:
        problems = []
        if self.reward.loss == "deepspeed_chat" and self.train.packing:
            problems.append(
                "train.packing must be false with reward.loss=deepspeed_chat, which takes scores on the padding too"
            )
        if self.model.init == "random" and self.model.head == "loaded":
            problems.append("model.head loaded has no checkpoint with model.init=random; set model.head to auto")
        if problems:
            raise ValueError("\n".join(problems))
        return self


class DPOLossConfig(Section):
    """The DPO loss."""

    beta: PositiveFloat = Field(0.1, description="strength of the tie to the reference")
    loss: Literal["sigmoid", "ipo", "hinge"] = Field(
        "sigmoid", description="sigmoid: DPO; ipo: IPO on length-averaged log-probs; hinge: SLiC"
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.0, description="sigmoid: probability that a label is the wrong way round (conservative DPO)"
    )
    sft_coef: NonNegativeFloat = Field(
        0.0, description="weight of the mean negative log-likelihood per token of the chosen answers (RPO)"
    )
    use_margin: bool = Field(False, description="the chosen reward shall lead by the line's margin; not with ipo")

    @model_validator(mode="after")
    def _fits_the_loss(self) -> Self:
        problems = []
        if self.label_smoothing and self.loss != "sigmoid":
            problems.append(f"label_smoothing has a meaning with loss=sigmoid only, not with {self.loss}; set it to 0")
        if self.use_margin and self.loss == "ipo":
            problems.append("use_margin has no meaning with loss=ipo; set it to false")
        if problems:
            raise ValueError("\n".join(problems))
        return self


class DPOAdamConfig(SupervisedAdamConfig):
    """AdamW and its learning rate schedule; the rate changes with every step."""

    lr: NonNegativeFloat = Field(1e-6, description="highest learning rate")


class DPOTrainerConfig(SupervisedTrainerConfig):
    """Length and output of the run."""

    output_dir: str = Field("runs/dpo", min_length=1, description="folder for metrics and the exported model")


class DPOConfig(PreferenceConfig):
    """Everything that defines a DPO run."""

    reference: ReferenceConfig = Field(
        default_factory=ReferenceConfig, description="the frozen start; path null: the model's"
    )
    dpo: DPOLossConfig = Field(default_factory=DPOLossConfig, description="the loss")
    optimizer: DPOAdamConfig = Field(default_factory=DPOAdamConfig, description="the optimizer")
    trainer: DPOTrainerConfig = Field(default_factory=DPOTrainerConfig, description="length and output")

    @property
    def reference_path(self) -> str:
        """The folder of the reference."""
        return self.reference.path or self.model.path

    def model_folders(self) -> dict[str, str]:
        """Folders that must hold a model, by key."""
        return {**super().model_folders(), "reference.path": self.reference_path}
