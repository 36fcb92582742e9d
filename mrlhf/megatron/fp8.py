"""FP8 for a model's linear layers: what Megatron is told, where it can run, and what belongs to a checkpoint.

With Transformer Engine the recipe goes into Megatron's ``TransformerConfig``, whose `TransformerBlock` opens the FP8
context around the layers; embeddings, the language-model head and the value head are outside of it. Emulated, the
recipe goes to the layers themselves (`mrlhf.megatron.fp8_linear`) and Megatron knows nothing of FP8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from mrlhf.config_sections import FP8_TOKENS, Fp8Recipe
from mrlhf.megatron.fp8_scaling import AmaxAlgorithm, DelayedScales
from mrlhf.model_config import ModelConfig
from mrlhf.planner import ParallelSizes
from mrlhf.planning.fp8 import layer_problems

WAY_OUT = "set precision.fp8_emulation=true to round to FP8 values in ordinary kernels, or precision.fp8=null"

_OLDEST: dict[Fp8Recipe, tuple[int, int]] = {
    "delayed": (1, 0),
    "mxfp8": (2, 1),
    "tensorwise": (2, 2),
    "blockwise": (2, 3),
}
"""First Transformer Engine version with each recipe, as Megatron-Core's ``get_fp8_recipe`` has it."""

NORMS_AGAIN = (2, 6)
"""First one with which Megatron-Core (``TransformerConfig``) computes norms before FP8 products again."""

_CAPABILITY: dict[Fp8Recipe, tuple[int, int]] = {
    "delayed": (8, 9),
    "tensorwise": (8, 9),
    "blockwise": (9, 0),
    "mxfp8": (10, 0),
}
"""Lowest CUDA compute capability: Ada, Hopper, Blackwell."""


@dataclass(frozen=True)
class Fp8:
    """How a model's linear layers are in FP8.

    Attributes:
        format: ``hybrid`` (e4m3, gradients e5m2) or ``e4m3``.
        recipe: where scales come from.
        margin: delayed: scales are divided by 2 to this power.
        amax_history_len: delayed: steps whose largest values are remembered.
        amax_compute_algo: delayed: which of them counts.
        first_last_layers_bf16: layers at either end of the model that stay in the model's dtype.
        emulated: in ordinary kernels.
    """

    format: Literal["hybrid", "e4m3"]
    recipe: Fp8Recipe = "tensorwise"
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: AmaxAlgorithm = "max"
    first_last_layers_bf16: int = 0
    emulated: bool = False

    @property
    def token_multiple(self) -> int:
        """Tokens on a rank are a multiple of it. Emulated passes keep to it, so that they have the shapes of a GPU."""
        return FP8_TOKENS[self.recipe]

    def includes_layer(self, layer: int, num_layers: int) -> bool:
        """Whether a layer (global, from 0) of ``num_layers`` is in FP8."""
        return self.first_last_layers_bf16 <= layer < num_layers - self.first_last_layers_bf16

    def transformer_fields(self) -> dict[str, Any]:
        """Fields of Megatron's ``TransformerConfig``; none where it is emulated."""
        if self.emulated:
            return {}
        fields: dict[str, Any] = {"fp8": self.format, "fp8_recipe": self.recipe}
        if self.recipe == "delayed":
            return fields | {
                "fp8_margin": self.margin,
                "fp8_amax_history_len": self.amax_history_len,
                "fp8_amax_compute_algo": self.amax_compute_algo,
                # Data-parallel ranks may have different numbers of micro-batches, and would wait for each other.
                "tp_only_amax_red": True,
            }
        if self.first_last_layers_bf16:
            fields |= {
                "first_last_layers_bf16": True,
                "num_layers_at_start_in_bf16": self.first_last_layers_bf16,
                "num_layers_at_end_in_bf16": self.first_last_layers_bf16,
            }
        return fields

    def describe(self) -> str:
        """Such as ``hybrid, tensorwise, emulated``."""
        ends = self.first_last_layers_bf16
        parts = [self.format, self.recipe, *([f"without the first and last {ends}"] if ends else [])]
        return ", ".join([*parts, *(["emulated"] if self.emulated else [])])


