"""Llama 1, 2 and 3, SmolLM (a Llama by name and tensors) and Mistral without a sliding window.

Names and defaults are those of ``transformers`` 5 (``models/llama``, ``models/mistral``); the older keys
(``rope_theta``, ``rope_scaling``, ``torch_dtype``) are read as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrlhf.checkpoint.families.table import Entry, Family, Heads, Source
from mrlhf.errors import CheckpointError
from mrlhf.model_config import ModelConfig, RopeScaling

_ATTENTION = "decoder.layers.{i}.self_attention"
_MLP = "decoder.layers.{i}.mlp"
_HF_ATTENTION = "model.layers.{i}.self_attn"
_HF_MLP = "model.layers.{i}.mlp"

EMBEDDING = Entry(
    "embedding.word_embeddings.weight", "vocab", (Source("model.embed_tokens.weight", ("vocab", "hidden")),)
)
ATTENTION = (
    Entry(
        "decoder.layers.{i}.input_layernorm.weight",
        "replicated",
        (Source("model.layers.{i}.input_layernorm.weight", ("hidden",)),),
    ),
    Entry(
        f"{_ATTENTION}.linear_qkv.weight",
        "qkv",
        (
            Source(f"{_HF_ATTENTION}.q_proj.weight", ("query", "hidden")),
            Source(f"{_HF_ATTENTION}.k_proj.weight", ("key_value", "hidden")),
            Source(f"{_HF_ATTENTION}.v_proj.weight", ("key_value", "hidden")),
        ),
    ),
    Entry(
        f"{_ATTENTION}.linear_qkv.bias",
        "qkv",
        (
            Source(f"{_HF_ATTENTION}.q_proj.bias", ("query",)),
            Source(f"{_HF_ATTENTION}.k_proj.bias", ("key_value",)),
            Source(f"{_HF_ATTENTION}.v_proj.bias", ("key_value",)),
        ),
        requires="qkv_bias",
    ),
    Entry(f"{_ATTENTION}.linear_proj.weight", "row", (Source(f"{_HF_ATTENTION}.o_proj.weight", ("hidden", "query")),)),
    Entry(
        f"{_ATTENTION}.linear_proj.bias",
        "replicated",
        (Source(f"{_HF_ATTENTION}.o_proj.bias", ("hidden",)),),
        requires="attention_output_bias",
    ),
    Entry(
        "decoder.layers.{i}.pre_mlp_layernorm.weight",
        "replicated",
        (Source("model.layers.{i}.post_attention_layernorm.weight", ("hidden",)),),
    ),
)
DENSE_MLP = (
    Entry(
        f"{_MLP}.linear_fc1.weight",
        "gate_up",
        (
            Source(f"{_HF_MLP}.gate_proj.weight", ("ffn", "hidden")),
            Source(f"{_HF_MLP}.up_proj.weight", ("ffn", "hidden")),
        ),
    ),
    Entry(
        f"{_MLP}.linear_fc1.bias",
        "gate_up",
        (Source(f"{_HF_MLP}.gate_proj.bias", ("ffn",)), Source(f"{_HF_MLP}.up_proj.bias", ("ffn",))),
        requires="mlp_bias",
    ),
    Entry(f"{_MLP}.linear_fc2.weight", "row", (Source(f"{_HF_MLP}.down_proj.weight", ("hidden", "ffn")),)),
    Entry(
        f"{_MLP}.linear_fc2.bias",
        "replicated",
        (Source(f"{_HF_MLP}.down_proj.bias", ("hidden",)),),
        requires="mlp_bias",
    ),
)
FINAL = (Entry("decoder.final_layernorm.weight", "replicated", (Source("model.norm.weight", ("hidden",)),)),)
HEADS = Heads(
    lm=Source("lm_head.weight", ("vocab", "hidden")),
    value_weight=Source("score.weight", ("one", "hidden")),
    value_bias=Source("score.bias", ("one",)),
)
# Written by old releases of transformers; the frequencies follow from the configuration.
TOLERATED = (r".*rotary_emb\.inv_freq",)

_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


def _rope(values: Mapping[str, Any], where: str) -> tuple[float, RopeScaling]:
    """Return the rotary base and scaling from ``rope_parameters``, or from ``rope_theta`` and ``rope_scaling``."""
    if values.get("rope_parameters") is not None:
        key = "rope_parameters"
        rope = dict(values[key])
        theta = rope.get("rope_theta", values.get("rope_theta", 10000.0))
    else:
        key = "rope_scaling"
        rope = dict(values.get(key) or {})
        theta = values.get("rope_theta", 10000.0)
    if float(values.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)) or 1.0) != 1.0:
        raise CheckpointError(f"{where}: partial_rotary_factor other than 1 is not supported")
    kind = rope.get("rope_type", rope.get("type")) or "default"

    def number(name: str) -> float:
        """A number of the RoPE scaling, which must be there."""
        if rope.get(name) is None:
            raise CheckpointError(f"{where}: key {key}.{name} is missing (needed by RoPE scaling {kind!r})")
        return float(rope[name])

    if kind == "default":
        return float(theta), RopeScaling()
    if kind == "linear":
        return float(theta), RopeScaling(kind="linear", factor=number("factor"))
    if kind == "llama3":
        return float(theta), RopeScaling(
            kind="llama3",
            factor=number("factor"),
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
            # The same order of precedence as transformers' `RotaryEmbeddingConfigMixin.standardize_rope_params`.
            original_max_position_embeddings=int(
                values.get("original_max_position_embeddings")
                or rope.get("original_max_position_embeddings")
                or values.get("max_position_embeddings")
                or LLAMA_DEFAULTS["max_position_embeddings"]
            ),
        )
    raise CheckpointError(f"{where}: {key} asks for RoPE scaling {kind!r}; supported: default, linear, llama3")


def read_common(
    values: Mapping[str, Any], where: str, family: str, defaults: Mapping[str, Any], **special: Any
) -> ModelConfig:
    """What the families of this shape have in common; ``special`` are further fields of the `ModelConfig`."""
    for key in _REQUIRED:
        if values.get(key) is None:
            raise CheckpointError(f"{where}: key {key!r} is missing")

    def get(key: str) -> Any:
        """A value of the file, or its default."""
        value = values.get(key)
        return defaults[key] if value is None else value

    activation = get("hidden_act")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"{where}: hidden_act {activation!r} is not supported by family {family!r}; known: silu")
    hidden, heads = int(values["hidden_size"]), int(values["num_attention_heads"])
    groups = int(values.get("num_key_value_heads") or defaults["num_key_value_heads"] or heads)
    if heads % groups != 0:
        raise CheckpointError(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}")
    if values.get("head_dim") is None and hidden % heads != 0:
        raise CheckpointError(f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    if bool(get("attention_bias")) != bool(get("mlp_bias")):
        raise CheckpointError(
            f"{where}: attention_bias {get('attention_bias')} and mlp_bias {get('mlp_bias')} differ; Megatron-Core has "
            "one switch for the biases of both, so both or neither are supported"
        )
    theta, scaling = _rope(values, where)
    return ModelConfig(
        family=family,
        hidden_size=hidden,
        num_layers=int(values["num_hidden_layers"]),
        num_attention_heads=heads,
        num_query_groups=groups,
        head_dim=int(values.get("head_dim") or hidden // heads),
        ffn_hidden_size=int(values["intermediate_size"]),
        vocab_size=int(values["vocab_size"]),
        max_position_embeddings=int(get("max_position_embeddings")),
        norm="rmsnorm",
        norm_epsilon=float(get("rms_norm_eps")),
        activation="swiglu",
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(get("tie_word_embeddings")),
        qkv_bias=bool(get("attention_bias")),
        attention_output_bias=bool(get("attention_bias")),
        mlp_bias=bool(get("mlp_bias")),
        init_std=float(get("initializer_range")),
        **special,
    )


LLAMA_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
}
_MISTRAL_DEFAULTS = LLAMA_DEFAULTS | {"num_key_value_heads": 8, "max_position_embeddings": 131072}


def read_llama(values: Mapping[str, Any], where: str) -> ModelConfig:
    """Read a Llama ``config.json`` (already parsed); ``where`` is the file that errors name."""
    return read_common(values, where, "llama", LLAMA_DEFAULTS)


def read_mistral(values: Mapping[str, Any], where: str) -> ModelConfig:
    """Read a Mistral ``config.json``; a sliding window shorter than the model's length is refused."""
    # MistralAttention has no biases, whatever the file says.
    config = read_common({**values, "attention_bias": False, "mlp_bias": False}, where, "mistral", _MISTRAL_DEFAULTS)
    window = values.get("sliding_window", 4096)  # transformers' default where the key is absent; null means none
    if window is not None and int(window) < config.max_position_embeddings:
        raise CheckpointError(
            f"{where}: sliding_window {window} is shorter than max_position_embeddings "
            f"{config.max_position_embeddings}; sliding-window attention is not supported: set sliding_window to "
            f"null, or max_position_embeddings to at most {window}"
        )
    return config


LLAMA = Family(
    name="llama",
    lm_architecture="LlamaForCausalLM",
    value_architecture="LlamaForSequenceClassification",
    embedding=EMBEDDING,
    layer=ATTENTION + DENSE_MLP,
    final=FINAL,
    heads=HEADS,
    read_config=read_llama,
    tolerated=TOLERATED,
)
MISTRAL = Family(
    name="mistral",
    lm_architecture="MistralForCausalLM",
    value_architecture="MistralForSequenceClassification",
    embedding=EMBEDDING,
    layer=ATTENTION + DENSE_MLP,
    final=FINAL,
    heads=HEADS,
    read_config=read_mistral,
    tolerated=TOLERATED,
)
