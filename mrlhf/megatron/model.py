"""This rank's stages of a model: Megatron's `GPTModel` with a log-prob head or a value head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from mrlhf.megatron import device
from mrlhf.megatron.fp8 import Fp8, amax_reduction_group
from mrlhf.megatron.heads import LogprobHead, ValueHead
from mrlhf.megatron.rope import inverse_frequencies
from mrlhf.megatron.spec import Kernels, block_spec
from mrlhf.model_config import ModelConfig
from mrlhf.planner import ParallelSizes, padded_vocab_size

Head = Literal["lm", "value"]


@dataclass(frozen=True)
class LogprobRequest:
    """What the language-model head shall compute instead of logits.

    Attributes:
        targets: ``[b, s]`` int64, the token each position predicts.
        wanted: ``[b, s]`` bool, positions whose log-prob is needed (the others give 0 and no gradient), or None.
        temperature: divides the logits.
        with_entropy: also the entropy of the (tempered) distribution.
    """

    targets: torch.Tensor
    wanted: torch.Tensor | None = None
    temperature: float = 1.0
    with_entropy: bool = False

    def part(self, slots: torch.Tensor) -> LogprobRequest:
        """The request for some of the slots."""
        wanted = None if self.wanted is None else self.wanted[:, slots]
        return replace(self, targets=self.targets[:, slots], wanted=wanted)


@dataclass(frozen=True)
class SelectRequest:
    """Vocabulary-parallel logits of some of the packed tokens only.

    Attributes:
        index: ``[n]`` int64, places among the (unsharded) tokens of the sequence dimension.
    """

    index: torch.Tensor


class _Stage(GPTModel):
    """What both kinds of stages add to Megatron's.

    Attributes:
        token_multiple: what the number of tokens on a rank must be a multiple of in every pass (FP8).
    """

    token_multiple: int = 1

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's, which finds the groups of the delayed FP8 recipe."""
        if not self.config.fp8 or self.config.fp8_recipe != "delayed":
            return super().forward(*args, **kwargs)
        with amax_reduction_group(self.pg_collection):
            return super().forward(*args, **kwargs)


class LanguageModelStage(_Stage):
    """A GPT stage whose head answers `LogprobRequest` and `SelectRequest`, passed as ``labels``.

    ``labels`` is the one argument that Megatron's forward hands to the head untouched on every version.
    """

    def _postprocess(self, hidden_states: torch.Tensor, labels: Any = None, **_: Any) -> Any:  # noqa: ANN401
        if not self.post_process:
            return hidden_states
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        if isinstance(labels, LogprobRequest):
            logprobs, entropy = self.output_layer(
                hidden_states,
                weight=weight,
                labels=labels.targets.transpose(0, 1),
                mask=None if labels.wanted is None else labels.wanted.transpose(0, 1),
                temperature=labels.temperature,
                with_entropy=labels.with_entropy,
            )
            logprobs = logprobs.transpose(0, 1)
            return torch.stack([logprobs, entropy.transpose(0, 1)]) if entropy is not None else logprobs
        index = labels.index if isinstance(labels, SelectRequest) else None
        logits, _bias = self.output_layer(hidden_states, weight=weight, index=index)
        return logits.transpose(0, 1)


