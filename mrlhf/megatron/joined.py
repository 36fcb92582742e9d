"""Replicas that share experts make every pass together.

In each mixture-of-experts layer they exchange tokens, so that a replica with fewer passes to make than another one
makes up the number with passes over a few tokens without meaning, whose results are thrown away.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from mrlhf.megatron.fp8 import token_multiple
from mrlhf.parallel.collectives import largest


def passes_of_all(passes: int, groups: ProcessGroupCollection) -> int:
    """The largest number of passes that any replica with the same experts has to make; all of them call this."""
    joined = getattr(groups, "joined", None)
    return passes if joined is None else largest(passes, joined)


def filler_width(model: Any, groups: ProcessGroupCollection) -> int:
    """The fewest tokens that a pass takes under sequence and context parallelism and FP8."""
    tensor = groups.tp.size() if get_model_config(model).sequence_parallel else 1
    context, tokens = groups.cp.size(), token_multiple(model)
    return int(tensor * context * (tokens if context == 1 else math.lcm(tokens, 2)))


def filler_tokens(model: Any, groups: ProcessGroupCollection, device: torch.device) -> torch.Tensor:
    """``[1, filler_width]`` int64."""
    return torch.zeros(1, filler_width(model, groups), dtype=torch.int64, device=device)
