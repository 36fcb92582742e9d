"""What Transformer Engine's FP8 adds to a rank: copies of weights, scales, and largest values that ranks exchange.

Weights stay in the run's dtype. Beside each matrix of an FP8 layer Transformer Engine keeps it in FP8 from the first
micro-batch of a step to the next (``get_weight_workspace``), and for the backward pass its transpose too, since
Hopper's FP8 products take both operands in one order only. A frozen model needs no transpose.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from mrlhf.config_sections import FP8_TOKENS, Fp8Recipe
from mrlhf.model_config import ModelConfig
from mrlhf.planner import ParallelSizes
from mrlhf.planning.job import Role

MATRICES = 4
"""Linear layers of a dense layer, each with one weight: query-key-value, projection, gate and up, down."""
_FORWARD_SCALES, _BACKWARD_SCALES = 3, 2
"""Delayed: tensors of a linear layer with a scale and a history (input, weight, output; gradients of both ends)."""


@dataclass(frozen=True)
class AmaxReductions:
    """All-reduces of largest values that one micro-batch needs on a pipeline rank.

    Attributes:
        group: of which ranks.
        ranks: how many.
        forward: of a pass without gradient, or of the forward pass of a training pass where ``training`` says so.
        training: of forward and backward pass together.
        bytes: of one.
    """

    group: str
    ranks: int
    forward: int
    training: int
    bytes: int


def weight_bytes(role: Role, stage: int) -> int:
    """Bytes of FP8 weights and their scales on a pipeline rank; delayed: of the histories of all tensors too."""
    held = elements(role, stage)
    copies = 2 if role.trained else 1
    if role.fp8_recipe == "mxfp8":
        # A scale of one byte for 32 elements, in each direction.
        return copies * (held + held // 32)
    if role.fp8_recipe == "blockwise":
        # An fp32 scale for each block of 128 x 128.
        return copies * (held + 4 * (held // 128**2))
    scales = 4 * _matrices(role, stage)
    if role.fp8_recipe == "delayed":
        scales *= (_FORWARD_SCALES + _BACKWARD_SCALES) * (1 + role.fp8_history)
    return copies * held + scales


def elements(role: Role, stage: int, *, read: float = 1.0) -> int:
    """Elements of the FP8 layers' matrices on a pipeline rank; of the experts the share ``read``."""
    mixtures, dense = _layers(role, stage)
    parts = role.stages[stage]
    idle = int(parts.layer.experts * (1 - read))
    return mixtures * (parts.layer.held - idle) + dense * (parts.dense_layer or parts.layer).held


def _layers(role: Role, stage: int) -> tuple[int, int]:
    """FP8 layers of a pipeline rank: mixtures of experts, and dense ones."""
    layers = role.fp8_layers(stage)
    mixtures = min(role.stages[stage].moe_layers, layers)
    return mixtures, layers - mixtures


def _matrices(role: Role, stage: int) -> int:
    """Weights of the FP8 layers of a pipeline rank: those of the attention, and two of each expert."""
    mixtures, dense = _layers(role, stage)
    of_rank = (role.model.num_experts or 0) // role.sizes.expert_model_parallel_size
    return MATRICES * dense + (2 + 2 * of_rank) * mixtures


def _gathered(role: Role, stage: int) -> int:
    """Products of a pipeline rank whose input sequence parallelism gathers: experts get their tokens otherwise."""
    mixtures, dense = _layers(role, stage)
    return mixtures + 2 * dense


def _gathered_again(role: Role, stage: int) -> int:
    """Those of them whose product is computed again in the backward pass."""
    if role.recompute:
        return _gathered(role, stage)
    return _layers(role, stage)[1] if role.again("mlp") else 0


