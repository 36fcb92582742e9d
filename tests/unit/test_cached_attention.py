"""Runs of sequences alike in length, and passes narrowed to the tokens whose logits are wanted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrlhf.megatron.cached_attention import CacheContext, Segment, alike


@pytest.mark.parametrize(
    ("lengths", "least", "runs"),
    [
        ([], 1, []),
        ([7], 1, [(0, 1, 7)]),
        ([5, 5, 5], 1, [(0, 3, 5)]),
        # 2 x 90 tokens less; a cut behind the first row as well would save 10.
        ([100, 90, 10, 10], 100, [(0, 2, 100), (2, 4, 10)]),
        ([100, 90, 10, 10], 10, [(0, 1, 100), (1, 2, 90), (2, 4, 10)]),
        ([100, 90, 10, 10], 181, [(0, 4, 100)]),
        # In the order of the slots: a long one in the middle is a run of its own.
        ([10, 10, 100, 10], 50, [(0, 2, 10), (2, 3, 100), (3, 4, 10)]),
    ],
)
def test_runs_are_cut_where_it_saves_most(lengths: list[int], least: int, runs: list[tuple[int, int, int]]) -> None:
    assert alike(lengths, least) == runs


@given(lengths=st.lists(st.integers(1, 400), max_size=40), least=st.integers(0, 500))
def test_runs_hold_every_sequence_once_and_save_what_they_cost(lengths: list[int], least: int) -> None:
    runs = alike(lengths, least)
    assert [i for start, end, _ in runs for i in range(start, end)] == list(range(len(lengths)))
    assert all(longest == max(lengths[start:end]) for start, end, longest in runs)
    read = sum((end - start) * longest for start, end, longest in runs)
    assert len(lengths) * max(lengths, default=0) - read >= (len(runs) - 1) * least


def context(segments: list[Segment], first_slot: int | None = 4) -> CacheContext:
    """Two single tokens in slots 4 and 5 at positions 9 and 2, then segments."""
    pieces = [(s.slot, p) for s in segments for p in range(s.position, s.position + s.length)]
    cache: Any = None
    return CacheContext(
        cache,
        torch.tensor([4, 5, *(slot for slot, _ in pieces)]),
        torch.tensor([9, 2, *(position for _, position in pieces)]),
        max_sequence_length=16,
        lengths=[10, 3],
        segments=segments,
        first_slot=first_slot,
    )


def test_a_narrowed_pass_has_one_step_for_each_token_that_is_wanted() -> None:
    # The second segment is the middle of a prompt: nothing is drawn after it.
    segments = [Segment(2, 5, 6, 4, drawn=True), Segment(5, 7, 7, 0)]
    narrow = context(segments).narrowed(torch.tensor([0, 1, 4]))
    assert (narrow.steps, narrow.lengths, narrow.longest, narrow.segments) == (3, [10, 3, 7], 10, ())
    assert (narrow.slots.tolist(), narrow.positions.tolist(), narrow.first_slot) == ([4, 5, 6], [9, 2, 6], 4)


@pytest.mark.parametrize(("slot", "first_slot"), [(7, 4), (6, None)])
def test_slots_with_a_gap_are_not_read_in_place(slot: int, first_slot: int | None) -> None:
    narrow = context([Segment(2, 4, slot, 0, drawn=True)], first_slot).narrowed(torch.tensor([0, 1, 3]))
    assert narrow.first_slot is None
    assert narrow.slots.tolist() == [4, 5, slot]
