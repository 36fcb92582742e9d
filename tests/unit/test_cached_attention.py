"""Runs of sequences alike in length, and the last layer of a pass, for the tokens whose logits are wanted."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrlhf.megatron.cached_attention import CacheContext, Segment, runs_alike


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
        # In the order of the slots: a long one in the middle, and short ones between long ones.
        ([10, 10, 100, 10], 50, [(0, 2, 10), (2, 3, 100), (3, 4, 10)]),
        ([200, *[20] * 14, 200], 683, [(0, 1, 200), (1, 15, 20), (15, 16, 200)]),
        ([200, *[20] * 14, 200], 1261, [(0, 16, 200)]),
    ],
)
def test_runs_are_cut_where_it_saves_most(lengths: list[int], least: int, runs: list[tuple[int, int, int]]) -> None:
    assert runs_alike(lengths, least) == runs


@given(lengths=st.lists(st.integers(1, 400), max_size=40), least=st.integers(0, 500))
def test_runs_hold_every_sequence_once_and_save_what_they_cost(lengths: list[int], least: int) -> None:
    """Nor could one more run be cut out of any of them that would save its cuts."""
    runs = runs_alike(lengths, least)
    assert [i for start, end, _ in runs for i in range(start, end)] == list(range(len(lengths)))
    assert all(longest == max(lengths[start:end]) for start, end, longest in runs)
    read = sum((end - start) * longest for start, end, longest in runs)
    assert len(lengths) * max(lengths, default=0) - read >= (len(runs) - 1) * least
    for begin, stop, longest in runs:
        for start, end in combinations(range(begin, stop + 1), 2):
            cuts = (start > begin) + (end < stop)
            saved = (end - start) * (longest - max(lengths[start:end]))
            # The run that saves most may have needed two cuts where another needed one.
            assert saved < max(2 * least, 1) or cuts == 0


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


def test_the_ends_of_segments_are_steps_of_their_own() -> None:
    # The second segment is the middle of a prompt: nothing is drawn after it.
    segments = [Segment(2, 5, 6, 4, wanted=True), Segment(5, 7, 7, 0, wanted=False), Segment(7, 9, 9, 0, wanted=True)]
    ends = context(segments).ends(torch.tensor([0, 1, 4, 8]))
    assert (ends.steps, ends.lengths, ends.longest, ends.segments) == (2, [7, 2], 7, ())
    # Their slots are not one behind the other, so that they are not read in place.
    assert (ends.slots.tolist(), ends.positions.tolist(), ends.first_slot) == ([6, 9], [6, 1], None)


def test_ends_in_slots_that_follow_each_other_are_read_in_place() -> None:
    segments = [Segment(2, 4, 7, 0, wanted=True), Segment(4, 5, 8, 3, wanted=True)]
    assert context(segments).ends(torch.tensor([0, 1, 3, 4])).first_slot == 7
    assert context([]).ends(torch.tensor([0, 1])).steps == 0


def test_logits_that_segments_do_not_mention_are_refused() -> None:
    with pytest.raises(ValueError, match="3 logits are wanted after 2 steps and 0 segments"):
        context([Segment(2, 4, 7, 0, wanted=False)]).ends(torch.tensor([0, 1, 3]))
