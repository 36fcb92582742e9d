"""Rollout batches across data-parallel ranks."""

from __future__ import annotations

import torch.distributed as dist

from mrlhf.parallel.collectives import Group, all_gather_objects, all_gather_rows
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
