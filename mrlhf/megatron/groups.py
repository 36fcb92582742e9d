"""Process groups of one model: Megatron's `ProcessGroupCollection`, built from our own sizes.

Every model owns a collection that is handed to it, to DDP, to the optimizer and to the schedule; ``parallel_state``,
Megatron's global variable, is never read. So models with other sizes can live in the same process.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from mrlhf.parallel.layout import ExpertGroupKind, GroupKind, RankGrid
from mrlhf.planner import ParallelSizes

__all__ = ["ProcessGroupCollection", "build_groups"]


def build_groups(sizes: ParallelSizes, timeout: timedelta | None = None, *, first: int = 0) -> ProcessGroupCollection:
    """Create every group of the layout; all ranks of the world call this together.

    Args:
        sizes: parallel sizes of ``sizes.world_size`` ranks in a row.
        timeout: the same limit for every group. Without it torch's default of 10 or 30 minutes would apply to the
            sub-groups, whatever the world's own limit is, and a long rollout would be cut off.
        first: the first of these ranks. The others of the world get a collection in which every group is None.

    Returns:
        Megatron's collection; ranks with neither embedding nor output layer have ``embd`` None.
    """
    # The one global of Megatron's that its linear layers need: a scratch buffer for sequence-parallel gathers.
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    grid = RankGrid(sizes)

    def own(partition: list[list[int]]) -> dist.ProcessGroup | None:
        """Make all groups of a partition, as every rank must; the one that this rank is in."""
        mine = None
        for places in partition:
            ranks = [first + place for place in places]
            group = dist.new_group(ranks, timeout=timeout)
            if dist.get_rank() in ranks:
                mine = group
        return mine

    kinds: tuple[GroupKind, ...] = ("tp", "cp", "dp", "pp", "mp", "tp_cp", "dp_cp", "embd")
    groups = ProcessGroupCollection(**{kind: own(grid.groups(kind)) for kind in kinds})
    # Not Megatron's: all ranks that have the same rows.
    groups.replica = groups.mp if sizes.context_parallel_size == 1 else own(grid.groups("replica"))
    world = list(range(sizes.world_size))
    stage = sizes.world_size // sizes.pipeline_model_parallel_size
    groups.tp_dp_cp = own([world[start : start + stage] for start in range(0, len(world), stage)])
    groups.intra_dist_opt = own([world])
    groups.pos_embd = None
    groups.intra_dp_cp = groups.dp_cp
    if sizes.expert_model_parallel_size == 1:
        groups.ep = own([[rank] for rank in world])
        groups.expt_tp = groups.tp_ep = groups.tp
        groups.tp_ep_pp = groups.mp
        groups.expt_dp = groups.dp_cp
    else:
        expert_kinds: tuple[ExpertGroupKind, ...] = ("ep", "expt_tp", "expt_dp", "tp_ep", "tp_ep_pp")
        for expert_kind in expert_kinds:
            setattr(groups, expert_kind, own(grid.expert_groups(expert_kind)))
    groups.intra_expt_dp = groups.expt_dp
    # Not Megatron's either: replicas that make every pass together, since they share experts; None where none does.
    groups.joined = own(grid.joined_replicas()) if sizes.joined_replicas > 1 else None
    return groups
