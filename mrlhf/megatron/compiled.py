"""``torch.compile`` of transformer layers in training passes.

A layer without collectives inside is one graph: norms, SwiGLU, rotary embedding and residuals become a few fused loops,
while products and attention stay what they are. All layers share the graph. Widths and rows of micro-batches are
symbols in it, so that it is made once, and once more where a micro-batch has a single row.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mrlhf.megatron import device

COMPILERS = ("g++", "clang++", "c++")
"""Where the environment variable CXX names none."""


class CompiledForward:
    """A layer's forward that is compiled in training passes over padded rows, and as it was in all others.

    Passes without gradient and packed rows would each need graphs of their own; packed rows one for every packing.
    """

    def __init__(self, forward: Any, backend: str) -> None:
        """Nothing is compiled before the first training pass."""
        self.plain = forward
        self.compiled = torch.compile(forward, dynamic=True, backend=backend)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the layer's own."""
        wanted = torch.is_grad_enabled() and kwargs.get("packed_seq_params") is None
        if not wanted or kwargs.get("inference_context") is not None:
            return self.plain(*args, **kwargs)
        return self.compiled(*args, **kwargs)


def compile_layers(chunks: Sequence[Any], *, backend: str = "inductor") -> None:
    """Have the layers of ``chunks`` compiled at their first training pass.

    Args:
        chunks: this rank's stages; their layers have neither collectives nor experts, FP8, recomputation or dropout.
        backend: of ``torch.compile``.
    """
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            layer.forward = CompiledForward(layer.forward, backend)


def compiler_problem() -> str | None:
    """Why layers cannot be compiled on this machine; None where they can. CUDA kernels are Triton's."""
    if device.has_cuda():
        return None
    given = os.environ.get("CXX")
    if given is not None and shutil.which(given) is None:
        return f"the environment variable CXX names {given}, which is no program; unset it, or name a C++ compiler"
    if given is None and not any(shutil.which(name) for name in COMPILERS):
        return f"there is no C++ compiler ({', '.join(COMPILERS)}); install one, or name it in the variable CXX"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        return f"there is no {header}; install Python's headers (package python3-dev on Debian and Ubuntu)"
    return None
