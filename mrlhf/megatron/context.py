"""Context parallelism: every rank of a CP group holds a part of each row.

A row is cut into ``2 CP`` equal pieces, and rank ``r`` has pieces ``r`` and ``2 CP - 1 - r``, so that all ranks have as
much to attend to (the "zigzag" of Llama 3, arXiv:2407.21783, section 3.3.2, and of Transformer Engine). What the head
says of the parts is put together again, and every rank computes the loss of whole rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region


def part_of_rank(width: int, rank: int, size: int, device: torch.device | None = None) -> torch.Tensor:
    """``[width / size]`` int64: the slots of a row that a rank holds, in its order.

    Raises:
        ValueError: ``width`` is not a multiple of ``2 size``.
    """
    piece, rest = divmod(width, 2 * size)
    if rest:
        raise ValueError(f"{width} slots cannot be cut into 2 x CP {size} equal pieces")
    starts = (rank * piece, (2 * size - 1 - rank) * piece)
    return torch.cat([torch.arange(start, start + piece, device=device) for start in starts])


def all_parts(width: int, size: int, device: torch.device | None = None) -> torch.Tensor:
    """``[width]`` int64: the slots of all ranks' parts, one rank after the other."""
    return torch.cat([part_of_rank(width, rank, size, device) for rank in range(size)])


def whole_rows(part: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Put the parts of all ranks together in dimension ``dim``, in the order of the row.

    The gradient of a part is the gradient of its slots: every rank computes the same loss of the whole.
    """
    joined: torch.Tensor = _WholeRows.apply(part, dim, group)
    return joined


class _WholeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        """See `whole_rows`."""
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        mine = part.contiguous()
        parts = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(parts, mine, group=group)
        width = part.size(dim) * size
        ctx.dim, ctx.index = dim, part_of_rank(width, rank, size, part.device)
        order = all_parts(width, size, part.device).argsort()
        return torch.cat(parts, dim).index_select(dim, order)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Each rank's own slots."""
        return gradients[0].index_select(ctx.dim, ctx.index), None, None


def gather_keys(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Keys or values ``[s / CP, ...]`` of all ranks as ``[s, ...]`` in the order of `all_parts`.

    The gradient of a part is the sum over what the queries of all ranks make of it.
    """
    gathered: torch.Tensor = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=group)
    return gathered


def hidden_keys(part: int, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    """Bool ``[part, part CP]``, True where a query of this rank does not see a key of `gather_keys`."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    queries, keys = part_of_rank(part * size, rank, size, device), all_parts(part * size, size, device)
    return keys[None, :] > queries[:, None]
