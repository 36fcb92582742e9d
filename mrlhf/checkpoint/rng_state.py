"""The states of all random number generators of a process."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from mrlhf.megatron import device


def rng_state() -> dict[str, Any]:
    """Of Python, numpy, torch, Megatron's tracker and CUDA, as far as they are there."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "tracker": {name: value.clone() for name, value in get_cuda_rng_tracker().get_states().items()},
    }
    if device.has_cuda():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Put back what `rng_state` gave."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(dict(state["tracker"]))
    if device.has_cuda() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
