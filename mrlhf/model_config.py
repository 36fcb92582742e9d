"""The architecture of one transformer, independent of any checkpoint format and of any parallel layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are changed for long contexts.

    ``linear`` divides every frequency by ``factor``; ``llama3`` divides the low frequencies only and blends in
    between (Llama 3.1's rule, ``transformers.modeling_rope_utils._compute_llama3_parameters``).
    """

    kind: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and choices of a decoder-only transformer; all sizes are those of the unsharded, unpadded model.

    With ``num_experts`` every layer but ``dense_layers`` (counted from 0) is a mixture of experts: a router picks
    ``num_experts_per_token`` of them for each token and weighs them by its softmax, taken over the chosen ones
    (``normalize_topk``) or over all. ``moe_ffn_hidden_size`` is the width of one expert, ``ffn_hidden_size`` that of a
    dense layer. ``qk_norm`` normalises queries and keys of every head before the rotary embedding.
    """

    family: str
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_epsilon: float = 1e-5
    activation: Literal["swiglu", "gelu", "relu"] = "swiglu"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    num_experts: int | None = None
    num_experts_per_token: int = 2
    moe_ffn_hidden_size: int | None = None
    normalize_topk: bool = True
    dense_layers: tuple[int, ...] = ()
    init_std: float = 0.02
    dropout: float = 0.0
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer ``layer``, counted from 0, is a mixture of experts."""
        return self.num_experts is not None and layer not in self.dense_layers

    @property
    def moe_layers(self) -> int:
        """Number of layers that are mixtures of experts."""
        return sum(self.is_moe_layer(layer) for layer in range(self.num_layers))
