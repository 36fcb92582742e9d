"""Which parts a layer is made of, decided in one place.

Transformer Engine's modules are used for bf16 and fp16 where it can be imported **and** CUDA is present (with
Transformer Engine but without CUDA its kernels cannot run); otherwise Megatron's own layers with our attention and
norms, and Apex's fused norms where NVIDIA's Apex is installed and CUDA is present.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from mrlhf.megatron import device
from mrlhf.megatron.attention import CachedSelfAttention, SDPAttention
from mrlhf.megatron.norms import ApexNorm, TorchNorm


@dataclass(frozen=True)
class Parts:
    """The chosen implementations."""

    layers: Literal["transformer_engine", "local"]
    attention: Literal["transformer_engine", "sdpa"]
    norm: Literal["transformer_engine", "apex", "torch"]

    def describe(self) -> str:
        """One line for the log."""
        return f"layers: {self.layers}, attention: {self.attention}, norm: {self.norm}"


def has_apex() -> bool:
    """Whether NVIDIA's Apex is installed; the unrelated PyPI package of that name has no ``normalization``."""
    return _found("apex.normalization")


def has_transformer_engine() -> bool:
    """Whether Transformer Engine for PyTorch can be found."""
    return _found("transformer_engine.pytorch")


def _found(module: str) -> bool:
    try:
        # This imports the parent package, which may be another package of that name, or built for other libraries.
        return importlib.util.find_spec(module) is not None
    except (ImportError, OSError):
        return False


def choose_parts(*, cuda: bool, transformer_engine: bool, apex: bool, half: bool, masked: bool = False) -> Parts:
    """Decide from what is there; pure, so that every combination is tested without the packages.

    Transformer Engine computes fp32 products in TF32 and has no fused attention for them, so it is for ``half``
    (bf16 and fp16) models only; an fp32 run is asked for to be exact. Its causal attention takes no mask, so a model
    that gets one (``masked``) has Megatron's own layers.
    """
    if cuda and transformer_engine and half and not masked:
        return Parts("transformer_engine", "transformer_engine", "transformer_engine")
    return Parts("local", "sdpa", "apex" if cuda and apex else "torch")


def available_parts(dtype: torch.dtype, *, masked: bool = False) -> Parts:
    """`choose_parts` for this machine and a model of this dtype."""
    cuda = device.has_cuda()
    return choose_parts(
        cuda=cuda,
        transformer_engine=cuda and has_transformer_engine(),
        apex=cuda and has_apex(),
        half=dtype in (torch.bfloat16, torch.float16),
        masked=masked,
    )


def block_spec(
    config: TransformerConfig, pp_rank: int, vp_stage: int | None, *, masked: bool = False
) -> TransformerBlockSubmodules:
    """The layers of one stage, each with `CachedSelfAttention`, and its final norm; ``masked`` as `choose_parts`."""
    parts = available_parts(config.params_dtype, masked=masked)
    count = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank)
    if parts.layers == "transformer_engine":
        layer = get_gpt_layer_with_transformer_engine_spec()
        norm = _te_norm()
    else:
        layer = get_gpt_layer_local_spec(normalization=config.normalization)
        norm = ApexNorm if parts.norm == "apex" else TorchNorm
        layer.submodules.input_layernorm = norm
        layer.submodules.pre_mlp_layernorm = norm
        layer.submodules.self_attention.submodules.core_attention = SDPAttention
    attention: ModuleSpec = layer.submodules.self_attention
    attention.module = CachedSelfAttention
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=norm)


def _te_norm() -> Callable[..., Any]:
    from megatron.core.extensions.transformer_engine import TENorm

    norm: Callable[..., Any] = TENorm
    return norm
