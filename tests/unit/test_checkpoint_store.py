"""Checkpoints as folders: what is chosen, what is deleted, and what is left when a save dies at any point."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import namedtuple
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from mrlhf.checkpoint import saved, store
from mrlhf.checkpoint.saved import file_records, latest, list_checkpoints, locate, previous, read_checkpoint, verify
from mrlhf.checkpoint.store import CheckpointStore, Rotation, leftover_owner, new_run_id
from mrlhf.errors import CheckpointError


def save(where: CheckpointStore, iteration: int, **metrics: float) -> saved.Checkpoint:
    folder = where.prepare(iteration)
    (folder / "weights").mkdir()
    (folder / "weights" / "part0").write_bytes(f"weights of {where.run_id} at {iteration}".encode() * 50)
    (folder / "common.json").write_text(json.dumps({"iteration": iteration}))
    return where.commit(iteration, layout={"tensor_model_parallel_size": 2}, metrics=metrics)


def iterations(root: Path) -> list[int]:
    return sorted(checkpoint.iteration for checkpoint in list_checkpoints(root))


def test_f6_only_own_checkpoints_are_deleted(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path, "older"), 5)
    own = CheckpointStore(tmp_path, "newer", Rotation(keep_last=2))
    for iteration in (10, 20):
        save(own, iteration)
    folder = own.prepare(30)
    (folder / "part0").write_bytes(b"30")
    assert iterations(tmp_path) == [5, 10, 20], "nothing goes before the new one is complete"
    own.commit(30)
    assert iterations(tmp_path) == [5, 20, 30]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000005", "iter_0000020", "iter_0000030"]
    with pytest.raises(CheckpointError, match=r"iter_0000005 belongs to another run \(older\)"):
        own.prepare(5)


def test_what_the_marker_says(tmp_path: Path) -> None:
    done = save(CheckpointStore(tmp_path, "run"), 10, score=0.5)
    assert done == latest(tmp_path) == locate(tmp_path) == locate(done.path)
    assert (done.iteration, done.run_id, done.sequence, done.metrics) == (10, "run", 1, {"score": 0.5})
    assert done.layout == {"tensor_model_parallel_size": 2}
    assert {"mrlhf", "megatron-core", "torch"} <= set(done.versions)
    assert set(done.files) == {"run_id", "common.json", "weights/part0"}
    files = [path for path in done.path.rglob("*") if path.is_file() and path.name != "complete.json"]
    assert done.bytes == sum(path.stat().st_size for path in files)
    assert new_run_id() != new_run_id()


def test_keep_every_and_best(tmp_path: Path) -> None:
    own = CheckpointStore(tmp_path, "run", Rotation(keep_last=1, keep_every=20, best_metric="score"))
    for iteration, score in [(5, 1.0), (10, 9.0), (15, float("nan")), (20, 2.0), (25, 3.0), (30, 9.0)]:
        save(own, iteration, score=score)
    assert iterations(tmp_path) == [10, 20, 30], "the first of equals stays the best"
    best = own.best()
    assert best is not None
    assert best.iteration == 10
    save(own, 35, score=10.0)
    assert iterations(tmp_path) == [20, 35]
    save(own, 36, other=1.0)
    assert iterations(tmp_path) == [20, 35, 36]


def test_smallest_is_best(tmp_path: Path) -> None:
    own = CheckpointStore(tmp_path, "run", Rotation(keep_last=1, best_metric="loss", best_mode="min"))
    for iteration, loss in [(1, 3.0), (2, 1.0), (3, 2.0)]:
        save(own, iteration, loss=loss)
    assert iterations(tmp_path) == [2, 3]


def test_incomplete_folders_are_never_chosen_and_own_leftovers_go(tmp_path: Path) -> None:
    own, other = CheckpointStore(tmp_path, "run"), CheckpointStore(tmp_path, "other")
    save(own, 10)
    (own.prepare(20) / "part0").write_bytes(b"half")
    (other.prepare(25) / "part0").write_bytes(b"half of another run's")
    (tmp_path / "iter_0000040").mkdir()
    (tmp_path / "iter_0000040" / "part0").write_bytes(b"no marker")
    found = latest(tmp_path)
    assert found is not None
    assert found.iteration == 10
    with pytest.raises(CheckpointError, match=r"iter_0000040 is an incomplete checkpoint.*iter_0000010"):
        locate(tmp_path / "iter_0000040")
    with pytest.raises(CheckpointError, match=r"iter_0000025.incomplete belongs to another run"):
        own.prepare(25)
    own.prepare(30)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["iter_0000010", "iter_0000025.incomplete", "iter_0000030.incomplete", "iter_0000040"]
    own.abandon(30)
    other.abandon(30)
    assert not (tmp_path / "iter_0000030.incomplete").exists()


@pytest.mark.parametrize("damage", ["flipped", "short", "gone"])
def test_a_damaged_file_is_named_and_the_previous_checkpoint_offered(tmp_path: Path, damage: str) -> None:
    own = CheckpointStore(tmp_path, "run")
    first, second = save(own, 10), save(own, 20)
    verify(first)
    verify(second)
    part = second.path / "weights" / "part0"
    content = bytearray(part.read_bytes())
    if damage == "flipped":
        content[700] ^= 1
        part.write_bytes(content)
    elif damage == "short":
        part.write_bytes(content[:-1])
    else:
        part.unlink()
    with pytest.raises(CheckpointError, match=rf"weights/part0 .*trainer.resume={first.path}"):
        verify(second)
    verify(second, ["common.json"])
    assert previous(second) == first
    assert previous(first) is None


def test_a_damaged_marker_is_no_reason_to_go_back_silently(tmp_path: Path) -> None:
    own = CheckpointStore(tmp_path, "run", Rotation(keep_last=3))
    first, second = save(own, 10), save(own, 20)
    marker = second.path / "complete.json"
    marker.write_text(marker.read_text()[:-20])
    with pytest.raises(CheckpointError, match=rf"iter_0000020/complete.json is damaged.*trainer.resume={first.path}"):
        latest(tmp_path)
    save(own, 30)
    assert iterations(tmp_path) == [10, 30]
    assert second.path.exists(), "what cannot be read is not deleted"
    third = latest(tmp_path)
    assert third is not None
    assert third.iteration == 30
    data = json.loads((third.path / "complete.json").read_text())
    (third.path / "complete.json").write_text(json.dumps({**data, "iteration": 31}))
    with pytest.raises(CheckpointError, match="it names iteration 31"):
        read_checkpoint(third.path)


def test_files_that_ranks_recorded_are_not_read_again(tmp_path: Path) -> None:
    own = CheckpointStore(tmp_path, "run")
    folder = own.prepare(10)
    (folder / "part0").write_bytes(b"0123456789")
    (folder / "part1").write_bytes(b"9876543210")
    records = file_records(folder, ["part1"])
    (folder / "part1").write_bytes(b"9876543211")
    done = own.commit(10, files=records)
    verify(done, ["part0"])
    with pytest.raises(CheckpointError, match="part1 is damaged"):
        verify(done)
    (own.prepare(20) / "part1").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"part1 is damaged: 5 bytes, 10 were saved"):
        own.commit(20, files=records)
    assert iterations(tmp_path) == [10]


def test_the_disk_is_checked_before_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = CheckpointStore(tmp_path, "run")
    size = save(own, 10).bytes
    usage = namedtuple("usage", "total used free")  # noqa: PYI024
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10 * size, 9 * size, size))
    with pytest.raises(CheckpointError, match=rf"no room for a checkpoint.*{size:,} are free"):
        own.prepare(20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000010"]
    own.prepare(20, expected_bytes=size // 2)


def test_a_run_that_went_back_comes_by_again(tmp_path: Path) -> None:
    own = CheckpointStore(tmp_path, "run", Rotation(keep_last=3))
    for iteration in (10, 20, 30):
        save(own, iteration)
    again = save(own, 20)
    assert again.sequence == 4
    assert latest(tmp_path) == again, "the newest save, not the highest iteration"
    assert [c.iteration for c in list_checkpoints(tmp_path)] == [10, 30, 20]


def test_a_run_that_died_in_its_first_save_keeps_its_id(tmp_path: Path) -> None:
    assert leftover_owner(tmp_path / "nowhere") is None
    (CheckpointStore(tmp_path, "dead").prepare(10) / "part0").write_bytes(b"half")
    (tmp_path / "iter_0000020.incomplete").mkdir()
    assert leftover_owner(tmp_path) == "dead"
    again = CheckpointStore(tmp_path, "dead")
    save(again, 10)
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000010"]
    (CheckpointStore(tmp_path, "other").prepare(20) / "part0").write_bytes(b"half")
    assert leftover_owner(tmp_path) is None


def test_a_dead_attempt_and_the_next_one_write_to_different_places(tmp_path: Path) -> None:
    dead = CheckpointStore(tmp_path, "run", attempt="0a1b-1").prepare(10)
    again = CheckpointStore(tmp_path, "run", attempt="0a1c-1")
    folder = again.prepare(10)
    assert dead != folder
    assert not dead.exists()
    dead.mkdir()  # by a process that outlived its job
    (dead / "part0").write_bytes(b"late")
    assert latest(tmp_path) is None
    again.abandon(10)
    assert not folder.exists()
    verify(save(again, 10))
    assert leftover_owner(tmp_path) is None
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["iter_0000010", "iter_0000010.0a1b-1.incomplete"], "it is nobody's"
    again.prepare(20)
    assert again.prepare(20).name == "iter_0000020.0a1c-1.incomplete"


class Killed(BaseException):
    """Stands for the end of the process: nothing in the store catches it."""


def killed_at(line: int, work: Any) -> bool:
    """Run ``work``, ending it before the ``line``-th line of the store's code; False once it has fewer lines.

    The lines of `mrlhf.checkpoint.saved` do not count: they only read.
    """
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != store.__file__:
            return None
        if event == "line":
            count += 1
            if count == line:
                raise Killed
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except Killed:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("replacing", [False, True])
def test_killed_between_any_two_steps(tmp_path: Path, replacing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever line a save dies at, an intact checkpoint is the latest, and the next save goes through."""
    # A killed process loses nothing that it has written; waiting for the disk some thousand times takes minutes.
    monkeypatch.setattr(os, "fsync", lambda _: None)
    iteration, line, outcomes = 20 if replacing else 30, 0, set()
    template = tmp_path / "template"
    save(CheckpointStore(template, "older"), 5)
    for earlier in (10, 20):
        save(CheckpointStore(template, "run"), earlier)
    alive = True
    while alive:
        line += 1
        root = shutil.copytree(template, tmp_path / str(line))
        alive = killed_at(line, lambda root=root: save(CheckpointStore(root, "run"), iteration))
        newest = latest(root)
        assert newest is not None
        outcomes.add((newest.iteration, newest.sequence))
        assert {5, 20} <= set(iterations(root))
        for checkpoint in list_checkpoints(root):
            verify(checkpoint)
        save(CheckpointStore(root, "run"), 40)
        kept = {5, 40, newest.iteration}
        assert set(iterations(root)) == kept
        assert {path.name for path in root.iterdir()} == {f"iter_{i:07d}" for i in kept}
        shutil.rmtree(root)
    assert outcomes == {(20, 3), (iteration, 4)}
    assert line > 50
