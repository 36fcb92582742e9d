"""Products with weights in oneDNN's order, for the few rows of a decoding step on a CPU.

BLAS copies a weight into an order of its own before it multiplies, every time, which for a few rows and a weight that
leaves the cache takes several times as long as the product. During a rollout the weights stay the same: they are put
in order once and multiplied many times, at the cost of one more copy of the large ones until the rollout ends.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mrlhf.parallel.products import are_widened, by_onednn

PACK_FROM = 3 << 16
"""Elements from which a weight is put in order: smaller ones stay in the cache, and calls of oneDNN cost more.

With 16 rows 768 x 256 took a fifth less on AVX2, 256 x 688 no less."""

ROWS = 64
"""The number of rows for which the order is chosen; with it products of fewer and of more rows are fast too."""

Product = Callable[[torch.Tensor], torch.Tensor]
"""``[T, k] -> [T, n]``."""


def product(weight: torch.Tensor, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None) -> Product:
    """A function that multiplies rows by a weight, which must not change as long as the function is used.

    Args:
        weight: ``[n, k]``.
        bias: ``[n]`` or None.
        dtype: of the rows and of the product; None for the weight's own. A weight of another dtype is converted once.

    Returns:
        ``x [T, k] -> x @ weight.T + bias``, ``[T, n]``.
    """
    weight, bias = weight.detach(), None if bias is None else bias.detach()
    if dtype is not None and dtype != weight.dtype:
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    if not can_pack(weight):
        turned = weight.t()
        if bias is None:
            return lambda x: torch.mm(x, turned)
        return lambda x: torch.addmm(bias, x, turned)
    return _packed(torch.ops.mkldnn._reorder_linear_weight(weight, ROWS), bias)


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    def multiply(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out

    return multiply


def can_pack(weight: torch.Tensor) -> bool:
    """Whether a product with this weight is faster in oneDNN's order: a large one on an x86 CPU.

    In fp32, or in bf16 where the processor multiplies that.
    """
    return (
        # Of a dry run's tensors only the storage tells that there is nothing in them.
        weight.untyped_storage().device.type == "cpu"
        and (weight.dtype is torch.float32 or (weight.dtype is torch.bfloat16 and by_onednn(weight.dtype)))
        and not are_widened(weight.dtype)
        and weight.numel() >= PACK_FROM
        and bool(torch.backends.mkldnn.enabled)
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkl.is_available()  # not on ARM, whose backend takes other operators
    )
