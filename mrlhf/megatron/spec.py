"""Which parts a model is made of and trained by, decided in one place.

Transformer Engine's modules are used for bf16 and fp16 where it can be imported **and** CUDA is present (with
Transformer Engine but without CUDA its kernels cannot run); otherwise Megatron's own layers with our attention and
norms, and Apex's fused norms where NVIDIA's Apex is installed and CUDA is present. ``precision.kernels`` can force
either. The optimizer is what Megatron takes when it is imported: Transformer Engine's, Apex's, or torch's.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from mrlhf.errors import ConfigError
from mrlhf.megatron import device
from mrlhf.megatron.attention import CachedSelfAttention, SDPAttention
from mrlhf.megatron.cpu_products import widens, with_fp32_products
from mrlhf.megatron.fp8 import Fp8
from mrlhf.megatron.fp8_linear import Fp8ColumnParallelLinear, Fp8RowParallelLinear
from mrlhf.megatron.norms import ApexNorm, TorchNorm

Kernels = Literal["auto", "local", "te"]
"""What the user wants: the best there is, nothing but Megatron's and torch's, or Transformer Engine's."""


@dataclass(frozen=True)
class Parts:
    """The chosen implementations."""

    layers: Literal["transformer_engine", "local"]
    attention: Literal["transformer_engine", "sdpa"]
    norm: Literal["transformer_engine", "apex", "torch"]
    optimizer: Literal["transformer_engine", "apex", "torch"]

    def describe(self) -> str:
        """One line for the log."""
        return (
            f"layers: {self.layers}, attention: {self.attention}, norm: {self.norm}, optimizer: {self.optimizer} Adam"
        )


def has_apex() -> bool:
    """Whether NVIDIA's Apex is installed; the unrelated PyPI package of that name has no ``normalization``."""
    return _found("apex.normalization")


def has_apex_optimizers() -> bool:
    """Whether NVIDIA's Apex has its fused Adam, for which Megatron-Core looks."""
    return _found("apex.optimizers")


def wrong_apex() -> str | None:
    """A warning that names a package ``apex`` which is not NVIDIA's; None where there is none or the right one."""
    try:
        if importlib.util.find_spec("apex") is None or has_apex():
            return None
    except ValueError:
        # A module made by hand, without a spec.
        return None
    try:
        found = importlib.metadata.metadata("apex")
        about = f" {found['Version']} ({found['Summary']})"
    except importlib.metadata.PackageNotFoundError:
        about = ""
    return (
        f"the installed package apex{about} is not NVIDIA's Apex but another one of that name, and is not used; "
        "`pip uninstall apex`, and build NVIDIA's from https://github.com/NVIDIA/apex where you want its fused norms"
    )


def has_transformer_engine() -> bool:
    """Whether Transformer Engine for PyTorch can be found."""
    return _found("transformer_engine.pytorch")


