"""Sets of training examples, and the stream of global batches over them."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch

from mrlhf.errors import DataError

T = TypeVar("T")


@dataclass(frozen=True)
class ExampleSet(Generic[T]):
    """All examples of some files, and what was left out on the way.

    Attributes:
        examples: in file order.
        fingerprint: changes with the examples and their order.
        skipped: malformed rows passed over.
        dropped: over-long rows left out.
        truncated: over-long rows cut.
    """

    examples: list[T]
    fingerprint: str
    skipped: int = 0
    dropped: int = 0
    truncated: int = 0

    def __len__(self) -> int:
        return len(self.examples)


class ExampleStream(Generic[T]):
    """Endless global batches, the same on every rank and under every parallel layout.

    Epochs follow each other without a gap (a batch may span two), each in its own order, which depends on the seed and
    the epoch alone.

    Args:
        examples: at least one.
        fingerprint: of the examples; a cursor is only good for the same ones.
        seed: of the shuffle.
        batch_size: examples per global batch.
        shuffle: False keeps the order of ``examples``.
        noun: what an example is, for messages.
    """

    def __init__(
        self,
        examples: Sequence[T],
        fingerprint: str,
        *,
        seed: int,
        batch_size: int,
        shuffle: bool = True,
        noun: str = "example",
    ):
        if not examples:
            raise ValueError(f"a stream needs at least one {noun}")
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        self.examples = examples
        self.fingerprint = fingerprint
        self.seed = seed
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.position = 0
        self._noun = noun
        self._order: tuple[int, list[int]] | None = None

    @property
    def epoch(self) -> int:
        """Complete passes over the examples so far."""
        return self.position // len(self.examples)

    def __iter__(self) -> Iterator[list[T]]:
        return self

    def __next__(self) -> list[T]:
        """The next global batch, in stream order; ``position`` moves on by ``batch_size``."""
        positions = range(self.position, self.position + self.batch_size)
        batch = [self.examples[self.index(position)] for position in positions]
        self.position += self.batch_size
        return batch

    def index(self, position: int) -> int:
        """Which example stands at ``position`` of the stream."""
        epoch, offset = divmod(position, len(self.examples))
        if not self.shuffle:
            return offset
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, _permutation(len(self.examples), f"prompt order {self.seed} {epoch}"))
        return self._order[1][offset]

    def state_dict(self) -> dict[str, Any]:
        """The cursor: plain numbers and strings."""
        return {
            "position": self.position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the saved stream stood, in its order; over other examples start at 0 with a warning."""
        if state["fingerprint"] != self.fingerprint:
            warnings.warn(f"the {self._noun}s are not those of the checkpoint: starting at the first one", stacklevel=2)
            self.position = 0
            return
        if (state["seed"], state["shuffle"]) != (self.seed, self.shuffle):
            warnings.warn(
                f"going on in the {self._noun} order of the checkpoint (seed {state['seed']}, shuffle "
                f"{state['shuffle']}), not in that of the configuration (seed {self.seed}, shuffle {self.shuffle})",
                stacklevel=2,
            )
        self.seed, self.shuffle, self.position = int(state["seed"]), bool(state["shuffle"]), int(state["position"])
        self._order = None


def split_examples(
    data: ExampleSet[T], fraction: float, *, seed: int, key: Callable[[T], Hashable] | None = None
) -> tuple[ExampleSet[T], ExampleSet[T]]:
    """Hold a random part of the examples out; which ones depends on the seed and their number alone.

    Args:
        data: at least two examples (or keys).
        fraction: the part held out, above 0 and below 1; at least one example, and never all of them.
        seed: of the choice.
        key: examples with the same key stay together, for example the pairs of one prompt.

    Returns:
        the rest and the held-out part, both in file order; the counts of what was left out stay with the rest.

    Raises:
        ValueError: a fraction out of range.
        DataError: nothing would be left to train on.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"validation_fraction must be above 0 and below 1, not {fraction}")
    groups: dict[Hashable, list[int]] = {}
    for i, example in enumerate(data.examples):
        groups.setdefault(i if key is None else key(example), []).append(i)
    if len(groups) < 2:
        raise DataError(
            f"data.validation_fraction: {len(data)} example(s) with {len(groups)} prompt(s) cannot be divided into "
            "training and validation; give data.validation a file of its own"
        )
    members = list(groups.values())
    wanted = max(1, round(fraction * len(data)))
    held_out: set[int] = set()
    for number in _permutation(len(members), f"held-out examples {seed}")[:-1]:
        if len(held_out) >= wanted:
            break
        held_out.update(members[number])

    def part(name: str, inside: bool) -> ExampleSet[T]:
        """The examples on one side of the split, with a fingerprint of their own."""
        examples = [example for i, example in enumerate(data.examples) if (i in held_out) == inside]
        mark = hashlib.sha256(f"{data.fingerprint} {name} {seed} {fraction} {len(examples)}".encode()).hexdigest()
        return ExampleSet(examples, mark)

    rest = replace(part("rest", False), skipped=data.skipped, dropped=data.dropped, truncated=data.truncated)
    return rest, part("held out", True)


def _permutation(count: int, name: str) -> list[int]:
    """An order of ``count`` things that depends on ``name`` alone."""
    mixed = hashlib.sha256(name.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(mixed[:8], "little") >> 1)
    order: list[int] = torch.randperm(count, generator=generator).tolist()
    return order
