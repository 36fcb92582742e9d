"""Which rank the others wait for, as the files of all ranks tell it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mrlhf.parallel.heartbeat import Heartbeat, is_timeout, read_beats


def _ranks(folder: Path, world_size: int) -> list[Heartbeat]:
    return [Heartbeat(folder, rank, world_size) for rank in range(world_size)]


def test_the_rank_in_an_earlier_phase_is_named(tmp_path: Path) -> None:
    first, second, third = _ranks(tmp_path, 3)
    for beat in (first, second, third):
        beat.iteration(4)
        beat.phase("rollout")
    for beat in (first, third):
        beat.phase("inference")
    report = first.report().splitlines()
    assert report[0].startswith("the others wait for rank 1 ("), report
    assert ": rollout, iteration 4, for " in report[0]
    assert len(report) == 4
    second.phase("inference")
    assert first.report().startswith("all ranks are in the same phase, inference of iteration 4")


def test_the_rank_that_does_something_alone_is_named(tmp_path: Path) -> None:
    first, second = _ranks(tmp_path, 2)
    for beat in (first, second):
        beat.phase("inference")
    with second.alone("reward slow"):
        assert first.report().startswith("the others wait for rank 1 (")
        assert "inference, reward slow, iteration 0, for" in first.report().splitlines()[0]
    assert first.report().startswith("all ranks are in the same phase")
    with pytest.raises(KeyError), second.alone("reward wrong"):
        raise KeyError
    assert "reward wrong" in first.report()


def test_a_rank_that_never_came(tmp_path: Path) -> None:
    first, second, _ = _ranks(tmp_path, 3)
    first.phase("rollout")
    second.phase("rollout")
    (tmp_path / "rank_00001.json").write_text('{"rank": 1')
    assert [beat.rank for beat in read_beats(tmp_path, 3)] == [0]
    assert first.report().startswith("ranks [1, 2] have not come as far as the first phase")


def test_files_of_an_earlier_job_blame_nobody(tmp_path: Path) -> None:
    Heartbeat(tmp_path, 1, 2, attempt="dead").phase("rollout")
    first, second = (Heartbeat(tmp_path, rank, 2, attempt="alive") for rank in range(2))
    first.phase("start")
    first.phase("rollout")
    assert first.report().startswith("ranks [1] have not come as far as the first phase")
    second.phase("start")
    assert first.report().startswith("the others wait for rank 1 (")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[../third_party/gloo/unbound_buffer.cc:81] Timed out waiting 3000ms for recv operation to complete", True),
        (
            "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(...) ran for 3000 ms",
            True,
        ),
        ("wait timeout after 3000ms, keys: /default_pg/0//cpu//0/0", True),
        ("[../third_party/gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:1234", False),
        ("CUDA out of memory", False),
    ],
)
def test_what_a_timeout_is(text: str, expected: bool) -> None:
    assert is_timeout(RuntimeError(text)) is expected
    assert not is_timeout(TimeoutError("timed out: the reward function's own server"))


def test_a_timeout_carries_the_report(tmp_path: Path) -> None:
    first, second = _ranks(tmp_path, 2)
    second.phase("rollout")
    first.phase("rollout")
    timeout, other = RuntimeError("Timed out waiting 3000ms for recv operation to complete"), RuntimeError("else")
    for error in (timeout, other):
        with pytest.raises(RuntimeError), first:
            raise error
    assert "the others wait for rank 1" in timeout.__notes__[0]
    assert not hasattr(other, "__notes__")


def test_rank_0_says_that_nothing_moves_before_the_time_is_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = Heartbeat(tmp_path, 0, 2, timeout_seconds=1.0), Heartbeat(tmp_path, 1, 2)
    with first:
        first.phase("inference")
        with second.alone("reward slow"):
            time.sleep(1.5)
    said = capsys.readouterr().err
    assert said.count("no rank has begun anything for") == 1
    assert "the others wait for rank 1" in said
