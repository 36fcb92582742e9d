"""Rotary frequencies with the scaling rules of the Llama family."""

from __future__ import annotations

import math

import torch

from mrlhf.model_config import RopeScaling


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """``theta^(-2i/d)`` for i in [0, d/2), scaled; fp32 ``[head_dim / 2]`` on the CPU.

    Llama 3.1's rule keeps wavelengths below ``original / high_freq_factor``, divides those above
    ``original / low_freq_factor`` by ``factor``, and interpolates in between
    (``transformers.modeling_rope_utils._compute_llama3_parameters``).
    """
    freqs = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if scaling.kind == "linear":
        return freqs / scaling.factor
    if scaling.kind == "llama3":
        original, low, high = (
            scaling.original_max_position_embeddings,
            scaling.low_freq_factor,
            scaling.high_freq_factor,
        )
        wavelength = 2 * math.pi / freqs
        smooth = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
        blended = (1 - smooth) * freqs / scaling.factor + smooth * freqs
        # The ends are exact divisions, not blends, as in the reference.
        freqs = torch.where(
            wavelength > original / low,
            freqs / scaling.factor,
            torch.where(wavelength < original / high, freqs, blended),
        )
    return freqs
