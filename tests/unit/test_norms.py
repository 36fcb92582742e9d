"""TorchNorm against transformers' LlamaRMSNorm and torch's LayerNorm."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from mrlhf.megatron.norms import ApexNorm, TorchNorm

WIDTH = 48


def norm(kind: str = "RMSNorm", dtype: torch.dtype = torch.float32, **options: Any) -> TorchNorm:
    config = TransformerConfig(
        num_layers=1, hidden_size=WIDTH, num_attention_heads=4, normalization=kind, params_dtype=dtype, **options
    )
    made = TorchNorm(config, WIDTH, eps=1e-3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.5 * torch.randn(WIDTH, generator=generator).to(dtype))
    return made


def inputs(dtype: torch.dtype, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    # Small inputs, so that epsilon matters.
    x = torch.randn(6, 3, WIDTH, generator=generator).mul(scale).to(dtype)
    return x, torch.randn(6, 3, WIDTH, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.02, 30.0])
def test_rms_norm_is_llamas(dtype: torch.dtype, scale: float) -> None:
    ours, theirs = norm(dtype=dtype), LlamaRMSNorm(WIDTH, eps=1e-3).to(dtype)
    with torch.no_grad():
        theirs.weight.copy_(ours.weight)
    x, upstream = inputs(dtype, scale)
    results = []
    for module in (ours, theirs):
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        assert out.dtype == dtype
        results.append((out, *torch.autograd.grad(out, (leaf, module.weight), upstream)))
    # bf16: both round the normalised input once and the product once, so only the last bit may differ.
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 2**-7, "atol": 1e-2}
    torch.testing.assert_close(results[0][0], results[1][0], **tolerance)
    for mine, reference in zip(results[0][1:], results[1][1:], strict=True):
        error = float((mine - reference).abs().max() / reference.abs().max())
        assert error < (1e-5 if dtype is torch.float32 else 2**-6)


def test_bf16_statistics_are_taken_in_fp32() -> None:
    ours = norm(dtype=torch.bfloat16)
    x, _ = inputs(torch.bfloat16, 1.0)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-3).rsqrt() * ours.weight.detach().double()
    assert float(((ours(x).detach().double() - exact) / exact).abs().max()) < 2**-7


def test_layer_norm() -> None:
    ours = norm("LayerNorm")
    assert ours.bias is not None
    x, _ = inputs(torch.float32, 1.0)
    x = x + 3
    centred = x - x.mean(-1, keepdim=True)
    expected = centred * (centred.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * ours.weight + ours.bias
    torch.testing.assert_close(ours(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_parameters_are_marked_for_the_sum_over_tensor_ranks(kind: str, sequence_parallel: bool) -> None:
    made = norm(kind, sequence_parallel=sequence_parallel, tensor_model_parallel_size=2 if sequence_parallel else 1)
    marks = [parameter.sequence_parallel for parameter in made.parameters()]
    assert marks == [sequence_parallel] * (1 if kind == "RMSNorm" else 2)


def test_unknown_normalization() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=4)
    config.normalization = "BatchNorm"
    with pytest.raises(ValueError, match="'BatchNorm'; expected RMSNorm or LayerNorm"):
        TorchNorm(config, WIDTH)


@pytest.mark.parametrize(("kind", "stands_in"), [("RMSNorm", torch.nn.RMSNorm), ("LayerNorm", torch.nn.LayerNorm)])
def test_apex_norm_takes_the_fused_class_of_its_kind(kind: str, stands_in: Any, monkeypatch: Any) -> None:
    # Apex needs CUDA to build; torch's classes take the same arguments.
    apex = types.ModuleType("apex")
    apex.normalization = types.SimpleNamespace(**{f"Fused{kind}": stands_in})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "apex", apex)
    config = TransformerConfig(
        num_layers=1, hidden_size=WIDTH, num_attention_heads=4, normalization=kind, params_dtype=torch.bfloat16,
        tensor_model_parallel_size=2, sequence_parallel=True,
    )  # fmt: skip
    made = ApexNorm(config, WIDTH, eps=1e-3)
    assert isinstance(made, stands_in)
    assert made.eps == 1e-3
    assert all(p.dtype is torch.bfloat16 and p.sequence_parallel for p in made.parameters())
