"""Linear layers and attention in bf16 and fp16 on processors without instructions for them (`mrlhf.parallel.products`).

The layers are Megatron's with another product inside ``_forward_impl``: the same parameters, checkpoint keys, messages
(all-gather and reduce-scatter of sequence parallelism, all-reduce of the input's gradient, all in 16 bits) and the
same tensors kept for the backward pass, which are widened when they are multiplied and not before.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from mrlhf.megatron import device
from mrlhf.megatron.own_product import OwnProduct, check_gradients
from mrlhf.parallel.products import LARGE, are_widened, is_widened, product

__all__ = ["attention", "linear", "widens", "with_fp32_products"]


def widens(dtype: torch.dtype) -> bool:
    """Whether a model of this dtype computes its products in fp32 on this process's device."""
    return not device.has_cuda() and are_widened(dtype)


class _Product(torch.autograd.Function):
    """``x w^T`` with its messages, as Megatron's ``LinearWithGradAccumulationAndAsyncCommunication``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        """``[..., k] , [n, k] -> [..., n]``; under sequence parallelism the first dimension is gathered before."""
        # A frozen weight needs no input for its gradient.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.options = (allreduce_dgrad, sequence_parallel, group, x.shape)
        return _multiply(_gathered(x, group)[0] if sequence_parallel else x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of input, weight and bias, in their dtypes."""
        x, weight = ctx.saved_tensors
        allreduce_dgrad, sequence_parallel, group, shape = ctx.options
        gathering: dist.Work | None = None
        if x is not None and sequence_parallel:
            x, gathering = _gathered(x, group, asynchronous=True)
        flat = grad.reshape(-1, grad.size(-1))
        # It is multiplied twice.
        wide = flat.float() if flat.numel() <= LARGE else flat
        of_x = of_weight = of_bias = None
        sending: dist.Work | None = None
        if ctx.needs_input_grad[0]:
            of_x = product(wide, weight, grad.dtype).view(*grad.shape[:-1], weight.size(1))
            if sequence_parallel:
                if gathering is not None:
                    gathering.wait()
                    gathering = None
                whole, of_x = of_x, of_x.new_empty(shape)
                sending = dist.reduce_scatter_tensor(of_x, whole, group=group, async_op=True)
            elif allreduce_dgrad:
                sending = dist.all_reduce(of_x, group=group, async_op=True)
        if gathering is not None:
            gathering.wait()
        if x is not None:
            of_weight = product(wide.t(), x.reshape(-1, x.size(-1)), weight.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = flat.sum(dim=0)
        if sending is not None:
            sending.wait()
        return of_x, of_weight, of_bias, None, None, None


def _gathered(
    x: torch.Tensor, group: dist.ProcessGroup | None, asynchronous: bool = False
) -> tuple[torch.Tensor, dist.Work | None]:
    whole = x.new_empty(x.size(0) * dist.get_world_size(group), *x.shape[1:])
    work = dist.all_gather_into_tensor(whole, x.contiguous(), group=group, async_op=asynchronous)
    return whole, work


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = product(x.reshape(-1, x.size(-1)), weight.t()).view(*x.shape[:-1], weight.size(0))
    return out if bias is None else out + bias


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``F.linear``, with the product in fp32 where 16-bit operands would be slow.

    Args:
        x: ``[..., k]``.
        weight: ``[n, k]`` of the same dtype.
        bias: ``[n]`` or None; added to the rounded product, as Megatron's layers do.

    Returns:
        ``[..., n]`` in the operands' dtype.
    """
    if not is_widened(x):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        recorded: torch.Tensor = _Product.apply(x, weight, bias, False, False, None)
        return recorded
    return _multiply(x, weight, bias)


class _Fp32Product(OwnProduct):
    def multiply(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        """In fp32, rounded once."""
        out: torch.Tensor = _Product.apply(x, weight, bias, allreduce_dgrad, sequence_parallel, group)
        return out


class Fp32ColumnParallelLinear(_Fp32Product, ColumnParallelLinear):
    """``ColumnParallelLinear`` whose 16-bit operands are multiplied in fp32; the same parameters and checkpoint keys.

    Raises:
        ValueError: gradients of weights would bypass autograd.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_gradients(self.config, "layers with fp32 products")


class Fp32RowParallelLinear(_Fp32Product, RowParallelLinear):
    """``RowParallelLinear`` likewise."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_gradients(self.config, "layers with fp32 products")


_INSTEAD: dict[Any, type] = {
    ColumnParallelLinear: Fp32ColumnParallelLinear,
    RowParallelLinear: Fp32RowParallelLinear,
}


def with_fp32_products(spec: Any) -> Any:
    """A layer's specification with the layers above in place of Megatron's linear ones, those of experts included.

    Changed in place and returned. Specifications are data classes inside each other, from Megatron-Core 0.18 on also
    ``functools.partial`` with such arguments.
    """
    if isinstance(spec, functools.partial):
        for key, value in spec.keywords.items():
            spec.keywords[key] = _replaced(value)
    elif dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        for field in dataclasses.fields(spec):
            setattr(spec, field.name, _replaced(getattr(spec, field.name)))
    return spec


def _replaced(value: Any) -> Any:
    return _INSTEAD.get(value, value) if isinstance(value, type) else with_fp32_products(value)


class _CausalAttention(torch.autograd.Function):
    """torch's fused causal attention in fp32, keeping what it keeps in 16 bits: its inputs and its output.

    Query, key, value and (backwards) the output's gradient are widened whole while it runs.
    """

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
        """As `attention`."""
        out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q.float(), k.float(), v.float(), 0.0, True, scale=scale
        )
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        ctx.scale = scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of query, key and value."""
        *inputs, logsumexp = ctx.saved_tensors
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad.float(), *(t.float() for t in inputs), logsumexp, 0.0, True, scale=ctx.scale
        )
        return (*(g.to(grad.dtype) for g in gradients), None)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> torch.Tensor:
    """``scaled_dot_product_attention``, in fp32 where 16-bit operands would be slow; causal where there is no mask.

    Args:
        q: ``[b, heads, s, head_dim]``.
        k: ``[b, kv_heads, t, head_dim]``.
        v: like ``k``.
        mask: bool, True where a query sees a key, or what is added to scores; broadcast to ``[b, heads, s, t]``.
        dropout: of the probabilities.
        scale: of the scores; None for ``head_dim ** -0.5``.

    Returns:
        ``[b, heads, s, head_dim]`` in the dtype of ``q``.
    """
    options: dict[str, Any] = {
        "attn_mask": mask,
        "dropout_p": dropout,
        "is_causal": mask is None,
        "scale": scale,
        "enable_gqa": k.size(1) != q.size(1),
    }
    if not is_widened(q):
        return F.scaled_dot_product_attention(q, k, v, **options)
    fused = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    if mask is None and dropout == 0.0 and fused and q.requires_grad and torch.is_grad_enabled():
        out: torch.Tensor = _CausalAttention.apply(q, k, v, scale)
        return out
    if mask is not None and mask.is_floating_point():
        options["attn_mask"] = mask.float()
    return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), **options).to(q.dtype)
