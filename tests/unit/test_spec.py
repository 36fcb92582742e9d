"""Which parts a model is made of, from what is installed and whether there is CUDA."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch

from mrlhf.errors import ConfigError
from mrlhf.megatron import device, spec
from mrlhf.megatron.attention import CachedSelfAttention, SDPAttention
from mrlhf.megatron.fp8 import Fp8
from mrlhf.megatron.norms import TorchNorm
from mrlhf.megatron.spec import Parts, choose_parts

TE = Parts("transformer_engine", "transformer_engine", "transformer_engine", "transformer_engine")
TORCH = Parts("local", "sdpa", "torch", "torch")
APEX = Parts("local", "sdpa", "apex", "apex")


def expected(cuda: bool, transformer_engine: bool, apex: bool, half: bool) -> Parts:
    if not cuda:
        return TORCH
    if transformer_engine and half:
        return TE
    if transformer_engine:
        # Megatron takes its optimizer for every dtype.
        return Parts("local", "sdpa", "apex" if apex else "torch", "transformer_engine")
    return APEX if apex else TORCH


@pytest.mark.parametrize(("cuda", "te", "apex", "half"), list(itertools.product([False, True], repeat=4)))
def test_every_combination(cuda: bool, te: bool, apex: bool, half: bool) -> None:
    parts = choose_parts(cuda=cuda, transformer_engine=te, apex=apex, half=half)
    assert parts == expected(cuda, te, apex, half)
    assert parts.describe() == (
        f"layers: {parts.layers}, attention: {parts.attention}, norm: {parts.norm}, optimizer: {parts.optimizer} Adam"
    )
    assert choose_parts(cuda=cuda, transformer_engine=te, apex=apex, half=half, kernels="local") == TORCH


def package(root: Path, name: str, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for file, text in files.items():
        path = root / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(root))
    for loaded in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, loaded)


@pytest.fixture(autouse=True)
def _forget_packages() -> object:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("apex", "transformer_engine"):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"__init__.py": ""}, False),
        # The PyPI package of that name fails like this when it is imported.
        ({"__init__.py": "from pyramid_that_is_not_there.session import Factory"}, False),
        ({"__init__.py": "", "normalization/__init__.py": ""}, True),
    ],
    ids=["other package", "other package that breaks", "nvidia"],
)
def test_only_nvidias_apex_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], found: bool
) -> None:
    package(tmp_path, "apex", files, monkeypatch)
    assert spec.has_apex() is found


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"__init__.py": "", "pytorch/__init__.py": ""}, True),
        ({"__init__.py": "", "jax/__init__.py": ""}, False),
        ({"__init__.py": "raise OSError('libcudart.so: cannot open shared object file')"}, False),
    ],
    ids=["pytorch", "jax only", "libraries missing"],
)
def test_transformer_engine_of_pytorch_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], found: bool
) -> None:
    package(tmp_path, "transformer_engine", files, monkeypatch)
    assert spec.has_transformer_engine() is found
    monkeypatch.setattr(device, "has_cuda", lambda: False)
    assert spec.available_parts(torch.bfloat16) == TORCH
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    assert spec.available_parts(torch.bfloat16) == (TE if found else TORCH)


def test_without_cuda_nothing_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "transformer_engine", {"__init__.py": "raise RuntimeError('no driver')"}, monkeypatch)
    monkeypatch.setattr(device, "has_cuda", lambda: False)
    assert spec.available_parts(torch.bfloat16) == TORCH


@pytest.mark.skipif(torch.cuda.is_available(), reason="the local layers of a machine without CUDA")
@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_local_layers_of_a_stage(normalization: str) -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=6, hidden_size=8, num_attention_heads=2, normalization=normalization,
        pipeline_model_parallel_size=2, num_layers_in_first_pipeline_stage=4, pipeline_dtype=torch.float32,
    )  # fmt: skip
    for rank, count in ((0, 4), (1, 2)):
        block = spec.block_spec(config, rank, None)
        assert len(block.layer_specs) == count
        assert block.layer_norm is TorchNorm
        layer = block.layer_specs[0].submodules
        assert layer.input_layernorm is TorchNorm
        assert layer.pre_mlp_layernorm is TorchNorm
        assert layer.self_attention.module is CachedSelfAttention
        assert layer.self_attention.submodules.core_attention is SDPAttention


def test_a_model_that_gets_attention_masks_has_no_transformer_engine() -> None:
    parts = choose_parts(cuda=True, transformer_engine=True, apex=False, half=True, masked=True)
    assert (parts.layers, parts.attention) == ("local", "sdpa")


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ({}, None),
        ({"cuda": False}, "there is no CUDA here"),
        ({"transformer_engine": False}, "there is no Transformer Engine here"),
        ({"half": False}, "needs precision.dtype bf16 or fp16"),
        ({"masked": True}, "a reward model with attention masks"),
    ],
)
def test_transformer_engine_by_force(missing: dict[str, bool], message: str | None) -> None:
    found = {"cuda": True, "transformer_engine": True, "apex": False, "half": True, "masked": False, **missing}
    if message is None:
        assert choose_parts(**found, kernels="te") == TE  # type: ignore[arg-type]
        return
    with pytest.raises(ConfigError, match=f"precision.kernels=te.*{message}"):
        choose_parts(**found, kernels="te")  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA")
def test_a_layer_in_fp8_needs_transformer_engine_or_emulation() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2, hidden_size=8, num_attention_heads=2, params_dtype=torch.bfloat16, bf16=True
    )
    with pytest.raises(ConfigError, match="needs Transformer Engine's layers, and this model has local ones"):
        spec.block_spec(config, 0, None, fp8=Fp8("hybrid"))
