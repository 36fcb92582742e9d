"""The stream of global batches and the held-out split."""

from __future__ import annotations

import json
import warnings

import pytest

from mrlhf.data.stream import ExampleSet, ExampleStream, split_examples
from mrlhf.errors import DataError

NAMES = [f"row{i}" for i in range(10)]


def stream(batch_size: int = 2, seed: int = 5, fingerprint: str = "f", **options: bool) -> ExampleStream[str]:
    return ExampleStream(NAMES, fingerprint, seed=seed, batch_size=batch_size, **options)


def test_c11_a_resumed_stream_goes_on() -> None:
    whole = next(stream(10))
    assert sorted(whole) == NAMES
    assert whole != NAMES
    first = stream()
    for _ in range(2):
        next(first)
    state = json.loads(json.dumps(first.state_dict()))
    resumed = stream()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.load_state_dict(state)
    assert (resumed.position, resumed.epoch) == (4, 0)
    assert next(resumed) == next(first) == whole[4:6]
    other = stream(fingerprint="g")
    next(other)
    with pytest.warns(UserWarning, match="the examples are not those of the checkpoint"):
        other.load_state_dict(state)
    assert next(other) == whole[:2]
    reseeded = stream(seed=6)
    with pytest.warns(UserWarning, match="example order of the checkpoint .seed 5.*seed 6"):
        reseeded.load_state_dict(state)
    assert next(reseeded) == whole[4:6]


def test_batches_follow_each_other_over_epochs_whatever_their_size() -> None:
    by_four = stream(4)
    rows = [row for _ in range(5) for row in next(by_four)]
    assert by_four.epoch == 2
    assert sorted(rows[:10]) == sorted(rows[10:]) == NAMES
    assert rows[:10] != rows[10:]
    assert [row for _, batch in zip(range(10), stream(2), strict=False) for row in batch] == rows
    assert next(stream(12, shuffle=False)) == [*NAMES, *NAMES[:2]]
    assert next(stream(10, seed=6)) != rows[:10]


def test_arguments() -> None:
    with pytest.raises(ValueError, match="at least one example"):
        ExampleStream([], "", seed=0, batch_size=1)
    with pytest.raises(ValueError, match="batch_size=0"):
        stream(0)


def test_the_held_out_part() -> None:
    data = ExampleSet(NAMES, "f", skipped=1, dropped=2, truncated=3)
    rest, held_out = split_examples(data, 0.3, seed=1)
    assert (len(rest), len(held_out)) == (7, 3)
    assert sorted([*rest.examples, *held_out.examples]) == NAMES
    assert rest.examples == sorted(rest.examples)
    assert (rest.skipped, rest.dropped, rest.truncated, held_out.skipped) == (1, 2, 3, 0)
    assert len({rest.fingerprint, held_out.fingerprint, data.fingerprint}) == 3
    again = split_examples(data, 0.3, seed=1)
    assert again == (rest, held_out)
    assert any(split_examples(data, 0.3, seed=seed)[1] != held_out for seed in range(2, 5))
    assert len(split_examples(data, 0.001, seed=1)[1]) == 1
    assert len(split_examples(data, 0.999, seed=1)[0]) == 1


def test_examples_of_one_key_stay_together() -> None:
    data = ExampleSet([(i // 3, i) for i in range(12)], "f")
    for seed in range(5):
        rest, held_out = split_examples(data, 0.25, seed=seed, key=lambda e: e[0])
        assert len(held_out) == 3
        assert not {e[0] for e in rest.examples} & {e[0] for e in held_out.examples}
    with pytest.raises(DataError, match=r"data\.validation_fraction: 12 example\(s\) with 1 prompt"):
        split_examples(data, 0.25, seed=0, key=lambda e: 0)


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 1.5])
def test_fractions_out_of_range(fraction: float) -> None:
    with pytest.raises(ValueError, match="above 0 and below 1"):
        split_examples(ExampleSet(NAMES, "f"), fraction, seed=0)
    with pytest.raises(DataError, match="1 example"):
        split_examples(ExampleSet(["a"], "f"), 0.5, seed=0)
