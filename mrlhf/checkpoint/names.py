"""The parameters of a rank's model chunks by their name in the whole model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mrlhf.checkpoint.families import Weight, expand, family_by_name
from mrlhf.errors import CheckpointError
from mrlhf.model_config import ModelConfig

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_WEIGHT = "output_layer.weight"
OUTPUT_BIAS = "output_layer.bias"

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.")
# Transformer Engine's grouped experts are parameters of one module.
_GROUPED_EXPERT = re.compile(r"\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")
# Transformer Engine fuses these norms into the linear layer behind them.
_FUSED_NORMS = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)


def unwrap(chunk: Any) -> torch.nn.Module:
    """The GPT model inside DDP and mixed-precision wrappers."""
    while not hasattr(chunk, "decoder"):
        chunk = chunk.module
    return chunk


def chunk_parameters(chunk: Any) -> dict[str, torch.nn.Parameter]:
    """Parameters of one chunk by local-spec name, layers and experts counted from 0 over the whole model."""
    model: Any = unwrap(chunk)
    layers: Any = model.decoder.layers
    found = {}
    for name, param in model.named_parameters():
        match = _LAYER.match(name)
        if match:
            layer = layers[int(match.group(1))]
            name = f"decoder.layers.{layer.layer_number - 1}.{name[match.end() :]}"
            name = _GROUPED_EXPERT.sub(r".experts.local_experts.\3.\1.\2", name)
            expert = _EXPERT.search(name)
            if expert:
                number = layer.mlp.local_expert_indices[int(expert.group(1))]
                name = f"{name[: expert.start()]}.experts.local_experts.{number}.{name[expert.end() :]}"
        for fused, plain in _FUSED_NORMS:
            name = name.replace(fused, plain)
        found[name] = param
    return found


def all_parameters(chunks: Sequence[Any]) -> dict[str, torch.nn.Parameter]:
    """Parameters of all virtual stages of this rank, see `chunk_parameters`."""
    found: dict[str, torch.nn.Parameter] = {}
    for chunk in chunks:
        found.update(chunk_parameters(chunk))
    return found


def add_value_bias(chunks: Sequence[Any]) -> None:
    """Give the value head on this rank, if it is here, the bias that its checkpoint has (0 until it is loaded).

    Only models that no DDP or optimizer knows yet can get a parameter; a wrapped one raises `CheckpointError`.
    """
    for chunk in chunks:
        head: Any = getattr(unwrap(chunk), "output_layer", None)
        if head is None or head.bias is not None:
            continue
        if unwrap(chunk) is not chunk:
            raise CheckpointError("the checkpoint's value head has a bias: load it before the model is wrapped")
        bias = torch.nn.Parameter(head.weight.new_zeros(1), requires_grad=head.weight.requires_grad)
        if hasattr(head.weight, "sequence_parallel"):
            bias.sequence_parallel = head.weight.sequence_parallel  # type: ignore[attr-defined]
        head.bias = bias


def check_stage(chunks: Sequence[Any], weights: Mapping[str, Weight]) -> None:
    """Check that the chunks have exactly the parameters that ``weights`` (the whole model) describes for them.

    A parameter without a description would keep its random values, and a description without a parameter (say a
    bias) would silently be dropped; either raises `CheckpointError` with the names. Of the experts only those that
    this rank has are looked for.
    """
    present = all_parameters(chunks)
    unknown = sorted(set(present) - set(weights))
    if unknown:
        raise CheckpointError(f"the model has parameters that the name table does not know: {', '.join(unknown)}")
    layers = {match.group(0) for name in present if (match := _LAYER.match(name))}
    experts = {weights[name].expert for name in present} - {None}
    absent = [
        name
        for name, weight in weights.items()
        if (match := _LAYER.match(name))
        and match.group(0) in layers
        and name not in present
        and (weight.expert is None or weight.expert in experts or not experts)
    ]
    if absent:
        raise CheckpointError(f"the checkpoint's model has parameters that this model lacks: {', '.join(absent)}")


def whole_model(config: ModelConfig, head: str, *, value_bias: bool = False) -> dict[str, Weight]:
    """Every parameter of the model with its head (``"lm"`` or ``"value"``), in order, by Megatron name.

    A tied LM head reads the embedding; it exists as a parameter only where the last stage is not the first.
    """
    family = family_by_name(config.family)
    weights = expand(family, config)
    hidden, vocab = config.hidden_size, config.vocab_size
    if head == "lm":
        source = weights[EMBEDDING].sources[0] if config.tie_word_embeddings else family.heads.lm.name
        weights[OUTPUT_WEIGHT] = Weight(OUTPUT_WEIGHT, "vocab", (source,), ((vocab, hidden),))
    elif head == "value":
        weights[OUTPUT_WEIGHT] = Weight(OUTPUT_WEIGHT, "replicated", (family.heads.value_weight.name,), ((1, hidden),))
        if value_bias:
            weights[OUTPUT_BIAS] = Weight(OUTPUT_BIAS, "replicated", (family.heads.value_bias.name,), ((1,),))
    else:
        raise ValueError(f"head must be 'lm' or 'value', not {head!r}")
    return weights
