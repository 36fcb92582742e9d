"""JSON lines files on a disk that fills up."""

from __future__ import annotations

import json
import resource
import signal
import warnings
from pathlib import Path

import pytest

from mrlhf.lines import LineFile
from mrlhf.metrics import JsonlWriter, Writers
from tests.ranks import run_ranks


def full(path: Path) -> None:
    """A file may have 60 bytes: the second line breaks off in its middle, the third cannot begin."""
    warnings.simplefilter("error")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    file, rows = LineFile(path), [{"step": i, "text": "ä" * 10} for i in range(3)]
    file.write(rows[:1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (60, before[1]))
    with pytest.warns(UserWarning, match=r"lines\.jsonl: File too large; the lines are kept"):
        file.write(rows[1:2])
    file.write(rows[2:])  # says nothing again, or the rank fails
    assert path.stat().st_size == 60
    assert file.pending
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    file.write([])
    assert file.pending == b""
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows


def test_what_does_not_fit_is_written_later(tmp_path: Path) -> None:
    run_ranks(full, 1, tmp_path / "lines.jsonl")


def test_a_writer_that_fails_leaves_the_others(tmp_path: Path) -> None:
    class Broken:
        def write(self, step: int, metrics: object) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            raise AssertionError("it was left out")

    writers = Writers([Broken(), JsonlWriter(tmp_path / "metrics.jsonl")])
    with pytest.warns(UserWarning, match="Broken stops in step 3: .*No space left"):
        writers.write(3, {"loss": 1.0})
    writers.write(4, {"loss": 2.0})
    writers.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"step": 3, "loss": 1.0}, {"step": 4, "loss": 2.0}]