class ValueModelStage(_Stage):
    """A GPT stage whose head gives one number per token: critic and reward model."""

    def _postprocess(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        if not self.post_process:
            return hidden_states
        values, _bias = self.output_layer(hidden_states)
        result: torch.Tensor = values.squeeze(-1).transpose(0, 1)
        return result


def transformer_config(
    model: ModelConfig,
    sizes: ParallelSizes,
    *,
    dtype: torch.dtype,
    dropout: float = 0.0,
    initialize: bool = False,
    fp8: Fp8 | None = None,
    recompute: bool = False,
    recompute_modules: Sequence[str] = (),
    moe_aux_loss_coef: float = 0.0,
) -> TransformerConfig:
    """Megatron's configuration of ``model`` under ``sizes``; the last three as in `build_model`.

    Dropout comes from the argument alone; what a checkpoint's configuration says is for its own pre-training. Emulated
    ``fp8`` is not in it: without Transformer Engine Megatron would pass over it, or stumble in recomputation.
    """
    if model.attention_output_bias != model.mlp_bias:
        raise ValueError(
            f"attention_output_bias {model.attention_output_bias} and mlp_bias {model.mlp_bias} differ; "
            "Megatron-Core has one switch for both"
        )
    cuda = device.has_cuda()
    virtual = sizes.virtual_pipeline_model_parallel_size
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.ffn_hidden_size,
        normalization="RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        layernorm_epsilon=model.norm_epsilon,
        gated_linear_unit=model.activation == "swiglu",
        activation_func={"swiglu": F.silu, "gelu": F.gelu, "relu": F.relu}[model.activation],
        add_bias_linear=model.mlp_bias,
        add_qkv_bias=model.qkv_bias,
        qk_layernorm=model.qk_norm,
        init_method_std=model.init_std,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        tensor_model_parallel_size=sizes.tensor_model_parallel_size,
        pipeline_model_parallel_size=sizes.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual,
        num_layers_in_first_pipeline_stage=sizes.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=sizes.num_layers_in_last_pipeline_stage,
        context_parallel_size=sizes.context_parallel_size,
        expert_model_parallel_size=sizes.expert_model_parallel_size,
        expert_tensor_parallel_size=sizes.expert_tensor_size,
        sequence_parallel=sizes.sequence_parallel and sizes.tensor_model_parallel_size > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        use_cpu_initialization=not cuda,
        perform_initialization=initialize,
        **_recompute_fields(recompute, recompute_modules),
        # Every micro-batch may have its own width. Megatron ties this flag to a dispatcher even in dense models.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # With two ranks and virtual stages previous and next rank are the same; batched messages would then cross.
        overlap_p2p_comm=virtual is not None,
        batch_p2p_comm=virtual is None,
        # With gloo the buffer may still be on its way when it would be freed.
        deallocate_pipeline_outputs=cuda,
        # On the CPU these compile C++ at first use, or are not there at all.
        bias_activation_fusion=cuda and model.activation == "swiglu",
        bias_dropout_fusion=cuda,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        **(fp8.transformer_fields() if fp8 is not None else {}),
        **_expert_fields(model, moe_aux_loss_coef),
    )


def _recompute_fields(whole: bool, modules: Sequence[str]) -> dict[str, Any]:
    if whole and modules:
        raise ValueError(f"whole layers are recomputed, which leaves nothing for recompute_modules {tuple(modules)}")
    if whole:
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)} if modules else {}


def _expert_fields(model: ModelConfig, aux_loss_coef: float) -> dict[str, Any]:
    if model.num_experts is None:
        return {}
    return {
        "num_moe_experts": model.num_experts,
        "moe_router_topk": model.num_experts_per_token,
        "moe_ffn_hidden_size": model.moe_ffn_hidden_size or model.ffn_hidden_size,
        # A softmax over the chosen logits is the softmax over all of them, normalised over the chosen.
        "moe_router_pre_softmax": not model.normalize_topk,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss" if aux_loss_coef else "none",
        "moe_aux_loss_coeff": aux_loss_coef,
        "moe_layer_freq": [int(model.is_moe_layer(layer)) for layer in range(model.num_layers)],
    }


