"""The load balancing loss that Megatron's routers add to training passes, as a number to report."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import moe_utils

_NAME = "load_balancing_loss"


def take_load_balancing_loss(config: Any, groups: ProcessGroupCollection, passes: int) -> float | None:
    """The mean over layers and passes since the last call, before its coefficient; every rank of the model calls this.

    It is 1 where each expert gets as many tokens as every other (``num_experts`` x the sum over experts of the share of
    tokens times the mean probability, over top-k; Switch Transformers, arXiv:2101.03961, eq. 4).

    Args:
        config: Megatron's, of the model.
        groups: of the model.
        passes: forward and backward passes that were made.

    Returns:
        The same number on all ranks of a replica; None where the model has no such loss.
    """
    if not config.num_moe_experts or not config.moe_aux_loss_coeff:
        return None
    values = torch.zeros(1, device=torch.cuda.current_device() if torch.cuda.is_available() else "cpu")
    found = moe_utils.get_moe_layer_wise_logging_tracker().get(_NAME)
    if found is not None:
        values += found["values"].sum().to(values)
        # Megatron adds every pass of every model in this process to it.
        found["values"].zero_()
    for group in (groups.tp_cp, groups.pp):
        dist.all_reduce(values, group=group)
    return float(values) / (sum(config.moe_layer_freq) * max(passes, 1))
