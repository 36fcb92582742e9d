"""RMSNorm and LayerNorm that work under sequence parallelism.

Megatron's ``WrappedTorchNorm`` refuses sequence parallelism, since nothing would sum the gradient of its weight over
the tensor ranks, each of which sees a part of the sequence. Marked parameters are summed by ``finalize_model_grads``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig


class TorchNorm(torch.nn.Module):
    """RMSNorm or LayerNorm, by ``config.normalization``; statistics in fp32 whatever the input's dtype."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        if config.normalization not in ("RMSNorm", "LayerNorm"):
            raise ValueError(f"normalization {config.normalization!r}; expected RMSNorm or LayerNorm")
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of ``x``; same shape and dtype."""
        shape = (x.size(-1),)
        if self.bias is not None:
            return F.layer_norm(x, shape, self.weight, self.bias, self.eps)
        if x.dtype in (torch.float32, torch.float64):
            return F.rms_norm(x, shape, self.weight, self.eps)
        # Llama's order: round to the input's dtype first, then multiply by the weight.
        return F.rms_norm(x.float(), shape, None, self.eps).to(x.dtype) * self.weight


class ApexNorm:
    """NVIDIA Apex's fused RMSNorm or LayerNorm, by ``config.normalization``, with the mark of sequence parallelism."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        """Build the norm; `ImportError` without Apex."""
        from apex import normalization

        kind = {"RMSNorm": "FusedRMSNorm", "LayerNorm": "FusedLayerNorm"}[config.normalization]
        norm: torch.nn.Module = getattr(normalization, kind)(hidden_size, eps=eps).to(config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm
