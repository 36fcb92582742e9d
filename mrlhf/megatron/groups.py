"""Process groups of one model: Megatron's `ProcessGroupCollection`, built from our own sizes.

Every model owns a collection that is handed to it, to DDP, to the optimizer and to the schedule; ``parallel_state``,
Megatron's global variable, is never read. So models with other sizes can live in the same process.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from mrlhf.parallel.layout import RankGrid
from mrlhf.planner import ParallelSizes


def build_groups(sizes: ParallelSizes, timeout: timedelta | None = None) -> ProcessGroupCollection:
    """Create every group of the layout; all ranks of the world call this together.

    Args:
        sizes: parallel sizes; ``sizes.world_size`` ranks starting at rank 0.
        timeout: the same limit for every group. Without it torch's default of 10 or 30 minutes would apply to the
            sub-groups, whatever the world's own limit is, and a long rollout would be cut off.

    Returns:
        Megatron's collection with ``tp, cp, dp, pp, mp, embd, pos_embd, dp_cp, tp_cp`` and the expert and
        distributed-optimizer groups.
    """
    grid = RankGrid(sizes)

    def make(kind: str) -> dist.ProcessGroup:
        own = None
        for ranks in grid.groups(kind):
            group = dist.new_group(ranks, timeout=timeout)
            if dist.get_rank() in ranks:
                own = group
        assert own is not None, f"rank {dist.get_rank()} is in no {kind} group of {sizes}"
        return own

    groups = ProcessGroupCollection(
        tp=make("tp"), cp=make("cp"), dp=make("dp"), pp=make("pp"), mp=make("tp-pp"), tp_cp=make("tp-cp"),
        dp_cp=make("dp-cp"),
    )  # fmt: skip
    groups.tp_dp_cp = make("tp-cp-dp")
    groups.embd = _first_and_last(grid, timeout)
    groups.pos_embd = None
    groups.ep = _singletons(sizes.world_size, timeout)
    groups.expt_tp = groups.tp
    groups.tp_ep = groups.tp
    groups.tp_ep_pp = groups.mp
    groups.expt_dp = groups.dp_cp
    groups.intra_dp_cp = groups.dp_cp
    groups.intra_expt_dp = groups.dp_cp
    groups.intra_dist_opt = make("tp-cp-dp-pp")
    return groups


def _singletons(world_size: int, timeout: timedelta | None) -> dist.ProcessGroup:
    own = None
    for rank in range(world_size):
        group = dist.new_group([rank], timeout=timeout)
        if rank == dist.get_rank():
            own = group
    return own


def _first_and_last(grid: RankGrid, timeout: timedelta | None) -> dist.ProcessGroup | None:
    """The group that keeps a tied embedding and head equal: first and last stage of each pipeline."""
    own = None
    for ranks in grid.groups("pp"):
        ends = [ranks[0]] if len(ranks) == 1 else [ranks[0], ranks[-1]]
        group = dist.new_group(ends, timeout=timeout)
        if dist.get_rank() in ends:
            own = group
    return own