def amax_reductions(role: Role, stage: int) -> AmaxReductions | None:
    """What ranks tell each other about largest values; None where nothing is told.

    - ``tensorwise``: a tensor that is gathered over sequence-parallel ranks has one scale for all of them: the inputs
      of the first and third matrix of a layer, backwards the gradients of the second and fourth.
    - ``delayed``: one all-reduce of all histories' newest rows at the end of the forward pass (with gradient alone),
      one at the end of the backward pass; of tensor and context parallel ranks (Megatron's ``tp_only_amax_red``).
    - ``blockwise`` and ``mxfp8``: scales belong to blocks that no rank shares.
    """
    layers, t = role.fp8_layers(stage), role.sizes.tensor_model_parallel_size
    if not layers:
        return None
    if role.fp8_recipe == "tensorwise" and role.sequence_split > 1:
        forward = _gathered(role, stage)
        training = 2 * forward + _gathered_again(role, stage) if role.trained else 0
        return AmaxReductions("tp", t, forward, training, 4)
    ranks = t * role.sizes.context_parallel_size
    if role.fp8_recipe == "delayed" and role.trained and ranks > 1:
        group = "tp_cp" if role.sizes.context_parallel_size > 1 else "tp"
        size = 4 * _FORWARD_SCALES * _matrices(role, stage)
        return AmaxReductions(group, ranks, 0, 2 * role.sizes.virtual_stages, size)
    return None


def gathers_saved(role: Role, stage: int, element_bytes: int, *, backward: bool) -> float:
    """All-gathers of hidden states that FP8 saves under sequence parallelism, in those of the run's dtype.

    Transformer Engine gathers FP8 bytes: the inputs of the first and third matrix of a layer, backwards the gradients
    of the second and fourth and the two inputs once more. What is scattered stays in the run's dtype.
    """
    if role.sequence_split == 1:
        return 0.0
    gathered = (1 + 2 * backward) * _gathered(role, stage) + backward * _gathered_again(role, stage)
    return float(gathered) * (element_bytes - 1) / element_bytes


def layer_problems(
    role: str, model: ModelConfig, sizes: ParallelSizes, *, recipe: Fp8Recipe, bf16_ends: int, emulated: bool
) -> list[str]:
    """Why the layers of ``model`` cannot be in FP8 under ``sizes``; the vocabulary is not in FP8, any size will do."""
    if emulated and model.num_experts is not None:
        return [
            f"{role}: precision.fp8_emulation knows dense layers only, and this model is a mixture of experts; leave "
            "it out of precision.fp8_roles, or set precision.fp8=null"
        ]
    problems = []
    layers, per_stage = model.num_layers, model.num_layers // sizes.pipeline_model_parallel_size
    if bf16_ends and 2 * bf16_ends >= layers:
        problems.append(
            f"{role}: precision.fp8_first_last_layers_bf16 {bf16_ends} leaves none of {layers} layers in FP8; lower it"
        )
    elif bf16_ends > per_stage and not emulated:
        problems.append(
            f"{role}: precision.fp8_first_last_layers_bf16 {bf16_ends} is over the {per_stage} layers of a pipeline "
            "stage, which Megatron refuses; lower it, or use fewer stages"
        )
    if emulated:
        return problems
    tp, multiple = sizes.tensor_model_parallel_size, FP8_TOKENS[recipe]
    widths = {
        "hidden_size": model.hidden_size,
        "attention heads x head_dim / TP": model.num_attention_heads * model.head_dim // tp,
        "key-value heads x head_dim / TP": max(model.num_query_groups // tp, 1) * model.head_dim,
    }
    if model.moe_layers < model.num_layers:
        widths["ffn_hidden_size / TP"] = model.ffn_hidden_size // tp
    if model.moe_layers:
        widths["columns of an expert / ETP"] = (
            model.moe_ffn_hidden_size or model.ffn_hidden_size
        ) // sizes.expert_tensor_size
    problems += [
        f"{role}: {name} is {width}, and FP8 products ({recipe}) take multiples of {multiple}; "
        "use a smaller TP, or leave this model out of precision.fp8_roles"
        for name, width in widths.items()
        if width % multiple
    ]
    return problems


def hardware_problems(recipe: Fp8Recipe, name: str, formats: Collection[str]) -> list[str]:
    """Why a GPU of the hardware table cannot run ``recipe``.

    Args:
        recipe: of the run.
        name: of the GPU.
        formats: what it multiplies, of ``fp8`` and ``mxfp8``.
    """
    if "fp8" not in formats:
        return [
            f"precision.fp8: the {name} has no FP8 products; choose --hardware h100, h200 or b200, give --fp8-flops "
            "for a GPU of your own, or set precision.fp8=null"
        ]
    if recipe == "mxfp8" and "mxfp8" not in formats:
        return [f"precision.fp8_recipe mxfp8 needs a Blackwell GPU, and this is a plan for the {name}; choose "
                "--hardware b200, or precision.fp8_recipe=tensorwise"]  # fmt: skip
    return []
