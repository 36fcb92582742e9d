"""Small collectives on top of ``torch.distributed``. Every rank of the group must call each of them.

``group`` is a process group, or None for the world.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.types import Metric, merge_metrics

Group: TypeAlias = dist.ProcessGroup | None


def group_device(group: Group = None) -> torch.device:
    """The device whose tensors the group's backend carries: this process's GPU under NCCL, else the CPU."""
    if "nccl" in str(dist.get_backend(group)).lower():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def all_gather_objects(item: Any, group: Group = None) -> list[Any]:
    """Every rank's picklable object, in rank order."""
    items: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(items, item, group=group)
    return items


def largest(number: int, group: Group = None) -> int:
    """The largest of every rank's whole number."""
    value = torch.tensor([number], dtype=torch.int64, device=group_device(group))
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return int(value.item())


def all_gather_rows(rows: Tensor, group: Group = None) -> list[Tensor]:
    """Every rank's tensor, in rank order, where the ranks may hold different numbers of rows.

    Args:
        rows: ``[N, ...]``; ``N`` may differ, and be 0; the other dimensions and the dtype are the same everywhere.
        group: see above.

    Returns:
        one tensor per rank on the device of ``rows``; no gradient.
    """
    device, world = group_device(group), dist.get_world_size(group)
    mine = torch.tensor([rows.shape[0]], dtype=torch.int64, device=device)
    counts = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(counts, mine, group=group)
    numbers = [int(c.item()) for c in counts]
    # NCCL and gloo want equal sizes; gloo knows no bool.
    kind = torch.uint8 if rows.dtype == torch.bool else rows.dtype
    padded = torch.zeros((max(numbers), *rows.shape[1:]), dtype=kind, device=device)
    padded[: rows.shape[0]] = rows.detach().to(device=device, dtype=kind)
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded, group=group)
    return [part[:n].to(device=rows.device, dtype=rows.dtype) for part, n in zip(parts, numbers, strict=True)]


def all_reduce_moments(count: Tensor, mean: Tensor, m2: Tensor, group: Group = None) -> tuple[Tensor, Tensor, Tensor]:
    """Combine the moments of all ranks (Chan, Golub and LeVeque 1979), in fp64 and in rank order.

    A rank without values joins with zeros. The result is bitwise the same on every rank.

    Args:
        count: scalar, from `mrlhf.rl.masked_moments`.
        mean: scalar.
        m2: scalar, sum of squared deviations from the mean.
        group: normally the data-parallel group.

    Returns:
        ``(count, mean, m2)`` over all ranks, fp64; the population variance is ``m2 / count``.
    """
    mine = torch.stack([torch.as_tensor(x).detach().double() for x in (count, mean, m2)])
    parts = all_gather_rows(mine.unsqueeze(0), group)
    n, mu, deviation = (torch.zeros((), dtype=torch.float64, device=mine.device) for _ in range(3))
    for part in parts:
        part_n, part_mu, part_deviation = part[0]
        total = n + part_n
        share = part_n / total.clamp(min=1)
        difference = part_mu - mu
        deviation = deviation + part_deviation + difference.square() * n * share
        mu = mu + difference * share
        n = total
    return n, mu, deviation


def all_reduce_metrics(metrics: Mapping[str, Metric], group: Group = None) -> dict[str, Metric]:
    """Metrics of all ranks together: the union of the names, each merged in rank order in fp64.

    One collective, whatever the names; a rank that has none still takes part.

    Raises:
        ValueError: two ranks reduce the same name in different ways (on every rank alike).
    """
    mine = {name: (m.reduction, float(m.value), float(m.count)) for name, m in metrics.items()}
    parts = all_gather_objects(mine, group)
    return merge_metrics([{name: Metric(*entry) for name, entry in part.items()} for part in parts])


def broadcast_from_last_stage(
    tensor: Tensor | None, shape: Sequence[int], dtype: torch.dtype, pp_group: Group
) -> Tensor:
    """Give the last pipeline stage's tensor to every stage.

    Args:
        tensor: the result on the last stage; ignored on the others.
        shape: its shape, known to all.
        dtype: its dtype, known to all.
        pp_group: the pipeline group.

    Returns:
        the tensor itself on the last stage, a copy on the others (on the backend's device), no gradient.

    Raises:
        ValueError: on the last stage, if the tensor is missing or differs from ``shape`` and ``dtype``.
    """
    world = dist.get_world_size(pp_group)
    last = dist.get_rank(pp_group) == world - 1
    if last and (tensor is None or tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype):
        have = "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
        raise ValueError(f"the last pipeline stage has {have} to broadcast, expected {dtype} {list(shape)}")
    if world == 1:
        assert tensor is not None
        return tensor.detach()
    kind = torch.uint8 if dtype == torch.bool else dtype
    device = group_device(pp_group)
    if last:
        assert tensor is not None
        buffer = tensor.detach().to(device=device, dtype=kind).contiguous()
    else:
        buffer = torch.empty(tuple(shape), dtype=kind, device=device)
    dist.broadcast(buffer, src=global_rank(pp_group, world - 1), group=pp_group)
    if last:
        assert tensor is not None
        return tensor.detach()
    return buffer.to(dtype)


def global_rank(group: Group, rank: int) -> int:
    """Rank in the world of the ``rank``-th member of ``group``."""
    return rank if group is None else dist.get_global_rank(group, rank)
