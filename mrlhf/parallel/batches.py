"""Rollout batches across data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from mrlhf.parallel.collectives import Group, all_gather_objects, all_gather_rows
from mrlhf.parallel.layout import even_share
from mrlhf.types import RolloutBatch


def gather_batch(batch: RolloutBatch, group: Group) -> RolloutBatch:
    """The rows of all data-parallel ranks, in rank order, on every rank.

    Minibatches are drawn from all rows, so that their contents do not depend on the number of data-parallel ranks.

    Args:
        batch: this rank's rows; every rank carries the same fields.
        group: the data-parallel group.

    Returns:
        One batch, as wide as the widest part.
    """
    if dist.get_world_size(group) == 1:
        return batch
    width = max(all_gather_objects(batch.width, group))
    wide = batch.trim(width)
    gathered = {name: all_gather_rows(tensor, group) for name, tensor in wide.tensors().items()}
    parts = [
        wide.replace(**{name: pieces[rank] for name, pieces in gathered.items()})
        for rank in range(dist.get_world_size(group))
    ]
    return RolloutBatch.cat(parts)


def on_other_replicas(
    batch: RolloutBatch, home: Group, group: Group, compute: Callable[[RolloutBatch], torch.Tensor]
) -> torch.Tensor:
    """What a model with replicas of its own says of this rank's rows; every rank of the job calls this together.

    Args:
        batch: this rank's rows as the replicas of ``home`` share them; every rank carries the same fields.
        home: data-parallel group of the batch.
        group: data-parallel group of the model.
        compute: gives ``[N, S-1]`` for the ``N`` rows of ``[N, S]`` that it is handed, perhaps none.

    Returns:
        ``[B, S-1]`` for the rows of ``batch``.
    """
    sizes = all_gather_objects(batch.size, home)
    whole = gather_batch(batch, home)
    mine = whole.select(even_share(whole.size, dist.get_rank(group), dist.get_world_size(group)))
    rows = torch.cat(all_gather_rows(compute(mine), group))
    start = sum(sizes[: dist.get_rank(home)])
    return rows[start : start + batch.size, : batch.width - 1]
