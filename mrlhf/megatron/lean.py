"""A stage's forward for generation without the layers of calls around each product.

A decoding step of a small model is a few hundred short kernels, and the wrappers around them (autograd functions for
communication that is not needed, contexts, hooks) take as long as they do. `LeanStage` computes the same function with
the same weights, layers and groups: it is built from a stage whose parts it knows one by one, and not at all from any
other, which then runs through Megatron's own forward. Mixture-of-experts layers keep Megatron's module.

What a rollout multiplies by does not change while it lasts, so that a stage made for it takes its weights in the form
in which they are multiplied (`mrlhf.megatron.packed`). On processors where 16-bit products are slow the stage computes
in fp32, from the 16-bit weights, and the cache is in fp32 too: nothing is rounded on the way but messages between
pipeline stages and the input and output of experts. Under sequence parallelism and in FP8 there is no such stage, and
Megatron's forward rounds as it does elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer

from mrlhf.megatron.attention import CachedSelfAttention
from mrlhf.megatron.cached_attention import CacheContext, cached_attention
from mrlhf.megatron.cpu_products import Fp32ColumnParallelLinear, Fp32RowParallelLinear, widens
from mrlhf.megatron.heads import LogprobHead
from mrlhf.megatron.model import LanguageModelStage
from mrlhf.megatron.norms import TorchNorm
from mrlhf.megatron.packed import product

_OFF = (
    "sequence_parallel",
    "fp8",
    "fp4",
    "fp32_residual_connection",
    "apply_residual_connection_post_layernorm",
    "multi_latent_attention",
    "rotary_interleaved",
    "attention_output_gate",
    "window_size",
    "activation_func_clamp_value",
    "glu_linear_offset",
    "use_te_activation_func",
    "bias_activation_fusion",
    "inference_fuse_tp_communication",
    "mtp_num_layers",
)
"""Settings of Megatron's that change what a layer computes, or how, and are off in what is computed here."""


class _Linear:
    """A sharded linear layer; ``reduced`` sums its output over the tensor ranks."""

    __slots__ = ("bias", "group", "product")

    def __init__(self, module: Any, group: dist.ProcessGroup | None, dtype: torch.dtype) -> None:
        self.product = product(module.weight, module.bias if group is None else None, dtype)
        self.bias = None if module.bias is None else module.bias.detach().to(dtype)
        self.group = group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, k] -> [T, n]``."""
        out = self.product(x)
        if self.group is None:
            return out
        dist.all_reduce(out, group=self.group)
        return out if self.bias is None else out + self.bias


class _Norm:
    """RMSNorm or LayerNorm."""

    __slots__ = ("bias", "eps", "epsilon", "module", "weight")

    def __init__(self, module: TorchNorm, dtype: torch.dtype) -> None:
        self.module, self.eps = module, module.eps
        self.weight = module.weight.detach().to(dtype)
        self.bias = None if module.bias is None else module.bias.detach().to(dtype)
        if self.bias is None and dtype is torch.float32:
            # x / sqrt(mean(x^2) + eps) = sqrt(h) x / sqrt(|x|^2 + h eps)
            size = self.weight.numel()
            self.epsilon = torch.tensor((size * self.eps) ** 0.5, dtype=dtype, device=self.weight.device)
            self.weight = self.weight * size**0.5

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Over the last dimension of ``x``."""
        if self.weight.dtype is not torch.float32:
            out: torch.Tensor = self.module(x)
            return out
        if self.bias is not None:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        # Half as many kernels as torch's rms_norm on a CPU.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x / torch.hypot(length, self.epsilon)).mul_(self.weight)