def build_model(
    model: ModelConfig,
    sizes: ParallelSizes,
    groups: ProcessGroupCollection,
    *,
    head: Head,
    dtype: torch.dtype = torch.float32,
    dropout: float = 0.0,
    initialize: bool = False,
    trainable: bool = True,
    value_bias: bool = False,
    masked: bool = False,
    fp8: Fp8 | None = None,
    recompute: bool = False,
    recompute_modules: Sequence[str] = (),
    kernels: Kernels = "auto",
    moe_aux_loss_coef: float = 0.0,
) -> list[GPTModel]:
    """Build this rank's stages, on its device, in evaluation mode.

    Args:
        model: the unsharded architecture.
        sizes: parallel sizes (checked before, see `mrlhf.planner`).
        groups: process groups of these sizes.
        head: ``"lm"`` (log-probs and vocabulary-parallel logits) or ``"value"`` (one number per token; never tied).
        dtype: of parameters and activations.
        dropout: of hidden states and attention, active in training mode only.
        initialize: fill the weights by the configuration's initialisation; otherwise they are **undefined** until
            a checkpoint is loaded.
        trainable: whether parameters require gradients.
        value_bias: whether a value head has a bias.
        masked: whether the model will be given attention masks (see `mrlhf.megatron.spec.choose_parts`).
        fp8: of the linear layers; heads and embeddings stay in ``dtype``.
        recompute: whether training passes keep the inputs of layers alone, and compute the rest again.
        recompute_modules: parts of layers of which that is so instead: ``core_attn``, ``layernorm``, ``mlp``, ``moe``.
        kernels: see `mrlhf.megatron.spec.choose_parts`.
        moe_aux_loss_coef: of the load balancing loss (Switch Transformers, arXiv:2101.03961, eq. 4) that training
            passes add to every mixture-of-experts layer, for each micro-batch; 0 leaves the router to the other losses.

    Returns:
        One stage, or one for each virtual pipeline stage in order.
    """
    pp_rank, pp_size = groups.pp.rank(), groups.pp.size()
    virtual = sizes.virtual_pipeline_model_parallel_size
    config = transformer_config(
        model,
        sizes,
        dtype=dtype,
        dropout=dropout,
        initialize=initialize,
        fp8=fp8,
        recompute=recompute,
        recompute_modules=recompute_modules,
        moe_aux_loss_coef=moe_aux_loss_coef,
    )
    chunks: list[GPTModel] = []
    for stage in range(virtual or 1):
        first = pp_rank == 0 and stage == 0
        last = pp_rank == pp_size - 1 and stage == (virtual or 1) - 1
        spec = block_spec(
            config, pp_rank, stage if virtual else None, masked=masked, kernels=kernels, fp8=fp8, groups=groups
        )
        chunk = _build_stage(model, config, groups, spec, head, first, last, stage if virtual else None)
        if last:
            _replace_head(chunk, model, config, groups, head, value_bias)
        _mark_sharded(chunk)
        chunk.requires_grad_(trainable)
        chunk.token_multiple = fp8.token_multiple if fp8 is not None else 1
        # On the CPU everything is where it belongs, and tensors without content (a dry run) could not be moved.
        chunks.append((chunk.to(device.device()) if device.has_cuda() else chunk).eval())
    return chunks


def _build_stage(
    model: ModelConfig,
    config: TransformerConfig,
    groups: ProcessGroupCollection,
    spec: TransformerBlockSubmodules,
    head: Head,
    first: bool,
    last: bool,
    vp_stage: int | None,
) -> GPTModel:
    stage_class = LanguageModelStage if head == "lm" else ValueModelStage
    tied = model.tie_word_embeddings and head == "lm"
    stage = stage_class(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=padded_vocab_size(model.vocab_size, groups.tp.size()),
        max_sequence_length=model.max_position_embeddings,
        pre_process=first,
        post_process=last,
        parallel_output=True,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
        rotary_base=int(model.rope_theta),
        pg_collection=groups,
        vp_stage=vp_stage,
    )
    # The whole table: `CachedSelfAttention` takes its part of it under context parallelism, and all in generation.
    stage.rotary_pos_emb.cp_group = None
    stage.rotary_pos_emb.inv_freq = inverse_frequencies(model.head_dim, model.rope_theta, model.rope_scaling).to(
        device.device()
    )
    return stage


def _replace_head(
    stage: GPTModel,
    model: ModelConfig,
    config: TransformerConfig,
    groups: ProcessGroupCollection,
    head: Head,
    value_bias: bool,
) -> None:
    if head == "value":
        stage.output_layer = ValueHead(model.hidden_size, config=config, tp_group=groups.tp, bias=value_bias)
        return
    weight = stage.output_layer.weight
    stage.output_layer = LogprobHead(
        model.hidden_size,
        padded_vocab_size(model.vocab_size, groups.tp.size()),
        config=config,
        init_method=config.init_method,
        bias=False,
        skip_bias_add=False,
        gather_output=False,
        skip_weight_param_allocation=True,
        tp_group=groups.tp,
        true_vocab_size=model.vocab_size,
    )
    if weight is not None:
        # GPTModel's own parameter, with the marks it carries (shared embedding, embedding-or-output parameter).
        stage.output_layer.weight = weight


def _mark_sharded(chunk: torch.nn.Module) -> None:
    """Mark every weight that is a shard.

    Megatron sets the marks while it initialises weights, which is left out here. Without them the gradient norm would
    count the shards of tensor rank 0 only, and clipping would be wrong without any error.
    """
    dims = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
    for module in chunk.modules():
        for kind, dim in dims.items():
            weight = getattr(module, "weight", None) if isinstance(module, kind) else None
            if weight is not None and not hasattr(weight, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=dim, stride=1)
