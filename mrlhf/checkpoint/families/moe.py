"""Mixtures of experts: Mixtral without a sliding window, and Qwen3-MoE.

Names and defaults are those of ``transformers`` 5 (``models/mixtral``, ``models/qwen3_moe``). Its models stack all
experts of a layer in one parameter, but its folders, and those on the Hub, have tensors for each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrlhf.checkpoint.families.llama import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDING,
    FINAL,
    HEADS,
    LLAMA_DEFAULTS,
    TOLERATED,
    read_common,
)
from mrlhf.checkpoint.families.table import Entry, Family, Source
from mrlhf.errors import CheckpointError
from mrlhf.model_config import ModelConfig

_MLP = "decoder.layers.{i}.mlp"
_EXPERT = f"{_MLP}.experts.local_experts.{{e}}"


def _experts(block: str, gate: str, up: str, down: str) -> tuple[Entry, ...]:
    """A router and its experts, from the names of their module and of an expert's three matrices."""
    where = f"model.layers.{{i}}.{block}"
    expert = f"{where}.experts.{{e}}"
    router = (Source(f"{where}.gate.weight", ("experts", "hidden")),)
    fc1 = (
        Source(f"{expert}.{gate}.weight", ("expert_ffn", "hidden")),
        Source(f"{expert}.{up}.weight", ("expert_ffn", "hidden")),
    )
    fc2 = (Source(f"{expert}.{down}.weight", ("hidden", "expert_ffn")),)
    return (
        Entry(f"{_MLP}.router.weight", "replicated", router, layers="moe"),
        Entry(f"{_EXPERT}.linear_fc1.weight", "gate_up", fc1, layers="moe"),
        Entry(f"{_EXPERT}.linear_fc2.weight", "row", fc2, layers="moe"),
    )


_QK_NORMS = tuple(
    Entry(
        f"decoder.layers.{{i}}.self_attention.{part}_layernorm.weight",
        "replicated",
        (Source(f"model.layers.{{i}}.self_attn.{part}_norm.weight", ("head",)),),
        requires="qk_norm",
    )
    for part in ("q", "k")
)
_QWEN3_DENSE = tuple(
    Entry(entry.megatron, entry.kind, entry.sources, entry.requires, layers="dense") for entry in DENSE_MLP
)

_MIXTRAL_DEFAULTS = LLAMA_DEFAULTS | {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}
_QWEN3_DEFAULTS = LLAMA_DEFAULTS | {"num_key_value_heads": 4, "max_position_embeddings": 32768}


def _expert_fields(values: Mapping[str, Any], where: str, *, experts: int, chosen: int, normalize: bool) -> Any:
    """Fields of the `ModelConfig`; ``experts`` and ``chosen`` are transformers' defaults."""
    # transformers 5 writes num_local_experts for both families, older releases num_experts for Qwen3-MoE.
    number = int(values.get("num_local_experts") or values.get("num_experts") or experts)
    each = int(values.get("num_experts_per_tok") or chosen)
    if not 1 <= each <= number:
        raise CheckpointError(f"{where}: num_experts_per_tok {each} is not a number of the {number} experts")
    if each == 1 and normalize:
        raise CheckpointError(
            f"{where}: num_experts_per_tok 1 with normalised probabilities is not supported: the one expert always has "
            "weight 1, so that the router could not learn"
        )
    return {"num_experts": number, "num_experts_per_token": each, "normalize_topk": normalize}


def _no_window(window: Any, config: ModelConfig, where: str) -> None:
    if window is not None and int(window) < config.max_position_embeddings:
        raise CheckpointError(
            f"{where}: sliding_window {window} is shorter than max_position_embeddings "
            f"{config.max_position_embeddings}; sliding-window attention is not supported: set sliding_window to "
            f"null, or max_position_embeddings to at most {window}"
        )


def read_mixtral(values: Mapping[str, Any], where: str) -> ModelConfig:
    """Read a Mixtral ``config.json`` (already parsed); ``where`` is the file that errors name."""
    if float(values.get("router_jitter_noise") or 0.0):
        raise CheckpointError(f"{where}: router_jitter_noise is not supported; set it to 0")
    # The paper's and the Hub's base; transformers' class has it as its own default.
    values = {"rope_theta": 1000000.0, **values, "attention_bias": False, "mlp_bias": False}
    config = read_common(
        values,
        where,
        "mixtral",
        _MIXTRAL_DEFAULTS,
        **_expert_fields(values, where, experts=8, chosen=2, normalize=True),
        moe_ffn_hidden_size=int(values.get("intermediate_size") or 0),
    )
    _no_window(values.get("sliding_window"), config, where)
    return config


def read_qwen3_moe(values: Mapping[str, Any], where: str) -> ModelConfig:
    """Read a Qwen3-MoE ``config.json``; layers may be dense by ``mlp_only_layers`` or ``decoder_sparse_step``."""
    values = {**values, "mlp_bias": False}
    sparse_step = int(values.get("decoder_sparse_step") or 1)
    dense = {int(layer) for layer in values.get("mlp_only_layers") or ()}
    dense |= {layer for layer in range(int(values.get("num_hidden_layers") or 0)) if (layer + 1) % sparse_step}
    config = read_common(
        values,
        where,
        "qwen3_moe",
        _QWEN3_DEFAULTS,
        **_expert_fields(values, where, experts=128, chosen=8, normalize=bool(values.get("norm_topk_prob", False))),
        moe_ffn_hidden_size=int(values.get("moe_intermediate_size") or 768),
        qk_norm=True,
        dense_layers=tuple(sorted(dense)),
    )
    _no_window(values.get("sliding_window") if values.get("use_sliding_window") else None, config, where)
    return config


MIXTRAL = Family(
    name="mixtral",
    lm_architecture="MixtralForCausalLM",
    value_architecture="MixtralForSequenceClassification",
    embedding=EMBEDDING,
    layer=ATTENTION + _experts("block_sparse_moe", "w1", "w3", "w2"),
    final=FINAL,
    heads=HEADS,
    read_config=read_mixtral,
    tolerated=TOLERATED,
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    lm_architecture="Qwen3MoeForCausalLM",
    value_architecture="Qwen3MoeForSequenceClassification",
    embedding=EMBEDDING,
    layer=ATTENTION + _QK_NORMS + _QWEN3_DENSE + _experts("mlp", "gate_proj", "up_proj", "down_proj"),
    final=FINAL,
    heads=HEADS,
    read_config=read_qwen3_moe,
    tolerated=TOLERATED,
)
