"""The part of a PPO run's configuration that says where scores come from.

The objects are frozen and refuse unknown keys.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mrlhf.config_sections import (
    FiniteFloat,
    NaturalInt,
    NonNegativeFloat,
    ParallelConfig,
    PositiveFloat,
    PositiveInt,
    Section,
)


class RewardModelSource(Section):
    """Scores from a one-label sequence classifier."""

    kind: Literal["model"] = Field("model", description="a reward model")
    path: str = Field(description="folder as for actor.path, of a one-label sequence classifier")
    parallel: ParallelConfig | None = Field(
        None, description="own layout on the same ranks (see placement), with parallel's keys; null: parallel"
    )
    weight: FiniteFloat = Field(1.0, description="factor of these scores in the sum of all sources")


class RewardFunctionSource(Section):
    """Scores from a Python function ``target(prompts, responses, **meta) -> list[float]``."""

    kind: Literal["function"] = Field("function", description="a Python function")
    target: str = Field(description="package.module:callable", pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")
    weight: FiniteFloat = Field(1.0, description="factor of these scores in the sum of all sources")
    retries: NaturalInt = Field(0, description="further calls, with growing waits, after one that failed")


class RewardRemoteSource(Section):
    """Scores from a server: it is sent prompts, responses and meta as JSON and answers with scores."""

    kind: Literal["remote"] = Field("remote", description="a server")
    url: str = Field(description="address that takes the POST requests", pattern=r"^https?://\S+$")
    weight: FiniteFloat = Field(1.0, description="factor of these scores in the sum of all sources")
    batch_size: PositiveInt = Field(64, description="responses of one request")
    timeout_seconds: PositiveFloat = Field(60.0, description="longest time for one answer")
    retries: NaturalInt = Field(3, description="further tries after no connection, no answer in time, or a busy server")
    headers: dict[str, str] = Field(
        default_factory=dict, description="HTTP headers; $NAME stands for a variable of the environment"
    )


RewardSource = Annotated[RewardModelSource | RewardFunctionSource | RewardRemoteSource, Field(discriminator="kind")]


class RewardConfig(Section):
    """Where scores come from: the weighted sum of the sources, normalised, penalised, then clipped (ppo.score_clip)."""

    sources: tuple[RewardSource, ...] = Field(description="reward models and functions, at least one, summed")
    normalize: bool = Field(False, description="replace scores by (score - running mean) / running standard deviation")
    missing_eos_penalty: NonNegativeFloat | None = Field(
        None, description="taken off the score of a response without an end token"
    )

    @model_validator(mode="after")
    def _some_source(self) -> RewardConfig:
        if not self.sources:
            raise ValueError(
                "sources is empty; give at least one {kind: model, path: ...}, {kind: function, ...} or "
                "{kind: remote, ...}"
            )
        return self
