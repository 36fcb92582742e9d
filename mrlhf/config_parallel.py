"""How a model is divided over ranks, and what its training passes keep, overlap and compile."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from mrlhf.config_base import PositiveInt, Section
from mrlhf.planner import ParallelSizes

Recompute = Literal["none", "selective", "full"]
RecomputeModule = Literal["core_attn", "layernorm", "mlp", "moe"]
OF_PASSES = ("recompute", "recompute_modules", "overlap_grad_reduce")
"""Keys of `ParallelConfig` that change how passes are made, and not where anything lies."""


class ParallelConfig(Section):
    """How one model is divided over ranks; what is left of the world is data parallel."""

    tensor_model_parallel_size: PositiveInt = Field(1, description="ranks that share every layer (TP)")
    pipeline_model_parallel_size: PositiveInt = Field(1, description="stages of consecutive layers (PP)")
    virtual_pipeline_model_parallel_size: PositiveInt | None = Field(
        None, description="virtual stages on each pipeline rank (VPP), needs PP of at least 2"
    )
    context_parallel_size: PositiveInt = Field(
        1, description="ranks that share a sequence (CP), in passes over whole rows"
    )
    expert_model_parallel_size: PositiveInt = Field(
        1, description="ranks that share the experts of a mixture-of-experts model (EP), replicas of the rest"
    )
    expert_tensor_parallel_size: PositiveInt | None = Field(
        None, description="ranks that share one expert (ETP); null: as tensor_model_parallel_size"
    )
    sequence_parallel: bool = Field(
        False, description="split norms and residuals along the sequence over TP; no effect at TP 1"
    )
    num_layers_in_first_pipeline_stage: PositiveInt | None = Field(
        None, description="layers of the first stage, where they do not split evenly; null: as the others"
    )
    num_layers_in_last_pipeline_stage: PositiveInt | None = Field(
        None, description="layers of the last stage, where they do not split evenly; null: as the others"
    )
    recompute: Recompute = Field(
        "none",
        description="what is computed again in backward passes instead of kept: none; selective: recompute_modules; "
        "full: layers, a third more work for least memory",
    )
    recompute_modules: tuple[RecomputeModule, ...] = Field(
        ("layernorm", "mlp", "moe"),
        description="selective: core_attn: attention without its matrices; layernorm: norms; mlp, moe: feed-forward "
        "parts of dense layers, of mixtures of experts",
    )
    overlap_grad_reduce: bool = Field(
        False,
        description="sum gradients over replicas beside the backward pass that computes the others",
    )

    @field_validator("recompute", mode="before")
    @classmethod
    def _yes_or_no(cls, value: object) -> object:
        """``true`` and ``false`` mean everything and nothing."""
        return {True: "full", False: "none"}[value] if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _something_to_recompute(self) -> ParallelConfig:
        if self.recompute == "selective" and not self.recompute_modules:
            raise ValueError("recompute is selective, but recompute_modules is empty; name some, or set recompute=none")
        return self

    @property
    def recomputed_modules(self) -> tuple[RecomputeModule, ...]:
        """Parts of layers that are computed again; none where whole layers are."""
        return self.recompute_modules if self.recompute == "selective" else ()

    @property
    def without_norms(self) -> str:
        """What to set here so that norms are not computed again, as on the command line."""
        others = [module for module in self.recompute_modules if module != "layernorm"]
        return f"recompute_modules=[{','.join(others)}]" if others else "recompute=none"

    def sizes(self, world_size: int) -> ParallelSizes:
        """The layout in a world of ``world_size`` ranks; nothing is checked here, see `mrlhf.planner.check_sizes`."""
        return ParallelSizes(world_size=world_size, **self.model_dump(exclude=set(OF_PASSES)))
