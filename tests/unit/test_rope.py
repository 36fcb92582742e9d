"""Rotary frequencies against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mrlhf.megatron.rope import inverse_frequencies
from mrlhf.model_config import RopeScaling

LLAMA31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA32 = {**LLAMA31, "factor": 32.0}
SHORT = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 8.0, "original_max_position_embeddings": 64}


def theirs(head_dim: int, theta: float, kind: str, **values: Any) -> torch.Tensor:
    parameters = {"rope_type": kind, "rope_theta": theta, **values}
    config = LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, rope_parameters=parameters,
        max_position_embeddings=131072,
    )  # fmt: skip
    if kind == "default":
        return LlamaRotaryEmbedding(config).inv_freq
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[0]


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1e6])
def test_default(head_dim: int, theta: float) -> None:
    ours = inverse_frequencies(head_dim, theta, RopeScaling())
    assert ours.dtype == torch.float32
    assert torch.equal(ours, theirs(head_dim, theta, "default"))


@pytest.mark.parametrize("factor", [2.0, 3.5])
def test_linear(factor: float) -> None:
    ours = inverse_frequencies(64, 10000.0, RopeScaling("linear", factor))
    assert torch.equal(ours, theirs(64, 10000.0, "linear", factor=factor))
    assert not torch.equal(ours, inverse_frequencies(64, 10000.0, RopeScaling()))


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("values", [LLAMA31, LLAMA32, SHORT], ids=["3.1", "3.2", "short"])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_llama3(head_dim: int, values: dict[str, float], theta: float) -> None:
    ours = inverse_frequencies(head_dim, theta, RopeScaling("llama3", **values))
    torch.testing.assert_close(ours, theirs(head_dim, theta, "llama3", **values), rtol=1e-6, atol=0)


def test_llama3_keeps_short_waves_and_divides_long_ones() -> None:
    plain = inverse_frequencies(128, 500000.0, RopeScaling())
    scaled = inverse_frequencies(128, 500000.0, RopeScaling("llama3", **LLAMA31))
    ratio = plain / scaled
    wavelength = 2 * torch.pi / plain
    assert torch.equal(ratio[wavelength < 2048], torch.ones(int((wavelength < 2048).sum())))
    assert torch.equal(ratio[wavelength > 8192], torch.full((int((wavelength > 8192).sum()),), 8.0))
    between = ratio[(wavelength >= 2048) & (wavelength <= 8192)]
    assert between.numel() > 2
    assert bool(((between > 1) & (between < 8) & (between.diff(prepend=between[:1]) >= 0)).all())
