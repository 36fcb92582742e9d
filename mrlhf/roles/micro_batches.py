"""How rows are cut into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mrlhf.types import RolloutBatch, round_up

Plan = list[list[int]]
"""Micro-batches as lists of row numbers; every row appears exactly once."""


def by_rows(count: int, size: int) -> Plan:
    """Consecutive rows, ``size`` at a time; the last micro-batch may be smaller."""
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]


def split_up(plan: Plan, count: int) -> Plan:
    """The plan with the largest micro-batches cut in halves until there are ``count``, or single rows only."""
    found = list(plan)
    while len(found) < count:
        largest = max(range(len(found)), key=lambda i: len(found[i]))
        rows = found[largest]
        if len(rows) < 2:
            return found
        found[largest : largest + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return found


def by_tokens(lengths: Sequence[int], budget: int, *, multiple: int = 1, packed: bool = False) -> Plan:
    """Micro-batches whose padded size, rows times the longest row, stays within ``budget`` tokens.

    Rows of like length go together (longest first), which keeps the padding small. A row that is longer than the
    budget gets a micro-batch of its own.

    Args:
        lengths: tokens of each row, the slot after the last token included.
        budget: tokens of one micro-batch.
        multiple: the number of micro-batches is raised to a multiple of it by splitting the largest ones (interleaved
            pipeline stages work in groups of PP micro-batches).
        packed: rows are laid one after the other without padding, so that the size is the sum of their lengths.

    Returns:
        The plan.

    Raises:
        ValueError: there are fewer rows than ``multiple``, or not enough to reach a multiple.
    """
    plan: Plan = []

    def size_with(row: int) -> int:
        """Tokens of a micro-batch with one more row."""
        # The first row of a micro-batch is its longest.
        rows = [*plan[-1], row]
        return sum(lengths[r] for r in rows) if packed else len(rows) * lengths[rows[0]]

    for row in sorted(range(len(lengths)), key=lambda r: (-lengths[r], r)):
        if plan and size_with(row) <= budget:
            plan[-1].append(row)
        else:
            plan.append([row])
    plan = split_up(plan, round_up(len(plan), multiple))
    if len(plan) % multiple:
        raise ValueError(f"{len(lengths)} rows cannot make a multiple of {multiple} micro-batches")
    return plan


@dataclass(frozen=True)
class Cut:
    """How rows are cut into the micro-batches of passes without gradient: `make_plan` with its settings filled in.

    Attributes:
        rows: of one micro-batch.
        tokens: of one micro-batch, instead of rows.
        packed: rows are laid one after the other without padding.
    """

    rows: int
    tokens: int | None = None
    packed: bool = False

    def __call__(self, batch: RolloutBatch) -> Plan:
        """The micro-batches of a batch."""
        return make_plan(batch, rows=self.rows, tokens=self.tokens, packed=self.packed)


def make_plan(batch: RolloutBatch, *, rows: int, tokens: int | None, multiple: int = 1, packed: bool = False) -> Plan:
    """Micro-batches of a batch: `by_tokens` of the padded or packed rows where a budget is given, else `by_rows`."""
    if tokens is None:
        return by_rows(batch.size, rows)
    if packed:
        return by_tokens(batch.lengths.tolist(), tokens, multiple=multiple, packed=True)
    # A row takes the slot after its last token too, and its width is padded like the batch's.
    lengths = [round_up(length + 1, batch.pad_to_multiple) for length in batch.lengths.tolist()]
    return by_tokens(lengths, tokens, multiple=multiple)


def by_pairs(plan: Plan) -> Plan:
    """The rows of a plan of pairs: pair ``i`` is the rows ``2 i`` and ``2 i + 1``, which stay together."""
    return [[row for pair in pairs for row in (2 * pair, 2 * pair + 1)] for pairs in plan]


def make_pair_plan(
    batch: RolloutBatch, *, pairs: int, tokens: int | None, multiple: int = 1, packed: bool = False
) -> Plan:
    """Micro-batches of preference pairs, two neighbouring rows each, that no micro-batch tears apart.

    Args:
        batch: an even number of rows.
        pairs: pairs of one micro-batch.
        tokens: tokens of one micro-batch instead. A pair takes twice its longer row with the padding, or, packed, the
            sum of its rows.
        multiple: see `by_tokens`.
        packed: see `by_tokens`.

    Raises:
        ValueError: an odd number of rows, or as `by_tokens`.
    """
    if batch.size % 2:
        raise ValueError(f"{batch.size} rows are no pairs")
    if tokens is None:
        return by_pairs(by_rows(batch.size // 2, pairs))
    rows = batch.lengths.view(-1, 2)
    if packed:
        sizes = rows.sum(dim=1).tolist()
    else:
        sizes = [2 * round_up(n + 1, batch.pad_to_multiple) for n in rows.amax(dim=1).tolist()]
    return by_pairs(by_tokens(sizes, tokens, multiple=multiple, packed=packed))
