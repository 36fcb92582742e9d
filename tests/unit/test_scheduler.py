"""Slots, groups and passes, against what every sequence needs, without a model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrlhf.rollout.scheduler import Pass, Row, Scheduler

STOP = 0


class Cache:
    """What slots hold: the tokens whose keys and values are there, in place of the keys and values."""

    def __init__(self, slots: int) -> None:
        self.held: list[list[int]] = [[] for _ in range(slots)]

    def apply(self, made: Pass) -> None:
        for source, target, count in made.copies:
            assert count <= len(self.held[source])
            self.held[target] = self.held[source][:count]
        place = 0
        for piece in made.pieces:
            assert len(self.held[piece.slot]) >= piece.position
            new = made.tokens[place : place + piece.length]
            self.held[piece.slot] = self.held[piece.slot][: piece.position] + new
            place += piece.length
        assert place == len(made.tokens)


def play(
    prompts: Sequence[tuple[int, ...]],
    limits: Sequence[int],
    stops: Sequence[int],
    *,
    groups: int,
    slots: int,
    prefill_tokens: int = 1000,
) -> tuple[list[Row], list[Pass]]:
    """Run to the end; sequence ``i`` says 100, 101, ... and the stop id as its token number ``stops[i]``."""
    rows = [Row(i, p, n) for i, (p, n) in enumerate(zip(prompts, limits, strict=True))]
    ends = lambda response: response[-1] == STOP  # noqa: E731
    scheduler = Scheduler(rows, groups=groups, slots=slots, prefill_tokens=prefill_tokens, ends=ends)
    caches = [Cache(group.capacity) for group in scheduler.groups]
    passes: list[Pass] = []
    while True:
        made_now = [scheduler.plan(group) for group in range(groups)]
        for cache, made in zip(caches, made_now, strict=True):
            if made is None:
                continue
            cache.apply(made)
            assert [p.slot for p in made.pieces[: made.steps]] == list(range(made.steps))
            assert all(p.length == 1 for p in made.pieces[: made.steps])
            assert len({p.slot for p in made.pieces}) == len(made.pieces) <= len(cache.held)
            for row, place in zip(made.drawn, made.select, strict=True):
                # The logits come after exactly what the sequence has said.
                slot = [p.slot for p in made.pieces for _ in range(p.length)][place]
                assert cache.held[slot] == [*row.prompt, *row.response]
            scheduler.tell(made, [STOP if len(r.response) == stops[r.index] else 100 + len(r.response)
                                  for r in made.drawn])  # fmt: skip
            passes.append(made)
        if all(made is None for made in made_now):
            assert not scheduler.queue
            return rows, passes


def said(limit: int, stop: int) -> list[int]:
    return [STOP if i == stop else 100 + i for i in range(min(limit, stop + 1))]


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 2), min_size=1, max_size=5), st.integers(1, 6), st.integers(0, 6)),
        max_size=14,
    ),
    st.integers(1, 3),
    st.integers(0, 4),
    st.integers(1, 9),
)
def test_every_sequence_says_all_it_has_to_say(
    jobs: list[tuple[list[int], int, int]], groups: int, more_slots: int, prefill_tokens: int
) -> None:
    prompts, limits, stops = ([tuple(p) for p, _, _ in jobs], [n for _, n, _ in jobs], [s for _, _, s in jobs])
    rows, _ = play(prompts, limits, stops, groups=groups, slots=groups + more_slots, prefill_tokens=prefill_tokens)
    assert [row.response for row in rows] == [said(n, s) for n, s in zip(limits, stops, strict=True)]
    assert [row.stopped for row in rows] == [s < n for n, s in zip(limits, stops, strict=True)]


def test_a_slot_is_refilled_in_the_next_pass() -> None:
    """Two slots; the first sequence goes on while the second slot serves the other three one after the other."""
    prompts = [(9,) * 5, (1, 2), (3, 4), (5, 6)]
    _, passes = play(prompts, [9, 2, 2, 2], [99] * 4, groups=1, slots=2)
    # 9 tokens of the long one: no pass waits for anything.
    assert len(passes) == 9
    assert [len(made.drawn) for made in passes] == [2, 2, 2, 2, 2, 2, 1, 1, 1]
    assert [len(made.tokens) for made in passes] == [7, 2, 3, 2, 3, 2, 1, 1, 1]


def test_samples_of_a_prompt_share_its_prefill() -> None:
    prompts = [(1, 2, 3, 4)] * 4 + [(5, 6, 7)]
    _, passes = play(prompts, [3] * 5, [99] * 5, groups=1, slots=5)
    # The prompt once, and its last token again for each of the others.
    assert len(passes[0].tokens) == 4 + 3
    assert passes[1].copies == [(0, 1, 3), (0, 2, 3), (0, 3, 3)]
    assert len(passes[1].tokens) == 5
    assert sum(len(made.tokens) for made in passes) == 4 + 3 + 5 * 2 + 3


def test_a_sample_that_comes_later_copies_from_one_that_goes_on() -> None:
    prompts = [(1, 2, 3, 4)] * 3
    _, passes = play(prompts, [6, 1, 2], [99] * 3, groups=1, slots=2)
    assert sum(len(made.tokens) for made in passes) == 4 + 5 + 1 + 2


def test_long_prompts_are_cut_and_the_others_go_on_meanwhile() -> None:
    prompts = [tuple(range(1, 21)), (1, 2)]
    rows, passes = play(prompts, [2, 2], [99, 99], groups=1, slots=2, prefill_tokens=8)
    assert [len(made.tokens) for made in passes] == [8, 8, 6, 2]
    assert rows[0].response == [100, 101]


def test_groups_take_from_one_queue() -> None:
    prompts = [(i + 1, 1) for i in range(8)]
    _, passes = play(prompts, [1, 1, 1, 1, 9, 1, 1, 1], [99] * 8, groups=2, slots=2)
    # One group is busy with the long sequence, the other serves the rest.
    assert len(passes) == 7 + 9


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_nothing_to_do_is_no_pass(slots: int) -> None:
    assert play([], [], [], groups=1, slots=slots) == ([], [])
