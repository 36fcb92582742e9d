"""What linear layers with a product of their own share: Megatron's parallel linear layers with another inside."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class OwnProduct:
    """Megatron's ``_forward_impl``, the product inside ``forward`` of both of its parallel linear layers."""

    def _forward_impl(
        self,
        input: torch.Tensor,  # noqa: A002  Megatron's name
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        allreduce_dgrad: bool = False,
        sequence_parallel: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        **_: Any,
    ) -> torch.Tensor:
        return self.multiply(input, weight, bias, allreduce_dgrad, sequence_parallel, tp_group)

    def multiply(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        """``[..., k] , [n, k] -> [..., n]``, with the messages that the two switches ask for."""
        raise NotImplementedError


def check_gradients(config: Any, layers: str) -> None:
    """Refuse settings under which gradients of weights bypass autograd.

    Raises:
        ValueError: naming ``layers`` and the settings.
    """
    if config.gradient_accumulation_fusion or config.defer_embedding_wgrad_compute:
        raise ValueError(
            f"{layers} return the weight's gradient through autograd: set Megatron's "
            "gradient_accumulation_fusion and defer_embedding_wgrad_compute to False"
        )