class _Layer:
    """One transformer layer."""

    def __init__(self, layer: Any, group: dist.ProcessGroup | None, dtype: torch.dtype) -> None:
        attention, config = layer.self_attention, layer.config
        self.number = layer.layer_number
        self.norms = _Norm(layer.input_layernorm, dtype), _Norm(layer.pre_mlp_layernorm, dtype)
        self.qkv, self.proj = _Linear(attention.linear_qkv, None, dtype), _Linear(attention.linear_proj, group, dtype)
        self.head_norms = _norm(attention.q_layernorm, dtype), _norm(attention.k_layernorm, dtype)
        self.groups = attention.num_query_groups_per_partition
        self.queries = attention.num_attention_heads_per_partition // self.groups
        self.scale = config.softmax_scale
        self.mlp: Callable[[torch.Tensor], torch.Tensor] = _module_mlp(layer.mlp)
        if type(layer.mlp) is MLP and _plain(layer.mlp.linear_fc1, layer.mlp.linear_fc2):
            self.mlp = _Mlp(layer.mlp, group, dtype)

    def __call__(
        self,
        x: torch.Tensor,
        context: CacheContext,
        rotary: tuple[torch.Tensor, torch.Tensor],
        select: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[T, h] -> [T, h]``; with ``select`` ``[n]`` all keys and values are cached and ``[n, h]`` returned."""
        mixed = self.qkv(self.norms[0](x)).view(x.size(0), self.groups, self.queries + 2, -1)
        turned = mixed[:, :, :-1]
        if self.head_norms[0] is not None and self.head_norms[1] is not None:
            query, key = turned[:, :, :-1], turned[:, :, -1:]
            turned = torch.cat((self.head_norms[0](query), self.head_norms[1](key)), dim=2)
        cos, sin = rotary
        # The two halves of a head change places; the sign of the first one's sine is in the table.
        torch.addcmul(turned * cos, turned.roll(turned.size(-1) // 2, -1), sin, out=mixed[:, :, :-1])
        query, entries = mixed[:, :, :-2], mixed[:, :, -2:]
        attended = cached_attention(query, entries, context, self.number, self.scale, select)
        x = (x if select is None else x[select]) + self.proj(attended)
        return x + self.mlp(self.norms[1](x))


class _Mlp:
    """Two linear layers with an activation between them, gated or not."""

    def __init__(self, mlp: Any, group: dist.ProcessGroup | None, dtype: torch.dtype) -> None:
        self.first, self.second = _Linear(mlp.linear_fc1, None, dtype), _Linear(mlp.linear_fc2, group, dtype)
        # Megatron adds this bias after the product, outside the layer.
        self.activation, self.gated = mlp.config.activation_func, mlp.config.gated_linear_unit

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, h] -> [T, h]``."""
        y = self.first(x)
        if not self.gated:
            return self.second(self.activation(y))
        gate, up = y.chunk(2, dim=-1)
        return self.second(self.activation(gate).mul_(up))


def _module_mlp(mlp: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    dtype = mlp.config.params_dtype

    def call(x: torch.Tensor) -> torch.Tensor:
        """Megatron's own."""
        out, bias = mlp(x.to(dtype).unsqueeze(1))
        out = out.squeeze(1)
        return (out if bias is None else out + bias).to(x.dtype)

    return call


class LeanStage:
    """The forward of one stage over packed tokens, with the weights that it has when this is made.

    Attributes:
        dtype: of what it computes, keys and values included.
        is_complete: whether no part of it runs through a module of Megatron's.
    """

    def __init__(self, chunk: Any, groups: ProcessGroupCollection) -> None:
        """Take the parts of a stage that `is_known`."""
        group = groups.tp if groups.tp.size() > 1 else None
        self.chunk, self.unsharded = chunk, group is None
        self.dtype = torch.float32 if widens(chunk.config.params_dtype) else chunk.config.params_dtype
        self.layers = [_Layer(layer, group, self.dtype) for layer in chunk.decoder.layers]
        self.is_complete = all(isinstance(layer.mlp, _Mlp) for layer in self.layers)
        self.norm = _norm(chunk.decoder.final_layernorm, self.dtype)
        if chunk.post_process:
            tied = chunk.share_embeddings_and_output_weights
            weight = chunk.shared_embedding_or_output_weight() if tied else chunk.output_layer.weight
            self.head = product(weight, dtype=self.dtype)
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None

    @staticmethod
    def is_known(chunk: Any, groups: ProcessGroupCollection) -> bool:
        """Whether every part of the stage is one that this class computes as Megatron does."""
        config = chunk.config
        return (
            type(chunk) is LanguageModelStage
            and not any(getattr(config, name, None) for name in _OFF)
            and getattr(config, "softmax_type", "vanilla") == "vanilla"
            and chunk.position_embedding_type == "rope"
            and chunk.rotary_pos_emb.inv_freq.numel() * 2 == config.kv_channels
            and config.num_query_groups >= groups.tp.size()
            and all(_known_layer(layer) for layer in chunk.decoder.layers)
            and _known_norm(chunk.decoder.final_layernorm)
            and (not chunk.pre_process or _known_embedding(chunk.embedding))
            and (not chunk.post_process or type(chunk.output_layer) is LogprobHead)
        )

    def __call__(
        self, tokens: torch.Tensor, hidden: torch.Tensor | None, context: CacheContext, select: torch.Tensor
    ) -> torch.Tensor:
        """``[T, h]`` for the next stage, on the last logits ``[n, padded vocabulary / TP]`` of ``select``."""
        x = (self._embedded(tokens) if hidden is None else hidden).to(self.dtype)
        if context.rotary is None:
            context.rotary = self._rotary(context, x.dtype)
        last = len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            x = layer(x, context, context.rotary, select if number == last and self._narrows(x, select) else None)
        if self.norm is None:
            return x
        if select.numel() < x.size(0):
            x = x[select]
        x = self.norm(x)
        if not self.chunk.post_process:
            return x
        return self.head(x)

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        embedding = self.chunk.embedding.word_embeddings
        out: torch.Tensor = F.embedding(tokens, embedding.weight) if self.unsharded else embedding(tokens)
        return out

    def _narrows(self, x: torch.Tensor, select: torch.Tensor) -> bool:
        """Whether the last layer goes on with the tokens of ``select`` alone, once the keys of all are in the cache.

        A stage with a module of Megatron's in it makes its passes whole.
        """
        return bool(self.chunk.post_process) and self.is_complete and 0 < select.numel() < x.size(0)

    def _rotary(self, context: CacheContext, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and signed sine of the positions of a pass, ``[T, 1, 1, head_dim]``."""
        if self._tables is None or self._tables[0].size(0) < context.max_sequence_length:
            # Megatron keeps this table for training too.
            with torch.inference_mode(False), torch.no_grad():
                angles = self.chunk.rotary_pos_emb.get_emb(context.max_sequence_length)
            sine, half = angles.sin(), angles.size(-1) // 2
            sine = torch.cat((-sine[..., :half], sine[..., half:]), dim=-1)
            self._tables = angles.cos().to(dtype), sine.to(dtype)
        return self._tables[0][context.positions], self._tables[1][context.positions]


def _known_layer(layer: Any) -> bool:
    attention = layer.self_attention
    return (
        type(layer) in _LAYERS
        and type(attention) is CachedSelfAttention
        and type(layer.input_layernorm) is type(layer.pre_mlp_layernorm) is TorchNorm
        and _known_norm(attention.q_layernorm)
        and _known_norm(attention.k_layernorm)
        and type(attention.q_layernorm) is type(attention.k_layernorm)
        and _plain(attention.linear_qkv, attention.linear_proj)
    )


def _layer_kinds() -> tuple[type, ...]:
    from megatron.core.transformer import transformer_layer

    # From Megatron-Core 0.17 mixture-of-experts layers have a class of their own for CUDA graphs.
    return (TransformerLayer, *filter(None, [getattr(transformer_layer, "MoETransformerLayer", None)]))


_LAYERS = _layer_kinds()


def _is_absent(module: Any) -> bool:
    """Whether there is no norm; Megatron puts a placeholder in its place."""
    return module is None or type(module) is IdentityOp


def _norm(module: Any, dtype: torch.dtype) -> _Norm | None:
    return None if _is_absent(module) else _Norm(module, dtype)


def _known_norm(module: Any) -> bool:
    return _is_absent(module) or type(module) is TorchNorm


def _plain(first: Any, second: Any) -> bool:
    kinds = (ColumnParallelLinear, RowParallelLinear), (Fp32ColumnParallelLinear, Fp32RowParallelLinear)
    return (type(first), type(second)) in kinds


def _known_embedding(embedding: Any) -> bool:
    return (
        type(embedding.word_embeddings) is VocabParallelEmbedding
        and not embedding.add_position_embedding
        and embedding.tokentype_embeddings is None
    )
