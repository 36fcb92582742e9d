"""How many parameters each rank holds, exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mrlhf.model_config import ModelConfig
from mrlhf.planner import ParallelSizes, layer_counts, padded_vocab_size

Head = Literal["lm", "value"]


@dataclass(frozen=True)
class LayerParameters:
    """Parameters of one layer on one tensor rank.

    Attributes:
        attention: the two matrices of the attention, ``h (a + 2 g) d / t + h a d / t``.
        mlp: the feed-forward matrices, ``3 h f / t`` with SwiGLU, ``2 h f / t`` without.
        vectors: norms and biases; those of norms and of row-parallel outputs are on every tensor rank.
        largest: elements of the largest single matrix.
    """

    attention: int
    mlp: int
    vectors: int
    largest: int

    @property
    def matrices(self) -> int:
        """What every token is multiplied with."""
        return self.attention + self.mlp

    @property
    def total(self) -> int:
        """All parameters of the layer."""
        return self.matrices + self.vectors


@dataclass(frozen=True)
class StageParameters:
    """Parameters of one pipeline rank (all its virtual stages), on each of its tensor ranks.

    Attributes:
        layers: number of layers.
        layer: of each of them.
        embedding: rows of the padded vocabulary on the first stage, and the copy of them that a tied model keeps on
            its last stage (there it is the output layer).
        final_norm: on the last stage.
        head: the output layer of its own, or the value head, on the last stage.
        output: what a token of the last stage is multiplied with, wherever its parameters are counted.
    """

    layers: int
    layer: LayerParameters
    embedding: int = 0
    final_norm: int = 0
    head: int = 0
    output: int = 0

    @property
    def total(self) -> int:
        """All parameters of the rank."""
        return self.layers * self.layer.total + self.embedding + self.final_norm + self.head

    @property
    def largest(self) -> int:
        """The largest single matrix: its gradient is the largest that exists beside the gradient buffer."""
        return max(self.layer.largest, self.embedding, self.head)


def layer_parameters(model: ModelConfig, tensor_model_parallel_size: int) -> LayerParameters:
    """Parameters of a layer on one of ``tensor_model_parallel_size`` ranks; the sizes divide (see `mrlhf.planner`)."""
    h, t = model.hidden_size, tensor_model_parallel_size
    query = model.num_attention_heads * model.head_dim // t
    qkv = query + 2 * model.num_query_groups * model.head_dim // t
    ffn = model.ffn_hidden_size // t
    up = ffn * (2 if model.activation == "swiglu" else 1)
    vectors = 2 * _norm(model)
    # Megatron-Core has one switch for the biases of all linear layers, and one that adds the first of them alone.
    if model.qkv_bias or model.mlp_bias:
        vectors += qkv
    if model.mlp_bias:
        vectors += h + up + h
    return LayerParameters(
        attention=h * qkv + query * h, mlp=h * up + ffn * h, vectors=vectors, largest=h * max(qkv, query, up, ffn)
    )


def stage_parameters(
    model: ModelConfig, sizes: ParallelSizes, head: Head, *, value_bias: bool = False
) -> list[StageParameters]:
    """Parameters by pipeline rank; raises `ConfigError` when the layers do not split over the stages.

    Args:
        model: the unsharded architecture.
        sizes: the layout.
        head: ``"lm"``, or ``"value"`` for one number a token, which is never tied and not divided.
        value_bias: whether a value head has a bias.
    """
    t, p = sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size
    counts = layer_counts(
        model.num_layers,
        p,
        sizes.virtual_pipeline_model_parallel_size,
        first=sizes.num_layers_in_first_pipeline_stage,
        last=sizes.num_layers_in_last_pipeline_stage,
    )
    layer = layer_parameters(model, t)
    vocabulary = padded_vocab_size(model.vocab_size, t) // t * model.hidden_size
    tied = model.tie_word_embeddings and head == "lm"
    stages = []
    for rank, chunks in enumerate(counts):
        first, last = rank == 0, rank == p - 1
        own_head = 0
        if last and head == "value":
            own_head = model.hidden_size + value_bias
        elif last and not tied:
            own_head = vocabulary
        stages.append(
            StageParameters(
                layers=sum(chunks),
                layer=layer,
                embedding=vocabulary * (first or (last and tied)),
                final_norm=_norm(model) * last,
                head=own_head,
                output=(vocabulary if head == "lm" else model.hidden_size) * last,
            )
        )
    return stages


def model_parameters(model: ModelConfig, head: Head = "lm", *, value_bias: bool = False) -> int:
    """Parameters of the whole model as its authors count them: no padding, one embedding where it is tied."""
    alone = stage_parameters(model, ParallelSizes(), head, value_bias=value_bias)[0]
    padding = padded_vocab_size(model.vocab_size, 1) - model.vocab_size
    matrices = 1 if head == "value" or model.tie_word_embeddings else 2
    return alone.total - matrices * padding * model.hidden_size


def _norm(model: ModelConfig) -> int:
    return model.hidden_size * (1 if model.norm == "rmsnorm" else 2)
