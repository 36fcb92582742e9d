"""Megatron's linear layers with FP8 operands in ordinary kernels, for machines without Transformer Engine.

As in Transformer Engine all three products have two FP8 operands: the forward ``x w^T``, the input's gradient ``g w``
and the weight's ``g^T x``. Inputs and weights are e4m3, gradients e5m2 (``hybrid``) or e4m3. Sums are made in fp32;
biases, norms, attention and the heads stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from mrlhf.megatron.fp8 import Fp8
from mrlhf.megatron.fp8_scaling import E4M3, E5M2, DelayedScales, UsedScales, amax_of, current_scale, product, quantize
from mrlhf.megatron.own_product import OwnProduct, check_gradients

Operand = tuple[torch.Tensor, torch.Tensor]
"""An FP8 tensor and its scale."""


class Quantizers(torch.nn.Module):
    """Makes the FP8 operands of one layer.

    ``tensorwise``: every tensor is scaled by itself. Sequence-parallel shards are gathered first, so that their scale
    is that of the whole tensor on every tensor rank; other shards (weights, the row-parallel input) have their own
    scale, as in Transformer Engine. ``delayed``: scales come from earlier training passes, with the largest values
    shared over the tensor and context parallel ranks; passes without gradient use them and only record.
    """

    def __init__(self, fp8: Fp8, groups: Sequence[dist.ProcessGroup], *, recomputed: bool) -> None:
        """Quantizers of ``fp8.recipe``.

        Args:
            fp8: format and recipe.
            groups: ranks with which largest values are shared (delayed).
            recomputed: whether training passes may run the layer a second time before the backward pass.
        """
        super().__init__()
        self.backward_dtype = E5M2 if fp8.format == "hybrid" else E4M3
        self.groups = tuple(groups)
        self.recomputed = recomputed
        self.used = UsedScales()
        self.delayed = fp8.recipe == "delayed"
        if self.delayed:
            options: dict[str, Any] = {
                "history_len": fp8.amax_history_len,
                "algorithm": fp8.amax_compute_algo,
                "margin": fp8.margin,
            }
            self.forward_scales = DelayedScales(2, E4M3, **options)
            self.backward_scales = DelayedScales(1, self.backward_dtype, **options)

    def operands(self, x: torch.Tensor, weight: torch.Tensor, *, with_gradient: bool) -> tuple[Operand, Operand]:
        """Input and weight of a forward pass; ``with_gradient`` is whether autograd records it."""
        if not self.delayed:
            x_scale, weight_scale = (current_scale(amax_of(t), E4M3) for t in (x, weight))
        else:
            x_scale, weight_scale = self._delayed_scales(x, weight, with_gradient).unbind()
        return (quantize(x, x_scale, E4M3), x_scale), (quantize(weight, weight_scale, E4M3), weight_scale)

    def _delayed_scales(self, x: torch.Tensor, weight: torch.Tensor, with_gradient: bool) -> torch.Tensor:
        if with_gradient and (again := self.used.take()) is not None:
            # The second pass of a recomputed layer: nothing is new in it.
            return again
        scales = self.forward_scales.scale.clone()
        self.forward_scales.record(torch.stack([amax_of(x), amax_of(weight)]))
        first_of_two = self.recomputed and self.training and not with_gradient
        if first_of_two:
            self.used.keep(scales)
        if with_gradient or first_of_two:
            self.forward_scales.update(self.groups)
        return scales

    def gradient(self, grad: torch.Tensor) -> Operand:
        """The output's gradient in a backward pass."""
        if not self.delayed:
            scale = current_scale(amax_of(grad), self.backward_dtype)
        else:
            scale = self.backward_scales.scale[0].clone()
            self.backward_scales.record(amax_of(grad)[None])
            self.backward_scales.update(self.groups)
        return quantize(grad, scale, self.backward_dtype), scale


class Fp8Product(torch.autograd.Function):
    """``x w^T`` and its two gradients, each of FP8 operands."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, quantizers: Quantizers, with_gradient: bool
    ) -> torch.Tensor:
        """``[..., k] , [n, k] -> [..., n]`` in the dtype of ``x``."""
        flat = x.reshape(-1, x.size(-1))
        (qx, x_scale), (qw, w_scale) = quantizers.operands(flat, weight, with_gradient=with_gradient)
        ctx.save_for_backward(qx, x_scale, qw, w_scale)
        ctx.quantizers, ctx.shape, ctx.dtypes = quantizers, x.shape, (x.dtype, weight.dtype)
        return product(qx, x_scale, qw.t(), w_scale).to(x.dtype).view(*x.shape[:-1], weight.size(0))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of ``x`` and the weight, in their dtypes."""
        qx, x_scale, qw, w_scale = ctx.saved_tensors
        qg, g_scale = ctx.quantizers.gradient(grad.reshape(-1, grad.size(-1)))
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = product(qg, g_scale, qw, w_scale).to(ctx.dtypes[0]).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            of_weight = product(qg.t(), g_scale, qx, x_scale).to(ctx.dtypes[1])
        return of_x, of_weight, None, None


class _Fp8Forward(OwnProduct):
    quantizers: Quantizers

    def multiply(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        """Of FP8 operands."""
        if sequence_parallel:
            x = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=group)
        elif allreduce_dgrad:
            x = copy_to_tensor_model_parallel_region(x, group=group)
        output: torch.Tensor = Fp8Product.apply(x, weight, self.quantizers, torch.is_grad_enabled())
        return output if bias is None else output + bias


class Fp8ColumnParallelLinear(_Fp8Forward, ColumnParallelLinear):
    """``ColumnParallelLinear`` with FP8 operands; the same parameters and checkpoint keys."""

    def __init__(self, *args: Any, fp8: Fp8, amax_groups: Sequence[dist.ProcessGroup], **kwargs: Any) -> None:
        """As Megatron's, with the recipe and the ranks that share largest values."""
        super().__init__(*args, **kwargs)
        self.quantizers = _quantizers(self.config, fp8, amax_groups)


class Fp8RowParallelLinear(_Fp8Forward, RowParallelLinear):
    """``RowParallelLinear`` with FP8 operands; the same parameters and checkpoint keys."""

    def __init__(self, *args: Any, fp8: Fp8, amax_groups: Sequence[dist.ProcessGroup], **kwargs: Any) -> None:
        """As Megatron's, with the recipe and the ranks that share largest values."""
        super().__init__(*args, **kwargs)
        self.quantizers = _quantizers(self.config, fp8, amax_groups)


def _quantizers(config: Any, fp8: Fp8, groups: Sequence[dist.ProcessGroup]) -> Quantizers:
    check_gradients(config, "the emulated FP8 layers")
    return Quantizers(fp8, groups, recomputed=config.recompute_granularity is not None)
