"""What a walk finds, and how a few micro-batches stand for all."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from mrlhf.checkpoint.plan import SavedTensor
from mrlhf.dryrun.traffic import Message
from mrlhf.roles.micro_batches import Plan


@dataclass(frozen=True)
class Lengths:
    """Tokens of every prompt and of every response."""

    prompt: int
    response: int


@dataclass(frozen=True)
class Part:
    """A role's stages on one rank.

    Attributes:
        shapes: of every parameter, by ``"{virtual stage}.{name}"``.
        sharded: those of ``shapes`` that are one of TP parts; the others are the same on every tensor rank.
        layers: their number.
        weights: bytes.
        gradients: bytes of the buffers.
        optimizer: bytes of moments and fp32 copies.
    """

    shapes: dict[str, tuple[int, ...]]
    sharded: frozenset[str]
    layers: int
    weights: int
    gradients: int = 0
    optimizer: int = 0

    @property
    def parameters(self) -> int:
        """All of the rank's."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def replicated(self) -> int:
        """Those that every tensor rank holds."""
        return sum(math.prod(shape) for name, shape in self.shapes.items() if name not in self.sharded)


@dataclass
class Phase:
    """What happens between two points of an iteration.

    Attributes:
        times: how often it does in an iteration.
        messages: of one time.
        peak: most bytes of tensors that live at once, weights and optimizer states included.
        walked: micro-batches that were walked; the others are alike, and counted.
        micro_batches: there are; 0 where a phase has none.
    """

    times: int = 1
    messages: Counter[Message] = field(default_factory=Counter)
    peak: int = 0
    walked: int = 0
    micro_batches: int = 0


@dataclass
class RankWalk:
    """What one rank does.

    Attributes:
        rank: its number.
        parts: by role.
        phases: by name, in order; only ``build`` and ``save`` where the passes were left out.
        kv_cache: bytes while the rollout lasts.
        saved: tensors of a checkpoint.
    """

    rank: int
    parts: dict[str, Part]
    phases: dict[str, Phase]
    kv_cache: int
    saved: list[SavedTensor]

    @property
    def written(self) -> int:
        """Bytes that this rank writes into a checkpoint."""
        return sum(tensor.written for tensor in self.saved)


def alike(plan: Plan) -> Plan:
    """The micro-batches with as many rows as the first: the last one may have fewer."""
    return [rows for rows in plan if len(rows) == len(plan[0])]


def scaled(
    few: Mapping[Message, int], first: int, many: Mapping[Message, int], second: int, whole: int
) -> Counter[Message]:
    """Messages of ``whole`` micro-batches from those of ``first`` and of ``second``.

    Raises:
        ValueError: they do not grow by a whole number with every micro-batch.
    """
    found: Counter[Message] = Counter()
    for message in {**few, **many}:
        slope, rest = divmod((many.get(message, 0) - few.get(message, 0)) * (whole - second), second - first)
        if rest:
            raise ValueError(
                f"{message} is not counted evenly by micro-batches: {few.get(message)}, {many.get(message)}"
            )
        found[message] = many.get(message, 0) + slope
    return found
