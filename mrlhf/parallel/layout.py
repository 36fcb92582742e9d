"""Which ranks work together: Megatron's rank order as pure arithmetic."""

from __future__ import annotations

from typing import NamedTuple

from mrlhf.errors import ConfigError
from mrlhf.planner import ParallelSizes


class Coordinates(NamedTuple):
    """Place of a rank on each axis of the grid."""

    tp: int
    cp: int
    dp: int
    pp: int


class RankGrid:
    """The world as a grid in Megatron's order ``tp-cp-ep-dp-pp``: tp changes fastest, pp slowest.

    Raises `ConfigError` when the world is not a multiple of a model replica.
    """

    def __init__(self, sizes: ParallelSizes):
        self.sizes = sizes
        self.shape = Coordinates(
            tp=sizes.tensor_model_parallel_size,
            cp=sizes.context_parallel_size,
            dp=sizes.data_parallel_size,
            pp=sizes.pipeline_model_parallel_size,
        )

    def coordinates(self, rank: int) -> Coordinates:
        """Where ``rank`` stands. Raises `ConfigError` outside the world."""
        if not 0 <= rank < self.sizes.world_size:
            raise ConfigError(f"rank {rank} is outside a world of {self.sizes.world_size} ranks")
        rest, places = rank, []
        for size in self.shape:
            rest, place = divmod(rest, size)
            places.append(place)
        return Coordinates(*places)

    def rank(self, coordinates: Coordinates) -> int:
        """The rank at a place; the inverse of `coordinates`."""
        rank, stride = 0, 1
        for place, size in zip(coordinates, self.shape, strict=True):
            rank += place * stride
            stride *= size
        return rank

    def groups(self, kind: str) -> list[list[int]]:
        """All groups of a kind, each in ascending rank order.

        A kind names the axes inside a group, joined by hyphens in any order: ``tp``, ``dp``, ``tp-pp`` (one replica
        without CP), ``dp-cp``, ... Every rank is in exactly one group of a kind. Raises `ConfigError` for another axis.
        """
        inside = set(kind.split("-"))
        if not inside <= set(Coordinates._fields):
            raise ConfigError(f"group kind {kind!r}: expected some of {', '.join(Coordinates._fields)} with hyphens")
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.sizes.world_size):
            place = self.coordinates(rank)
            outside = tuple(value for axis, value in zip(place._fields, place, strict=True) if axis not in inside)
            members.setdefault(outside, []).append(rank)
        return list(members.values())

    def group_of(self, kind: str, rank: int) -> list[int]:
        """The group of a kind that ``rank`` belongs to. Raises `ConfigError` outside the world."""
        self.coordinates(rank)
        return next(ranks for ranks in self.groups(kind) if rank in ranks)


def data_parallel_slice(rows: int, dp_rank: int, dp_size: int) -> slice:
    """The consecutive rows of one data-parallel rank. Raises `ConfigError` when they do not divide evenly."""
    if rows % dp_size:
        raise ConfigError(f"{rows} rows cannot be shared evenly by DP {dp_size}")
    share = rows // dp_size
    return slice(dp_rank * share, (dp_rank + 1) * share)