def transformer_engine_version() -> tuple[int, int] | None:
    """Transformer Engine's major and minor version, None where it cannot be found."""
    if not has_transformer_engine():
        return None
    for name in ("transformer-engine", "transformer-engine-torch"):
        try:
            numbers = re.findall(r"\d+", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
        return int(numbers[0]), int(numbers[1])
    module = importlib.import_module("transformer_engine")
    numbers = re.findall(r"\d+", str(getattr(module, "__version__", "0.0")))
    return int(numbers[0]), int(numbers[1])


def _found(module: str) -> bool:
    try:
        # This imports the parent package, which may be another package of that name, or built for other libraries.
        return importlib.util.find_spec(module) is not None
    except (ImportError, OSError):
        return False


def choose_parts(
    *,
    cuda: bool,
    transformer_engine: bool,
    apex: bool,
    half: bool,
    masked: bool = False,
    apex_optimizers: bool | None = None,
    kernels: Kernels = "auto",
) -> Parts:
    """Decide from what is there; pure, so that every combination is tested without the packages.

    Transformer Engine computes fp32 products in TF32 and has no fused attention for them, so it is for ``half``
    (bf16 and fp16) models only; an fp32 run is asked for to be exact. Its causal attention takes no mask, so a model
    that gets one (``masked``) has Megatron's own layers.

    Raises:
        ConfigError: ``kernels`` asks for Transformer Engine where it cannot be used; the message says why.
    """
    usable = cuda and transformer_engine and half and not masked
    if kernels == "te" and not usable:
        raise ConfigError(_no_transformer_engine(cuda, transformer_engine, half))
    if kernels == "local":
        return Parts("local", "sdpa", "torch", "torch")
    optimizer: Literal["transformer_engine", "apex", "torch"] = "torch"
    if cuda and (transformer_engine or (apex if apex_optimizers is None else apex_optimizers)):
        optimizer = "transformer_engine" if transformer_engine else "apex"
    if usable:
        return Parts("transformer_engine", "transformer_engine", "transformer_engine", optimizer)
    return Parts("local", "sdpa", "apex" if cuda and apex else "torch", optimizer)


def _no_transformer_engine(cuda: bool, transformer_engine: bool, half: bool) -> str:
    if not cuda or not transformer_engine:
        return (
            f"precision.kernels=te needs CUDA and Transformer Engine, and there is no "
            f"{'CUDA' if not cuda else 'Transformer Engine'} here; use precision.kernels=auto"
        )
    if not half:
        return "precision.kernels=te needs precision.dtype bf16 or fp16 (fp32 would be computed in TF32)"
    return "precision.kernels=te: a reward model with attention masks has no Transformer Engine layers; use auto"


def available_parts(dtype: torch.dtype, *, masked: bool = False, kernels: Kernels = "auto") -> Parts:
    """`choose_parts` for this machine and a model of this dtype. Raises `ConfigError` as that does."""
    cuda = device.has_cuda()
    return choose_parts(
        cuda=cuda,
        transformer_engine=cuda and has_transformer_engine(),
        apex=cuda and has_apex(),
        apex_optimizers=cuda and has_apex_optimizers(),
        half=dtype in (torch.bfloat16, torch.float16),
        masked=masked,
        kernels=kernels,
    )


def block_spec(
    config: TransformerConfig,
    pp_rank: int,
    vp_stage: int | None,
    *,
    masked: bool = False,
    kernels: Kernels = "auto",
    fp8: Fp8 | None = None,
    groups: ProcessGroupCollection | None = None,
) -> TransformerBlockSubmodules:
    """The layers of one stage, each with `CachedSelfAttention`, and its final norm.

    Args:
        config: of the model.
        pp_rank: the pipeline stage.
        vp_stage: the virtual stage.
        masked: see `choose_parts`.
        kernels: see `choose_parts`.
        fp8: of the linear layers; only emulated FP8 is a matter of the layers themselves.
        groups: the model's process groups, for emulated FP8.

    Raises:
        ConfigError: as `choose_parts`, or FP8 is asked for where there is no Transformer Engine and no emulation.
    """
    emulated = fp8 is not None and fp8.emulated
    parts = available_parts(config.params_dtype, masked=masked or emulated, kernels=kernels)
    if fp8 is not None and not emulated and parts.layers != "transformer_engine":
        raise ConfigError(f"precision.fp8={fp8.format} needs Transformer Engine's layers, and this model has "
                          f"{parts.layers} ones; set precision.fp8_emulation=true")  # fmt: skip
    first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pp_rank)
    numbers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank))
    # Only Transformer Engine multiplies all experts of a rank at once; Megatron's own layers take them in turn.
    config.moe_grouped_gemm = config.num_moe_experts is not None and parts.layers == "transformer_engine"
    if parts.layers == "transformer_engine":
        norm = _te_norm()
        kinds = {experts: _te_layer(config, experts) for experts in set(_experts(config, numbers))}
        layers = [kinds[experts] for experts in _experts(config, numbers)]
    else:
        norm = ApexNorm if parts.norm == "apex" else TorchNorm
        kinds = {experts: _local_layer(config, norm, experts) for experts in set(_experts(config, numbers))}
        layers = [kinds[experts] for experts in _experts(config, numbers)]
        if fp8 is not None and groups is not None:
            rounded = _with_fp8(_local_layer(config, norm, config.num_moe_experts), fp8, groups)
            layers = [
                rounded if fp8.includes_layer(n, config.num_layers) else plain
                for n, plain in zip(numbers, layers, strict=True)
            ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _experts(config: TransformerConfig, numbers: range) -> list[int | None]:
    """The experts of each layer; None for a dense one."""
    if config.num_moe_experts is None:
        return [None] * len(numbers)
    return [config.num_moe_experts if config.moe_layer_freq[number] else None for number in numbers]


def _te_layer(config: TransformerConfig, experts: int | None) -> ModuleSpec:
    layer: ModuleSpec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=experts, moe_grouped_gemm=experts is not None, qk_layernorm=config.qk_layernorm
    )
    layer.submodules.self_attention.module = CachedSelfAttention
    return layer


def _local_layer(config: TransformerConfig, norm: Any, experts: int | None) -> ModuleSpec:
    layer: ModuleSpec = get_gpt_layer_local_spec(
        num_experts=experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    if config.qk_layernorm:
        layer.submodules.self_attention.submodules.q_layernorm = norm
        layer.submodules.self_attention.submodules.k_layernorm = norm
    layer.submodules.input_layernorm = norm
    layer.submodules.pre_mlp_layernorm = norm
    layer.submodules.self_attention.module = CachedSelfAttention
    layer.submodules.self_attention.submodules.core_attention = SDPAttention
    return with_fp32_products(layer) if widens(config.params_dtype) else layer


def _with_fp8(layer: ModuleSpec, fp8: Fp8, groups: ProcessGroupCollection) -> ModuleSpec:
    """``layer`` with emulated FP8 in the linear layers of attention and MLP."""
    params = {"fp8": fp8, "amax_groups": (groups.tp, groups.cp)}
    column = ModuleSpec(module=Fp8ColumnParallelLinear, params=params)
    row = ModuleSpec(module=Fp8RowParallelLinear, params=params)
    attention = layer.submodules.self_attention.submodules
    attention.linear_qkv, attention.linear_proj = column, row
    # From Megatron-Core 0.18 the MLP's spec is a functools.partial.
    mlp = layer.submodules.mlp
    parts = mlp.submodules if isinstance(mlp, ModuleSpec) else mlp.keywords["submodules"]
    if not hasattr(parts, "linear_fc1"):
        raise ConfigError("precision.fp8_emulation knows dense layers only, not a mixture of experts")
    parts.linear_fc1, parts.linear_fc2 = column, row
    return layer


def _te_norm() -> Callable[..., Any]:
    from megatron.core.extensions.transformer_engine import TENorm

    norm: Callable[..., Any] = TENorm
    return norm
