"""The form of a family's name table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mrlhf.model_config import ModelConfig

Kind = Literal["replicated", "vocab", "column", "row", "qkv", "gate_up"]
"""How the tensors of one entry become one Megatron parameter.

``replicated``  the same tensor on every tensor-parallel rank
``vocab``       rows (dimension 0) are split, after padding the vocabulary with rows of zeros
``column``      rows of the weight (the layer's outputs, dimension 0) are split
``row``         columns of the weight (the layer's inputs, dimension 1) are split
``qkv``         three tensors, interleaved per query group as ``[q .. q k v]``, whole groups are split
``gate_up``     two tensors, each split by rows, stacked on each rank as ``[gate; up]``
"""


@dataclass(frozen=True)
class Source:
    """One Hugging Face tensor: its name (``{i}`` is the layer) and its shape as names of `dimensions`."""

    name: str
    shape: tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter (``{i}`` is the layer, counted over the whole model) and where it comes from.

    ``requires`` names a boolean field of `ModelConfig` without which neither side has this parameter. ``layers`` are
    those that have it: all, the dense ones, or the mixtures of experts, where an entry with ``{e}`` in its names is one
    for each expert, counted over the whole layer.
    """

    megatron: str
    kind: Kind
    sources: tuple[Source, ...]
    requires: str | None = None
    layers: Literal["all", "dense", "moe"] = "all"

    @property
    def is_expert(self) -> bool:
        """Whether there is one for each expert."""
        return "{e}" in self.megatron


@dataclass(frozen=True)
class Heads:
    """The output layers that a checkpoint of the family may have."""

    lm: Source
    value_weight: Source
    value_bias: Source


@dataclass(frozen=True)
class Family:
    """A model family: its two architectures, its names and how its ``config.json`` is read.

    ``read_config(values, where)`` turns the parsed file into a `ModelConfig` without token ids; ``tolerated`` are
    regular expressions of tensors that carry no weights (such as rotary buffers).
    """

    name: str
    lm_architecture: str
    value_architecture: str
    embedding: Entry
    layer: tuple[Entry, ...]
    final: tuple[Entry, ...]
    heads: Heads
    read_config: Callable[[Mapping[str, Any], str], ModelConfig]
    tolerated: tuple[str, ...] = ()


@dataclass(frozen=True)
class Weight:
    """One parameter of the whole model: its Megatron name, its kind, its Hugging Face tensors and their shapes.

    ``expert`` is the number of the expert that it belongs to, whose ranks and tensor ranks are the experts' own.
    """

    name: str
    kind: Kind
    sources: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    expert: int | None = None


def dimensions(config: ModelConfig) -> dict[str, int]:
    """Sizes of the unsharded, unpadded model by the names that `Source.shape` uses."""
    return {
        "hidden": config.hidden_size,
        "query": config.num_attention_heads * config.head_dim,
        "key_value": config.num_query_groups * config.head_dim,
        "head": config.head_dim,
        "ffn": config.ffn_hidden_size,
        "expert_ffn": config.moe_ffn_hidden_size or config.ffn_hidden_size,
        "experts": config.num_experts or 0,
        "vocab": config.vocab_size,
        "position": config.max_position_embeddings,
        "one": 1,
    }


def _weight(entry: Entry, sizes: Mapping[str, int], layer: int | None, expert: int | None = None) -> Weight:
    def fill(text: str) -> str:
        """A name with its numbers."""
        return text.replace("{i}", str(layer)).replace("{e}", str(expert))

    return Weight(
        fill(entry.megatron),
        entry.kind,
        tuple(fill(source.name) for source in entry.sources),
        tuple(tuple(sizes[dim] for dim in source.shape) for source in entry.sources),
        expert,
    )


def _layer_weights(family: Family, config: ModelConfig, sizes: Mapping[str, int], layer: int) -> list[Weight]:
    kind = "moe" if config.is_moe_layer(layer) else "dense"
    entries = [
        entry
        for entry in family.layer
        if entry.layers in ("all", kind) and (entry.requires is None or getattr(config, entry.requires))
    ]
    found = [_weight(entry, sizes, layer) for entry in entries if not entry.is_expert]
    for expert in range(config.num_experts or 0):
        found += [_weight(entry, sizes, layer, expert) for entry in entries if entry.is_expert]
    return found


def expand(family: Family, config: ModelConfig) -> dict[str, Weight]:
    """All parameters below the head by Megatron name, in the order of the model (local-spec names)."""
    sizes = dimensions(config)
    weights = [_weight(family.embedding, sizes, None)]
    for layer in range(config.num_layers):
        weights += _layer_weights(family, config, sizes, layer)
    weights += [_weight(entry, sizes, None) for entry in family.final]
    return {weight.name: weight for weight in weights}
