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
        mlp: the feed-forward matrices, ``3 h f / t`` with SwiGLU, ``2 h f / t`` without; of a mixture of experts the
            router, ``E h`` on every rank.
        vectors: norms and biases; those of norms and of row-parallel outputs are on every tensor rank.
        largest: elements of the largest single matrix.
        experts: matrices of the experts on the rank, ``E / EP x 3 h f / ETP``.
        active: what a token is multiplied with in the feed-forward part, ``(k 3 h f + E h) / t``; None: ``mlp``.
    """

    attention: int
    mlp: int
    vectors: int
    largest: int
    experts: int = 0
    active: int | None = None

    @property
    def matrices(self) -> int:
        """What every token is multiplied with."""
        return self.attention + (self.mlp if self.active is None else self.active)

    @property
    def held(self) -> int:
        """Of the linear layers on the rank, which may be in FP8: all matrices but the router."""
        return self.attention + self.experts + self.mlp - self.router

    @property
    def router(self) -> int:
        """Of a mixture of experts; 0 of a dense layer."""
        return self.mlp if self.active is not None else 0

    @property
    def total(self) -> int:
        """All parameters of the layer."""
        return self.attention + self.mlp + self.experts + self.vectors


@dataclass(frozen=True)
class StageParameters:
    """Parameters of one pipeline rank (all its virtual stages), on each of its tensor ranks.

    Attributes:
        layers: number of layers.
        layer: of each of them (but the dense ones of a mixture of experts).
        embedding: rows of the padded vocabulary on the first stage, and the copy of them that a tied model keeps on
            its last stage (there it is the output layer).
        final_norm: on the last stage.
        head: the output layer of its own, or the value head, on the last stage.
        output: what a token of the last stage is multiplied with, wherever its parameters are counted.
        dense_layers: how many of the layers are dense ones in a model whose other layers are mixtures of experts.
        dense_layer: of each of these.
    """

    layers: int
    layer: LayerParameters
    embedding: int = 0
    final_norm: int = 0
    head: int = 0
    output: int = 0
    dense_layers: int = 0
    dense_layer: LayerParameters | None = None

    @property
    def moe_layers(self) -> int:
        """Layers that are mixtures of experts."""
        return self.layers - self.dense_layers if self.layer.active is not None else 0

    @property
    def experts(self) -> int:
        """Of all experts on the rank, whose replicas are others than those of the rest."""
        return self.moe_layers * self.layer.experts

    @property
    def matrices(self) -> int:
        """What every token is multiplied with in the layers."""
        return self._sum("matrices")

    @property
    def layers_total(self) -> int:
        """All parameters of the layers."""
        return self._sum("total")

    @property
    def vectors(self) -> int:
        """Norms and biases of the layers, and routers: what sequence parallelism sums over tensor ranks, and more."""
        return self._sum("vectors") + self.moe_layers * self.layer.router

    def _sum(self, what: str) -> int:
        dense = self.dense_layers * getattr(self.dense_layer, what) if self.dense_layer is not None else 0
        return int((self.layers - self.dense_layers) * getattr(self.layer, what) + dense)

    @property
    def total(self) -> int:
        """All parameters of the rank."""
        return self.layers_total + self.embedding + self.final_norm + self.head

    @property
    def largest(self) -> int:
        """The largest single matrix: its gradient is the largest that exists beside the gradient buffer."""
        dense = self.dense_layer.largest if self.dense_layer is not None and self.dense_layers else 0
        return max(self.layer.largest, dense, self.embedding, self.head)


def layer_parameters(model: ModelConfig, tensor_model_parallel_size: int) -> LayerParameters:
    """Of a dense layer on one of ``tensor_model_parallel_size`` ranks; the sizes divide (see `mrlhf.planner`)."""
    h, t = model.hidden_size, tensor_model_parallel_size
    query = model.num_attention_heads * model.head_dim // t
    qkv = query + 2 * model.num_query_groups * model.head_dim // t
    ffn = model.ffn_hidden_size // t
    up = ffn * (2 if model.activation == "swiglu" else 1)
    vectors = 2 * _norm(model) + (2 * model.head_dim if model.qk_norm else 0)
    # Megatron-Core has one switch for the biases of all linear layers, and one that adds the first of them alone.
    if model.qkv_bias or model.mlp_bias:
        vectors += qkv
    if model.mlp_bias:
        vectors += h + up + h
    return LayerParameters(
        attention=h * qkv + query * h, mlp=h * up + ffn * h, vectors=vectors, largest=h * max(qkv, query, up, ffn)
    )


def moe_layer_parameters(model: ModelConfig, sizes: ParallelSizes) -> LayerParameters:
    """Of a mixture of experts on one rank of its tensor and expert groups."""
    t, experts, h = sizes.tensor_model_parallel_size, model.num_experts or 0, model.hidden_size
    dense = layer_parameters(model, t)
    ffn = model.moe_ffn_hidden_size or model.ffn_hidden_size
    one = h * ffn * (3 if model.activation == "swiglu" else 2)
    part = ffn // sizes.expert_tensor_size
    up = part * (2 if model.activation == "swiglu" else 1)
    return LayerParameters(
        attention=dense.attention,
        mlp=experts * h,
        vectors=dense.vectors,
        largest=max(h * up, dense.attention // 2, experts * h),
        experts=experts // sizes.expert_model_parallel_size * one // sizes.expert_tensor_size,
        active=(model.num_experts_per_token * one + experts * h) // t,
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
    dense = layer_parameters(model, t)
    layer = moe_layer_parameters(model, sizes) if model.num_experts else dense
    dense_of = _dense_layers(model, counts)
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
                dense_layers=dense_of[rank],
                dense_layer=dense if dense_of[rank] else None,
            )
        )
    return stages


def _dense_layers(model: ModelConfig, counts: list[list[int]]) -> list[int]:
    """Dense layers of a mixture of experts by pipeline rank; virtual stage v of rank p is at place ``v PP + p``."""
    found, first = [0] * len(counts), 0
    for chunk in range(len(counts[0])):
        for rank, chunks in enumerate(counts):
            layers = range(first, first + chunks[chunk])
            found[rank] += sum(model.num_experts is not None and layer in model.dense_layers for layer in layers)
            first = layers.stop
    return found


def active_parameters(model: ModelConfig, head: Head = "lm", *, value_bias: bool = False) -> int:
    """Of the whole model, without the experts that a token does not go to."""
    idle = 0
    if model.num_experts:
        experts = moe_layer_parameters(model, ParallelSizes()).experts
        idle = experts * (model.num_experts - model.num_experts_per_token) // model.num_experts * model.moe_layers
    return model_parameters(model, head, value_bias=value_bias) - idle


def model_parameters(model: ModelConfig, head: Head = "lm", *, value_bias: bool = False) -> int:
    """Parameters of the whole model as its authors count them: no padding, one embedding where it is tied."""
    alone = stage_parameters(model, ParallelSizes(), head, value_bias=value_bias)[0]
    padding = padded_vocab_size(model.vocab_size, 1) - model.vocab_size
    matrices = 1 if head == "value" or model.tie_word_embeddings else 2
    return alone.total - matrices * padding * model.hidden_size


def _norm(model: ModelConfig) -> int:
    return model.hidden_size * (1 if model.norm == "rmsnorm" else 2)
