"""Requests to stop: every kind of them, and two ranks that come to the same answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from mrlhf.trainer.stopping import REPEAT_SECONDS, StopRequest, process_seconds
from tests.ranks import run_ranks

PEER_GONE = "gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:48827"


def _signalled(folder: str, number: int, rank: int) -> list[str | None]:
    before = signal.getsignal(number)
    late: list[int] = []
    signal.signal(number, lambda received, _: late.append(received))
    with StopRequest(Path(folder)) as stop:
        answers = [stop.check(0.0)]
        if dist.get_rank() == rank:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
        answers += [stop.check(0.0), stop.check(0.0)]
        if dist.get_rank() == rank:
            assert late == [], "torchrun and Slurm may both send the first one"
            stop._since -= 2 * REPEAT_SECONDS
            os.kill(os.getpid(), number)
            assert late == [number], "a later one does what it always did"
    assert signal.getsignal(number) != before
    signal.signal(number, before)
    return answers


def _answers(folder: str) -> dict[str, Any]:
    path = Path(folder)
    results: dict[str, Any] = {
        "usr1": _signalled(folder, signal.SIGUSR1, 1),
        "term": _signalled(folder, signal.SIGTERM, 0),
    }
    stop = StopRequest(path)
    before = stop.check(0.0)
    dist.barrier()
    if dist.get_rank() == 1:
        (path / "stop").touch()
    dist.barrier()
    results["file"] = [before, stop.check(0.0)]
    dist.barrier()
    results["file_left"] = (path / "stop").exists()
    results["file_again"] = stop.check(0.0)
    results["time"] = _times(path)
    return results


def _times(folder: Path) -> dict[str, bool]:
    """Whether a run with 100 s left stops, after iterations and saves that took so long; rank 1 is the slower one."""
    outcomes = {}
    cases = {"plenty": (20.0, 20.0), "iteration": (85.0, 20.0), "save": (20.0, 85.0), "unknown_save": (55.0, 0.0)}
    for name, (iteration, save) in cases.items():
        slow = float(dist.get_rank())
        stop = StopRequest(folder, time_limit_minutes=(process_seconds() + 100.0) / 60)
        stop.saved(save * slow)
        outcomes[name] = stop.check(iteration * slow) is not None
    far = StopRequest(folder, time_limit_minutes=(process_seconds() + 100.0) / 60)
    far.check(90.0 * dist.get_rank())
    outcomes["longest_counts"] = far.check(1.0) is not None
    return outcomes


def test_two_ranks_stop_together(tmp_path: Path) -> None:
    first, second = run_ranks(_answers, 2, str(tmp_path))
    assert first == second
    assert first["usr1"] == [None, "SIGUSR1", "SIGUSR1"]
    assert first["term"] == [None, "SIGTERM", "SIGTERM"]
    assert first["file"] == [None, f"{tmp_path / 'stop'} was there"]
    assert not first["file_left"]
    assert first["file_again"] is None
    assert first["time"] == {
        "plenty": False,
        "iteration": True,
        "save": True,
        "unknown_save": True,
        "longest_counts": True,
    }


def test_the_time_of_a_process_begins_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < process_seconds() < 24 * 3600
    code = "import time; from mrlhf.trainer.stopping import process_seconds; print(process_seconds())"
    ages = []
    for name in ("UNRELATED", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "x")
        mine = time.time() - psutil.Process().create_time()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        ages.append(float(done.stdout) - mine)
    # This process stands for the agent, which is older than its ranks by all that it did before.
    assert ages[0] < ages[1]
    assert ages[1] > 0


@pytest.mark.parametrize(
    ("number", "error", "status"),
    [
        ("SIGTERM", PEER_GONE, -signal.SIGTERM),
        ("SIGTERM", "an error of its own", 3),
        ("SIGUSR1", PEER_GONE, 3),
        (None, PEER_GONE, 3),
    ],
)
def test_the_signal_of_a_launcher_that_ends_what_is_left_is_no_request(
    tmp_path: Path, number: str | None, error: str, status: int
) -> None:
    """torchrun signals the other ranks when one has failed, before or after they notice that it has gone."""
    code = f"""
import os, signal, sys
from pathlib import Path
from mrlhf.trainer.stopping import StopRequest
try:
    with StopRequest(Path(sys.argv[1])):
        {f"os.kill(os.getpid(), signal.{number})" if number else "pass"}
        raise RuntimeError({error!r})
except RuntimeError:
    sys.exit(3)
"""
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == status
