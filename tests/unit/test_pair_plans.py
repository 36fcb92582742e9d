"""Micro-batches that keep preference pairs together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrlhf.roles.micro_batches import make_pair_plan
from mrlhf.types import RolloutBatch


def batch_of(lengths: list[int], multiple: int = 1) -> RolloutBatch:
    return RolloutBatch.from_sequences(
        [[5]] * len(lengths), [[6] * (n - 1) for n in lengths], pad_id=0, pad_to_multiple=multiple
    )


def test_pairs_in_order() -> None:
    assert make_pair_plan(batch_of([2] * 6), pairs=2, tokens=None) == [[0, 1, 2, 3], [4, 5]]


def test_a_budget_counts_both_rows_at_the_longer_ones_width() -> None:
    # Slots with the one after the last token: pairs take 2 * 4, 2 * 8, 2 * 4.
    batch = batch_of([3, 2, 1, 7, 3, 3])
    assert make_pair_plan(batch, pairs=1, tokens=16) == [[2, 3], [0, 1, 4, 5]]
    assert make_pair_plan(batch, pairs=1, tokens=15) == [[2, 3], [0, 1], [4, 5]]
    assert make_pair_plan(batch, pairs=1, tokens=48) == [[2, 3, 0, 1, 4, 5]]
    assert make_pair_plan(batch, pairs=1, tokens=48, multiple=3) == [[2, 3], [0, 1], [4, 5]]
    # Widths are multiples of 3: 6, 9 and 6 slots a row.
    assert make_pair_plan(batch_of([3, 2, 1, 7, 3, 3], 3), pairs=1, tokens=24) == [[2, 3], [0, 1, 4, 5]]


def test_a_budget_of_packed_rows_counts_their_tokens_alone() -> None:
    # Pairs of 5, 8 and 6 tokens.
    batch = batch_of([3, 2, 1, 7, 3, 3])
    assert make_pair_plan(batch, pairs=1, tokens=14, packed=True) == [[2, 3, 4, 5], [0, 1]]
    assert make_pair_plan(batch, pairs=1, tokens=13, packed=True) == [[2, 3], [4, 5, 0, 1]]
    assert make_pair_plan(batch, pairs=1, tokens=19, packed=True) == [[2, 3, 4, 5, 0, 1]]


def test_an_odd_number_of_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="3 rows are no pairs"):
        make_pair_plan(batch_of([2, 2, 2]), pairs=1, tokens=None)


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), max_size=12), st.integers(4, 200))
def test_every_pair_once_and_whole(pairs: list[tuple[int, int]], budget: int) -> None:
    lengths = [n for pair in pairs for n in pair]
    plan = make_pair_plan(batch_of(lengths), pairs=1, tokens=budget) if lengths else []
    assert sorted(row for part in plan for row in part) == list(range(len(lengths)))
    for part in plan:
        assert all(second == first + 1 and first % 2 == 0 for first, second in zip(part[::2], part[1::2], strict=True))
        assert len(part) * (max(lengths[row] for row in part) + 1) <= budget or len(part) == 2
