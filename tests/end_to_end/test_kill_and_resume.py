"""Whatever ends a run, its last complete checkpoint is there, and from it the run comes to the same end."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mrlhf.checkpoint.saved import latest, list_checkpoints, verify
from mrlhf.checkpoint.store import CheckpointStore
from mrlhf.parallel.heartbeat import read_beats
from tests import ranks, tiny_run
from tests.end_to_end.jobs import ROOT
from tests.end_to_end.killed_run import BASE, ITERATIONS, PHASES, KillableRun, complete, run, tables

LAYOUTS = {"tp": ("parallel.tensor_model_parallel_size=2",), "dp": ("optimizer.distributed=true",)}
SAVES = {"each": (), "async": ("checkpoint.asynchronous=true",), "second": ("checkpoint.interval=2",)}
STEPS = ITERATIONS * len(PHASES)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.make_inputs(tmp_path_factory.mktemp("killed"))


class Whole:
    """Uninterrupted runs by layout, each made once."""

    def __init__(self, inputs: Path, root: Path) -> None:
        self.inputs, self.root = inputs, root
        self.runs: dict[str, tuple[list[Any], dict[str, Any]]] = {}

    def __call__(self, layout: str) -> tuple[list[Any], dict[str, Any]]:
        if layout not in self.runs:
            results = complete(2, self.inputs, self.root / layout, *LAYOUTS[layout])
            self.runs[layout] = [r["weights"] for r in results], tables(self.root / layout)
        return self.runs[layout]


@pytest.fixture(scope="module")
def whole(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(inputs, tmp_path_factory.mktemp("whole"))


def moments(count: int) -> list[Any]:
    """Layout, saves, rank, number of the phase and seconds after its begin; the first are part of every test run."""
    chosen, source = [], random.Random(20)
    for index in range(count):
        layout, saves, rank = list(LAYOUTS)[index % 2], list(SAVES)[index % 3], source.randrange(2)
        moment = (layout, saves, rank, source.randrange(1, STEPS + 2), source.uniform(0.0, 0.2))
        marks = [pytest.mark.slow] if index >= 2 else []
        chosen.append(pytest.param(*moment, marks=marks, id=f"{index}-{layout}-{saves}"))
    return chosen


@pytest.mark.parametrize(("layout", "saves", "rank", "step", "delay"), moments(20))
def test_killed_at_a_random_moment(
    layout: str, saves: str, rank: int, step: int, delay: float, inputs: Path, whole: Whole, tmp_path: Path
) -> None:
    weights, written = whole(layout)
    overrides = (*LAYOUTS[layout], *SAVES[saves])
    killed = KillableRun(2, inputs, tmp_path, overrides)
    beat = killed.kill(rank, lambda beat: beat.steps >= step, delay)
    assert beat is None or beat.steps >= step
    assert killed.left == []
    assert beat is not None or step >= STEPS - 1, "only the last phases can be over before the kill"
    saved = latest(tmp_path / "checkpoints")
    results = complete(2, inputs, tmp_path, *overrides)
    assert [r["weights"] for r in results] == weights
    assert tables(tmp_path) == written
    first = saved.iteration if saved is not None else 0
    assert [r["first"] for r in results] == [first, first]
    # What had been begun before the kill and the save of it is lost, nothing else is.
    done = ITERATIONS if beat is None else max(beat.iteration - 2, 0)
    due = done - done % 2 if saves == "second" and beat is not None else done
    assert due <= first <= ITERATIONS
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {f"iter_{i:07d}" for i in (ITERATIONS - 1, ITERATIONS)}


def _limited(inputs: Path, output: Path, overrides: tuple[str, ...], limit: int) -> dict[str, Any]:
    """`run` on a disk that takes no file beyond ``limit`` bytes: a write fails in the middle, as on a full disk."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    return run(inputs, output, overrides)


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_disk_full_in_the_middle_of_a_save(asynchronous: str, inputs: Path, whole: Whole, tmp_path: Path) -> None:
    weights, written = whole("tp")
    layout = (*LAYOUTS["tp"], f"checkpoint.asynchronous={asynchronous}")
    complete(2, inputs, tmp_path, *layout, "trainer.iterations=1")
    first = latest(tmp_path / "checkpoints")
    assert first is not None
    largest = max(record.bytes for record in first.files.values())
    assert largest > 30_000, "or nothing fails below"
    stop, warn = (*layout, "checkpoint.on_save_error=stop"), (*layout, "checkpoint.on_save_error=warn")
    with pytest.raises(ranks.RankFailure, match=r"(?i)too large|could not be saved|failed"):
        ranks.run_ranks(_limited, 2, inputs, tmp_path, stop, largest // 2)
    assert latest(tmp_path / "checkpoints") == first
    verify(first)
    results = ranks.run_ranks(_limited, 2, inputs, tmp_path, warn, largest // 2)
    assert [r["weights"] for r in results] == weights, "the training itself goes on"
    assert list_checkpoints(tmp_path / "checkpoints") == [first]
    results = complete(2, inputs, tmp_path, *layout)
    assert [r["first"] for r in results] == [1, 1]
    assert [r["weights"] for r in results] == weights
    assert tables(tmp_path) == written


def _filled(inputs: Path, output: Path, overrides: tuple[str, ...], left: int) -> dict[str, Any]:
    """`run` on a disk that someone else fills, but for ``left`` bytes, once a save has found room."""
    prepare = CheckpointStore.prepare

    def then_filled(store: CheckpointStore, *arguments: Any) -> Path:
        folder = prepare(store, *arguments)
        with (output.parent / "ballast").open("wb") as file:
            file.write(bytes(max(shutil.disk_usage(output).free - left, 0)))
        return folder

    CheckpointStore.prepare = then_filled  # type: ignore[method-assign]
    return run(inputs, output, overrides)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no disk of its own can be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_a_disk_that_fills_up_at_any_byte_of_a_save(
    asynchronous: str, inputs: Path, whole: Whole, small_disk: Path
) -> None:
    """In the description, in the tensors of either rank, in Megatron's small files, or in the marker."""
    weights, written = whole("tp")
    output = small_disk / "out"
    layout = (*LAYOUTS["tp"], f"checkpoint.asynchronous={asynchronous}", "checkpoint.on_save_error=warn")
    complete(2, inputs, output, *layout, "trainer.iterations=1")
    first = latest(output / "checkpoints")
    assert first is not None
    ends = []
    for left in (0, first.bytes // 3, *(first.bytes - kilobytes * 1024 for kilobytes in (32, 16, 8, 4, 0))):
        try:
            # A failure that all ranks know of: the training goes on.
            results = ranks.run_ranks(_filled, 2, inputs, output, layout, left)
            assert [r["weights"] for r in results] == weights
            ends.append("went on")
        except ranks.RankFailure as error:
            ends.append(str(error))
        assert latest(output / "checkpoints") == first
        verify(first)
        (small_disk / "ballast").unlink()
    assert "went on" in ends
    # What only rank 0 knows of ends the run, in one message.
    assert all(end == "went on" or "start again with trainer.resume=auto" in end for end in ends), ends
    results = complete(2, inputs, output, *layout)
    assert [r["first"] for r in results] == [1, 1]
    assert [r["weights"] for r in results] == weights
    assert tables(output) == written


def test_the_stop_file(inputs: Path, whole: Whole, tmp_path: Path) -> None:
    weights, written = whole("dp")
    (tmp_path / "stop").touch()
    layout = (*LAYOUTS["dp"], "checkpoint.interval=0")
    results = complete(2, inputs, tmp_path, *layout)
    assert [r["stopped"] for r in results] == [f"{tmp_path / 'stop'} was there"] * 2
    assert not (tmp_path / "stop").exists()
    results = complete(2, inputs, tmp_path, *layout)
    assert [(r["first"], r["stopped"]) for r in results] == [(1, None)] * 2
    assert [r["weights"] for r in results] == weights
    assert tables(tmp_path) == written


def _settings(inputs: Path, output: Path, *overrides: str) -> list[str]:
    """The arguments of ``mrlhf ppo`` for the run."""
    from mrlhf.config import to_yaml

    path = output.with_suffix(".yaml")
    path.write_text(to_yaml(tiny_run.make_config(inputs, output, *BASE, *overrides)))
    return ["ppo", str(path)]


def _started(arguments: list[str], *launcher: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *launcher, "-m", "mrlhf", *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def test_sigterm_saves_and_exits_with_75(inputs: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    arguments = _settings(inputs, output, "trainer.export=true", "trainer.progress=plain")
    process = _started(arguments)
    while process.poll() is None and not any(beat.phase == "rollout" for beat in read_beats(output / "heartbeat", 1)):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=200)
    assert process.returncode == 75, said
    assert "SIGTERM" in said
    saved = latest(output / "checkpoints")
    assert saved is not None
    assert saved.iteration < ITERATIONS
    assert not (output / "actor").exists()
    process = _started(arguments)
    _, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    ranks.run_ranks(run, 1, inputs, tmp_path / "whole", ("trainer.export=true",))
    for name in ("actor", "critic"):
        files = sorted((tmp_path / "whole" / name).glob("*.safetensors"))
        assert files
        for file in files:
            assert (output / name / file.name).read_bytes() == file.read_bytes()
    assert tables(output) == tables(tmp_path / "whole")


def _kill_in_each_phase(process: subprocess.Popen[str], output: Path) -> None:
    """SIGKILL for one of two ranks in one phase of each start, the ranks in turn."""
    killed: dict[str, int] = {}
    for index, phase in enumerate(PHASES):
        deadline = time.monotonic() + 150
        while phase not in killed:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline, f"no rank came to the phase {phase}"
            for beat in read_beats(output / "heartbeat", 2):
                if beat.rank == index % 2 and beat.phase == phase and beat.pid not in killed.values():
                    os.kill(beat.pid, signal.SIGKILL)
                    killed[phase] = beat.pid
            time.sleep(0.002)


@pytest.mark.slow
def test_torchrun_brings_a_job_back_that_is_killed_in_each_phase(inputs: Path, whole: Whole, tmp_path: Path) -> None:
    _, written = whole("tp")
    output = tmp_path / "out"
    arguments = _settings(inputs, output, *LAYOUTS["tp"])
    restarts = ["--max-restarts", str(len(PHASES)), "--monitor-interval", "0.1"]
    process = _started(arguments, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *restarts)
    try:
        _kill_in_each_phase(process, output)
        _, said = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            # The agent ends its ranks.
            process.terminate()
            process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert tables(output) == written
    final = latest(output / "checkpoints")
    assert final is not None
    assert final.iteration == ITERATIONS
    verify(final)


def slow_on_rank_1(prompts: list[str], responses: list[str], **meta: Any) -> list[float]:
    """Sleeps for longer than the other rank waits."""
    if os.environ["RANK"] == "1":
        time.sleep(60)
    return [0.0] * len(responses)


def test_a_stuck_rank_is_named(inputs: Path, tmp_path: Path) -> None:
    """Ten minutes of silence would say nothing: the error says who was waited for, and what it was doing."""
    source = "reward.sources=[{kind: function, target: 'tests.end_to_end.test_kill_and_resume:slow_on_rank_1'}]"
    start = time.monotonic()
    with pytest.raises(ranks.RankFailure) as caught:
        complete(2, inputs, tmp_path, source, "launch.timeout_minutes=0.1")
    assert time.monotonic() - start < 55
    message = str(caught.value)
    assert "rank 0 raised" in message
    assert "the others wait for rank 1 (" in message
    assert "inference, reward slow_on_rank_1, iteration 1, for" in message
