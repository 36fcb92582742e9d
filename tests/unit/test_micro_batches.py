"""How rows are cut into micro-batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrlhf.roles.micro_batches import by_rows, by_tokens, make_plan
from mrlhf.types import RolloutBatch

lengths = st.lists(st.integers(1, 40), min_size=0, max_size=30)


def test_rows_in_order_with_a_smaller_rest() -> None:
    assert by_rows(5, 2) == [[0, 1], [2, 3], [4]]
    assert by_rows(0, 3) == []


def test_tokens_by_hand() -> None:
    # Longest first: 9 alone would leave room for one of 9 only; 5 and 4 take 2 * 5; 3, 3 and 1 take 3 * 3.
    assert by_tokens([3, 9, 4, 1, 5, 3], 10) == [[1], [4, 2], [0, 5, 3]]


def test_packed_tokens_by_hand() -> None:
    # The sum counts: 9 and 1 would fit together, but rows are taken longest first.
    assert by_tokens([3, 9, 4, 1, 5, 3], 10, packed=True) == [[1], [4, 2], [0, 5, 3]]
    assert by_tokens([6, 2, 2, 2], 12) == [[0, 1], [2, 3]]
    assert by_tokens([6, 2, 2, 2], 12, packed=True) == [[0, 1, 2, 3]]


def test_a_plan_of_packed_rows_counts_tokens_alone() -> None:
    batch = RolloutBatch.from_sequences([[1]] * 3, [[2] * 5, [2], [2]], pad_id=0, pad_to_multiple=4)
    assert make_plan(batch, rows=1, tokens=10, packed=True) == [[0, 1, 2]]
    assert make_plan(batch, rows=1, tokens=10) == [[0], [1, 2]]
    assert make_plan(batch, rows=2, tokens=None, packed=True) == [[0, 1], [2]]


def test_a_row_over_the_budget_is_alone() -> None:
    assert by_tokens([2, 50, 2], 10) == [[1], [0, 2]]


@given(lengths, st.integers(1, 100))
def test_every_row_once_within_the_budget(rows: list[int], budget: int) -> None:
    plan = by_tokens(rows, budget)
    assert sorted(row for part in plan for row in part) == list(range(len(rows)))
    for part in plan:
        assert part
        assert len(part) * max(rows[row] for row in part) <= budget or len(part) == 1


@given(lengths, st.integers(1, 100), st.integers(1, 5))
def test_a_multiple_of_micro_batches(rows: list[int], budget: int, multiple: int) -> None:
    plain = by_tokens(rows, budget)
    reachable = -(-len(plain) // multiple) * multiple <= len(rows)
    if not reachable:
        with pytest.raises(ValueError, match=f"{len(rows)} rows cannot make a multiple of {multiple}"):
            by_tokens(rows, budget, multiple=multiple)
        return
    plan = by_tokens(rows, budget, multiple=multiple)
    # As few as possible: an interleaved schedule needs the multiple and nothing more.
    assert len(plan) == -(-len(plain) // multiple) * multiple
    assert sorted(row for part in plan for row in part) == list(range(len(rows)))
    assert all(len(part) * max(rows[row] for row in part) <= budget or len(part) == 1 for part in plan)


@given(lengths, st.integers(1, 100))
def test_the_padding_is_no_more_than_in_the_order_given(rows: list[int], budget: int) -> None:
    """Sorting is there to save padding: no plan of consecutive rows under the same budget has fewer micro-batches."""
    consecutive: list[list[int]] = []
    for row, length in enumerate(rows):
        part = consecutive[-1] if consecutive else []
        if part and (len(part) + 1) * max(length, *(rows[r] for r in part)) <= budget:
            part.append(row)
        else:
            consecutive.append([row])
    assert len(by_tokens(rows, budget)) <= len(consecutive)


def test_a_budget_replaces_the_number_of_rows() -> None:
    # Rows of 3 tokens: with the slot after the last one they take 4.
    batch = RolloutBatch.from_sequences([[5]] * 4, [[6, 7]] * 4, pad_id=0)
    assert make_plan(batch, rows=1, tokens=8) == [[0, 1], [2, 3]]
    assert make_plan(batch, rows=3, tokens=None) == [[0, 1, 2], [3]]
    assert make_plan(batch, rows=1, tokens=16, multiple=2) == [[0, 1], [2, 3]]


def test_a_budget_counts_the_padding_of_the_width() -> None:
    batch = RolloutBatch.from_sequences([[5]] * 4, [[6, 7, 8]] * 4, pad_id=0, pad_to_multiple=4)
    # Five tokens with the slot, eight after padding.
    assert make_plan(batch, rows=1, tokens=15) == [[0], [1], [2], [3]]
    assert make_plan(batch, rows=1, tokens=16) == [[0, 1], [2, 3]]


def test_little_padding_where_lengths_differ_much() -> None:
    """A token budget groups rows of like length: under a tenth is padding, rows in their order waste over 40%."""
    lengths = [8 + (i * 37) % 61**2 % 400 for i in range(256)]
    batch = RolloutBatch.from_sequences([[1]] * 256, [[2] * (n - 1) for n in lengths], pad_id=0)

    def padding(plan: list[list[int]]) -> float:
        computed = sum(len(rows) * max(lengths[row] for row in rows) for rows in plan)
        return 1 - sum(lengths) / computed

    assert padding(make_plan(batch, rows=16, tokens=None)) > 0.4
    assert padding(make_plan(batch, rows=1, tokens=4096)) < 0.1
