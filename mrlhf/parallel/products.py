"""Matrix products of bf16 and fp16 operands on processors that have no instructions for them.

There torch multiplies 16-bit matrices in a plain loop, up to a hundred times slower than fp32 ones. Such operands are
exact in fp32, and so is the product of any two, so they are widened, multiplied and summed in fp32, and the result is
rounded once: at least as accurate as hardware for 16-bit products. Parameters, activations and messages stay in 16
bits; only the operands of one product at a time are widened: the larger one in tiles where it is large, the other one
whole.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from platform import machine
from typing import Any, Literal, cast, get_args

import torch

from mrlhf.errors import ConfigError

Products = Literal["auto", "native", "fp32"]
"""16-bit products: by what the processor has, always torch's own, or always in fp32."""

VARIABLE = "MRLHF_CPU_PRODUCTS"
"""Name of the environment variable that holds one of `Products`."""

HALF = (torch.bfloat16, torch.float16)

FEW_ROWS, TILE, LARGE = 64, 1 << 18, 1 << 24
"""With up to so many rows a weight is widened in tiles of 1 MiB, which stay in the cache until they are multiplied (up
to three times as fast as all at once, and faster than an fp32 weight); with more rows, in tiles of 64 MiB."""

_chosen: Products | None = None


def has_fast_bf16() -> bool:
    """Whether this processor multiplies bf16 matrices with instructions of its own; see `has_fast`."""
    return has_fast(torch.bfloat16)


@functools.cache
def has_fast(dtype: torch.dtype) -> bool:
    """Whether torch multiplies matrices of a 16-bit dtype with this processor's own instructions.

    Decided by the kind of processor, never measured, so that all ranks on machines of one kind decide alike.
    """
    report: Callable[[], Mapping[str, Any]] | None = getattr(torch.cpu, "get_capabilities", None)
    if report is not None:
        return is_fast(dtype, by_onednn(dtype), report())
    # Older versions of torch only answer single questions.
    found = {name: getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in _QUESTIONS}
    return is_fast(dtype, by_onednn(dtype), {**found, "amx_bf16": found["amx_tile"], "architecture": machine()})


_QUESTIONS = ("avx512_bf16", "amx_tile", "amx_fp16")


def by_onednn(dtype: torch.dtype) -> bool:
    """Whether torch gives products of a 16-bit dtype to oneDNN on this processor."""
    name = "bf16" if dtype is torch.bfloat16 else "fp16"
    try:
        return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")())
    except (AttributeError, RuntimeError):  # a torch without oneDNN
        return False


def is_fast(dtype: torch.dtype, by_onednn: bool, processor: Mapping[str, Any]) -> bool:
    """The decision of `has_fast`.

    Args:
        dtype: bf16 or fp16.
        by_onednn: whether torch gives such products to oneDNN here. With AVX-512 alone it does, and oneDNN converts.
        processor: ``torch.cpu.get_capabilities()``: names of instructions, and the ``architecture``.
    """
    if processor.get("architecture") not in ("x86_64", "AMD64", "x86", None):
        # On Arm oneDNN takes them only where there are instructions.
        return by_onednn
    names = {
        torch.bfloat16: ("avx512_bf16", "amx_bf16", "avx_ne_convert"),
        torch.float16: ("avx512_fp16", "amx_fp16", "avx_ne_convert"),
    }[dtype]
    return by_onednn and any(processor.get(name, False) for name in names)


def setting(environ: Mapping[str, str] = os.environ) -> Products:
    """What ``MRLHF_CPU_PRODUCTS`` says; ``auto`` where it is not set.

    Raises:
        ConfigError: it is set to something else.
    """
    text = environ.get(VARIABLE) or "auto"
    if text not in get_args(Products):
        raise ConfigError(f"{VARIABLE} is {text!r}; give {', '.join(get_args(Products))}, or leave it out (auto)")
    return cast(Products, text)


def problems(environ: Mapping[str, str] = os.environ) -> list[str]:
    """What is wrong with the environment variable, as a line of a message; empty where nothing is."""
    try:
        setting(environ)
    except ConfigError as error:
        return [str(error)]
    return []


@contextlib.contextmanager
def chosen(products: Products) -> Iterator[None]:
    """Within the context ``products`` is decided, whatever the environment says."""
    global _chosen
    before, _chosen = _chosen, products
    try:
        yield
    finally:
        _chosen = before


def are_widened(dtype: torch.dtype) -> bool:
    """Whether products of this dtype are computed in fp32 on the CPU; never for fp32 and fp64."""
    if dtype not in HALF:
        return False
    products = _chosen or setting()
    return products == "fp32" or (products == "auto" and not has_fast(dtype))


def is_widened(operand: torch.Tensor) -> bool:
    """Whether products of this tensor are computed in fp32."""
    return operand.dtype in HALF and operand.device.type == "cpu" and are_widened(operand.dtype)


def product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``a @ b`` of two 16-bit matrices in fp32, rounded once; not recorded by autograd.

    Args:
        a: ``[m, k]``, in any order in memory; may be widened already.
        b: ``[k, n]``, likewise.
        dtype: of the result; None for that of ``a``.

    Returns:
        ``[m, n]``.
    """
    dtype = dtype or a.dtype
    (m, k), n = a.shape, b.size(1)
    few = m <= FEW_ROWS and b.stride(0) == 1
    if few and m == 1 and a.dtype is b.dtype is dtype is torch.bfloat16:
        # torch's own product of one row is not slow, sums in fp32, and reads half the bytes.
        return a @ b
    tile = TILE if few else LARGE
    if max(k * n, m * n, m * k) <= tile:
        return (a.float() @ b.float()).to(dtype)
    if m > n:
        # The same with both sides turned around, so that the larger operand is the one in tiles.
        return product(b.t(), a.t(), dtype).t().contiguous()
    out, wide = a.new_empty(m, n, dtype=dtype), a.float()
    width = max(tile // max(k, m), 1)
    for start in range(0, n, width):
        out[:, start : start + width] = wide @ b[:, start : start + width].float()
    return out