def environment_problems(
    fp8: Fp8, *, cuda: bool, transformer_engine: tuple[int, int] | None, capability: tuple[int, int] | None
) -> list[str]:
    """Why this machine cannot run ``fp8``; nothing where it can. Emulated FP8 runs on every machine.

    Args:
        fp8: what is asked for.
        cuda: whether there is CUDA.
        transformer_engine: Transformer Engine's version, None where it cannot be imported.
        capability: the GPU's compute capability, None where it is not known.
    """
    if fp8.emulated:
        return []
    wanted = f"precision.fp8={fp8.format} with fp8_recipe {fp8.recipe}"
    if not cuda or transformer_engine is None:
        absent = "CUDA" if not cuda else "Transformer Engine"
        return [f"{wanted} needs CUDA and Transformer Engine, and there is no {absent} here; {WAY_OUT}"]
    problems = []
    oldest, lowest = _OLDEST[fp8.recipe], _CAPABILITY[fp8.recipe]
    if transformer_engine < oldest:
        problems.append(
            f"{wanted} needs Transformer Engine {_dotted(oldest)} or newer, and {_dotted(transformer_engine)} is "
            f"installed; update it, use fp8_recipe=delayed, or {WAY_OUT}"
        )
    if capability is not None and capability < lowest:
        problems.append(
            f"{wanted} needs a GPU of compute capability {_dotted(lowest)} or higher, and this one has "
            f"{_dotted(capability)}; {WAY_OUT}"
        )
    return problems


def model_problems(fp8: Fp8, role: str, model: ModelConfig, sizes: ParallelSizes) -> list[str]:
    """Why the layers of ``model`` cannot be in FP8 under ``sizes``; the vocabulary is not in FP8, any size will do."""
    return layer_problems(
        role, model, sizes, recipe=fp8.recipe, bf16_ends=fp8.first_last_layers_bf16, emulated=fp8.emulated
    )


def token_multiple(chunk: Any) -> int:
    """What the tokens on a rank must be a multiple of in every pass of a stage, wrapped or not; 1 without FP8."""
    while not hasattr(chunk, "token_multiple") and hasattr(chunk, "module"):
        chunk = chunk.module
    multiple: int = getattr(chunk, "token_multiple", 1)
    return multiple


def read_weights_again(chunks: Sequence[Any]) -> None:
    """Let the next pass of ``chunks`` make its FP8 weights from the weights as they are now.

    Transformer Engine keeps FP8 weights from one pass to the next, and Megatron's schedules tell it in each first
    micro-batch that they may have changed. Passes without a schedule (generation) must say so themselves: they would
    compute with the weights of before the last update.
    """
    for chunk in chunks:
        chunk.set_is_first_microbatch()


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


@contextmanager
def amax_reduction_group(groups: ProcessGroupCollection) -> Iterator[None]:
    """Let Megatron find the ranks that share largest values (delayed recipe with Transformer Engine) in ``groups``.

    Its ``get_fp8_context`` asks ``parallel_state`` for them, a global that we never fill, since every model has groups
    of its own. Left empty, Transformer Engine would reduce over the whole world, whose ranks are not in step.
    """
    names = {
        "_TENSOR_MODEL_PARALLEL_GROUP": groups.tp,
        "_PIPELINE_MODEL_PARALLEL_GROUP": groups.pp,
        "_DATA_PARALLEL_GROUP": groups.dp,
        "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": groups.tp_cp,
    }
    before = {name: getattr(parallel_state, name) for name in names}
    for name, group in names.items():
        setattr(parallel_state, name, group)
    try:
        yield
    finally:
        for name, group in before.items():
            setattr(parallel_state, name, group)


def scaling_state(chunks: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """Scales and histories of the delayed recipe on this rank, by stage and module; empty for every other recipe.

    Ranks differ: a data-parallel rank has seen rows of its own.
    """
    state: dict[str, Any] = {}
    for name, module in _scaled_modules(chunks):
        if isinstance(module, DelayedScales):
            state[name] = {"history": module.history.cpu().clone(), "scale": module.scale.cpu().clone()}
        else:
            state[name] = module.get_extra_state()
    return state


@torch.no_grad()
def set_scaling_state(chunks: Sequence[torch.nn.Module], state: dict[str, Any]) -> None:
    """Put a `scaling_state` of the same model and layout in place; what it lacks stays as it is.

    A history of another length begins anew, with the scales that were saved.
    """
    for name, module in _scaled_modules(chunks):
        if name not in state:
            continue
        if not isinstance(module, DelayedScales):
            module.set_extra_state(state[name])
            continue
        module.scale.copy_(state[name]["scale"])
        if state[name]["history"].shape == module.history.shape:
            module.history.copy_(state[name]["history"])


def _scaled_modules(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Any]]:
    for stage, chunk in enumerate(chunks):
        for name, module in chunk.named_modules():
            # Transformer Engine's modules have fp8_meta, whatever the recipe.
            recipe = getattr(getattr(module, "config", None), "fp8_recipe", None)
            if isinstance(module, DelayedScales) or (hasattr(module, "fp8_meta") and recipe == "delayed"):
                yield f"{stage}.{name}", module
