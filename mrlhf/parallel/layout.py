"""Which ranks work together: Megatron's rank order as pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from mrlhf.errors import ConfigError
from mrlhf.planner import ParallelSizes

GroupKind = Literal["tp", "cp", "dp", "pp", "mp", "replica", "tp_cp", "dp_cp", "tp_dp_cp", "embd"]
ExpertGroupKind = Literal["ep", "expt_tp", "expt_dp", "tp_ep", "tp_ep_pp"]

_MEMBERS: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "mp": ("tp", "pp"),
    "replica": ("tp", "cp", "pp"),
    "tp_cp": ("tp", "cp"),
    "dp_cp": ("cp", "dp"),
    "tp_dp_cp": ("tp", "cp", "dp"),
}

_EXPERT_MEMBERS: dict[str, tuple[str, ...]] = {
    "ep": ("ep",),
    "expt_tp": ("tp",),
    "expt_dp": ("dp",),
    "tp_ep": ("tp", "ep"),
    "tp_ep_pp": ("tp", "ep", "pp"),
}


class ExpertCoordinates(NamedTuple):
    """Place of a rank on each axis of the experts' grid; ``tp`` and ``dp`` are those of the experts."""

    tp: int
    ep: int
    dp: int
    pp: int


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

    def expert_coordinates(self, rank: int) -> ExpertCoordinates:
        """Where ``rank`` stands among the experts, the same ranks of a stage laid out as ETP x EP x their own DP."""
        stage, place = divmod(rank, self.sizes.stage_ranks)
        rest, tp = divmod(place, self.sizes.expert_tensor_size)
        dp, ep = divmod(rest, self.sizes.expert_model_parallel_size)
        return ExpertCoordinates(tp, ep, dp, stage)

    def expert_groups(self, kind: ExpertGroupKind) -> list[list[int]]:
        """As `groups`, of the experts' grid.

        ``expt_tp`` ranks share one expert, ``ep`` ranks all experts, ``expt_dp`` ranks hold the same part of the same
        experts; ``tp_ep`` and ``tp_ep_pp`` are unions.
        """
        places = [self.expert_coordinates(rank) for rank in range(self.sizes.world_size)]
        return _partition(places, _EXPERT_MEMBERS[kind])

    def joined_replicas(self) -> list[list[int]]:
        """The data-parallel groups, cut into runs of replicas that share experts and make every pass together."""
        count = self.sizes.joined_replicas
        return [ranks[start : start + count] for ranks in self.groups("dp") for start in range(0, len(ranks), count)]

    def rank(self, coordinates: Coordinates) -> int:
        """The rank at a place; the inverse of `coordinates`."""
        rank, stride = 0, 1
        for place, size in zip(coordinates, self.shape, strict=True):
            rank += place * stride
            stride *= size
        return rank

    def groups(self, kind: GroupKind) -> list[list[int]]:
        """All groups of a kind, each in ascending rank order; every rank is in one group of each kind but ``embd``.

        ``mp`` is tensor and pipeline ranks; ``replica`` adds context ranks: all that have the same rows. ``embd`` holds
        the ranks with the word embedding and the output layer (first and last stage).
        """
        if kind == "embd":
            return [[ranks[0], ranks[-1]] if len(ranks) > 1 else ranks for ranks in self.groups("pp")]
        return _partition([self.coordinates(rank) for rank in range(self.sizes.world_size)], _MEMBERS[kind])


def _partition(places: Sequence[Coordinates | ExpertCoordinates], inside: tuple[str, ...]) -> list[list[int]]:
    """Ranks that differ on the axes ``inside`` only, together; ``places`` are those of ranks 0, 1, ..."""
    members: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(places):
        outside = tuple(value for axis, value in zip(place._fields, place, strict=True) if axis not in inside)
        members.setdefault(outside, []).append(rank)
    return list(members.values())


def data_parallel_slice(rows: int, dp_rank: int, dp_size: int) -> slice:
    """The consecutive rows of one data-parallel rank. Raises `ConfigError` when they do not divide evenly."""
    if rows % dp_size:
        raise ConfigError(f"{rows} rows cannot be shared evenly by DP {dp_size}")
    share = rows // dp_size
    return slice(dp_rank * share, (dp_rank + 1) * share)


def even_share(rows: int, dp_rank: int, dp_size: int) -> slice:
    """As `data_parallel_slice`, for any number of rows: shares differ by one row at most."""
    return slice(rows * dp_rank // dp_size, rows * (dp_rank + 1) // dp_size)
