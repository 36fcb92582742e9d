"""The checkpoints of a run as folders: written aside, completed by a marker, renamed, counted and deleted.

``ROOT/iter_0000010`` is a checkpoint when it holds the marker ``complete.json``. A save goes through these steps, and
a process that dies between any two of them leaves the earlier checkpoints as they were:

1. `CheckpointStore.prepare` checks the free disk and makes ``iter_0000010.ATTEMPT.incomplete``, where all ranks write;
2. `CheckpointStore.commit` takes size and checksum of each file, writes the marker, renames the folder, and only then
   deletes what the rotation no longer keeps: checkpoints of the same run, never another run's.

Only one process of a job may write through a store; `file_records` and `verify_files` can be shared out over ranks.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
import uuid
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from mrlhf import __version__
from mrlhf.checkpoint.saved import (
    MARKER,
    Checkpoint,
    FileRecord,
    file_names,
    file_records,
    list_checkpoints,
    read_checkpoint,
    verify_files,
)
from mrlhf.errors import CheckpointError

OWNER = "run_id"
"""File in a folder that is being written: the id of the run that it belongs to."""
_LEFTOVER = re.compile(r"iter_(\d+)(?:\.[0-9a-f-]+)?\.(incomplete|deleted|replaced)")
# Of the free disk beyond the expected bytes: metadata, and other writers of the same disk (logs, samples, exports).
_MARGIN = 1.05


@dataclass(frozen=True)
class Rotation:
    """Which checkpoints of a run are kept: the last ones, every n-th iteration, and the best by a metric."""

    keep_last: int = 2
    keep_every: int = 0
    best_metric: str | None = None
    best_mode: Literal["max", "min"] = "max"

    def kept(self, own: list[Checkpoint]) -> set[int]:
        """Iterations to keep.

        Args:
            own: checkpoints of one run, in the order of their saves.
        """
        kept = {checkpoint.iteration for checkpoint in own[-max(self.keep_last, 1) :]}
        if self.keep_every:
            kept |= {c.iteration for c in own if c.iteration % self.keep_every == 0}
        best = self.best(own)
        return kept if best is None else kept | {best.iteration}

    def best(self, own: list[Checkpoint]) -> Checkpoint | None:
        """The best by ``best_metric`` (the first of equals); None without a metric or a finite value of it."""
        if self.best_metric is None:
            return None
        name, sign = self.best_metric, 1.0 if self.best_mode == "max" else -1.0
        scored = [c for c in own if math.isfinite(c.metrics.get(name, math.nan))]
        return max(scored, key=lambda c: sign * c.metrics[name], default=None)


def new_run_id() -> str:
    """An id that no other run has; a resumed run goes on with the one of its checkpoint."""
    return uuid.uuid4().hex[:16]


def leftover_owner(root: Path) -> str | None:
    """The id of the run whose very first save broke below ``root``: whoever starts it again goes on under that id.

    Returns:
        None where there is no such leftover, or a complete checkpoint, whose id counts then.
    """
    if list_checkpoints(root):
        return None
    broken = [p for p in root.glob("iter_*") if (match := _LEFTOVER.fullmatch(p.name)) and match[2] == "incomplete"]
    owners = {folder: _owner(folder) for folder in sorted(broken, key=lambda path: path.stat().st_mtime)}
    return next((owner for owner in reversed(owners.values()) if owner), None)


class CheckpointStore:
    """The checkpoints below one folder, and the right to add to them for one run."""

    def __init__(self, root: Path, run_id: str, rotation: Rotation | None = None, *, attempt: str = "") -> None:
        """Nothing is written or deleted yet.

        Args:
            root: the folder of the checkpoints, normally ``OUTPUT_DIR/checkpoints``; made by the first save.
            run_id: of this run, see `new_run_id`.
            rotation: what is kept; by default the last two.
            attempt: hexadecimal, of this save: what processes of a dead attempt still write goes elsewhere then.
        """
        self.attempt = attempt
        self.root, self.run_id, self.rotation = root, run_id, rotation or Rotation()

    def prepare(self, iteration: int, expected_bytes: int = 0) -> Path:
        """An empty folder for the files of a checkpoint; leftovers of this run's broken saves are removed first.

        Args:
            iteration: that the checkpoint follows.
            expected_bytes: size of the checkpoint; 0: that of the newest one, if any.

        Returns:
            ``iter_NNNNNNN.incomplete``, with the attempt in its name if there is one.

        Raises:
            CheckpointError: the disk has not enough room, or the iteration's folder belongs to another run.
            OSError: from the file system.
        """
        target = self._folder(iteration)
        for place in (target, self._incomplete(target)):
            owner = _owner(place)
            if place.exists() and owner != self.run_id and not _is_empty(place):
                raise CheckpointError(
                    f"{place} belongs to another run ({owner or 'unknown'}) and is never replaced by this one "
                    f"({self.run_id}); move it away, or choose another trainer.output_dir"
                )
        self.root.mkdir(parents=True, exist_ok=True)
        self.remove_leftovers()
        newest = [checkpoint.bytes for checkpoint in list_checkpoints(self.root)[-1:]]
        check_free_disk(self.root, expected_bytes or sum(newest))
        folder = self._incomplete(target)
        folder.mkdir(exist_ok=True)
        _write_synced(folder / OWNER, self.run_id)
        return folder

    def commit(
        self,
        iteration: int,
        *,
        layout: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        files: Mapping[str, FileRecord] | None = None,
    ) -> Checkpoint:
        """Complete what `prepare` began, after every rank has written its files; then delete what is not kept.

        Args:
            iteration: as given to `prepare`.
            layout: parallel sizes, for messages and for whoever looks at the folder.
            metrics: of the iteration, for the choice of the best.
            files: records that ranks took of their files with `file_records`; the other files are read here.

        Returns:
            The checkpoint under its final name.

        Raises:
            CheckpointError: a file of ``files`` has gone or has another size.
            OSError: from the file system; the earlier checkpoints are in place then.
        """
        target = self._folder(iteration)
        folder = self._incomplete(target)
        known = dict(files or {})
        rest = [name for name in file_names(folder) if name not in known]
        records = {**known, **file_records(folder, rest)}
        verify_files(folder, known, sizes_only=True)
        sequence = 1 + max((c.sequence for c in list_checkpoints(self.root)), default=0)
        marker = {
            "iteration": iteration,
            "run_id": self.run_id,
            "sequence": sequence,
            "layout": dict(layout or {}),
            "versions": _versions(),
            "metrics": {name: float(value) for name, value in (metrics or {}).items()},
            "saved_at": time.time(),
            "files": {name: FileRecord(*record)._asdict() for name, record in sorted(records.items())},
        }
        _write_synced(folder / MARKER, json.dumps(marker, indent=1))
        if target.exists():
            # This run went back to an earlier checkpoint and comes by here again.
            target.rename(_aside(target, "replaced"))
        folder.rename(target)
        _sync_folder(self.root)
        checkpoint = read_checkpoint(target)
        try:
            self.rotate()
        except OSError as error:
            # The new one is complete, so this is no failed save.
            warnings.warn(f"an old checkpoint could not be deleted: {error}", stacklevel=2)
        return checkpoint

    def abandon(self, iteration: int) -> None:
        """Remove what a failed save has written, so that it does not fill the disk; nothing if there is nothing."""
        folder = self._incomplete(self._folder(iteration))
        if _owner(folder) == self.run_id:
            _delete(folder)

    def own(self) -> list[Checkpoint]:
        """The complete checkpoints of this run, in the order of their saves."""
        return [c for c in list_checkpoints(self.root) if c.run_id == self.run_id]

    def best(self) -> Checkpoint | None:
        """The best of this run by the rotation's metric, if any."""
        return self.rotation.best(self.own())

    def rotate(self) -> None:
        """Delete the checkpoints of this run that are not kept, and leftovers."""
        own = self.own()
        kept = self.rotation.kept(own)
        for checkpoint in own:
            if checkpoint.iteration not in kept:
                _delete(checkpoint.path)
        self.remove_leftovers()

    def remove_leftovers(self) -> None:
        """Delete what broken saves and deletions of this run left, except what is still needed."""
        for folder in sorted(self.root.glob("iter_*.*")):
            match = _LEFTOVER.fullmatch(folder.name)
            if match is None or not folder.is_dir():
                continue
            if match[2] == "incomplete" and _is_empty(folder):
                _delete(folder)
                continue
            if _owner(folder) != self.run_id and not (match[2] == "deleted" and _owner(folder) is None):
                continue
            target = self._folder(int(match[1]))
            if match[2] == "replaced" and not (target / MARKER).exists():
                # The process died before the new one took its place.
                folder.rename(target)
                continue
            _delete(folder)

    def _incomplete(self, target: Path) -> Path:
        return _aside(target, f"{self.attempt}.incomplete" if self.attempt else "incomplete")

    def _folder(self, iteration: int) -> Path:
        return self.root / f"iter_{iteration:07d}"


def check_free_disk(folder: Path, expected_bytes: int) -> None:
    """Refuse a save that does not fit. Raises `CheckpointError` with both numbers."""
    free = shutil.disk_usage(folder).free
    needed = int(expected_bytes * _MARGIN)
    if free < needed:
        raise CheckpointError(
            f"no room for a checkpoint below {folder}: it needs about {needed:,} bytes, {free:,} are free; free some "
            "disk, lower checkpoint.keep_last or raise checkpoint.keep_every"
        )


def _aside(target: Path, suffix: str) -> Path:
    return target.with_name(f"{target.name}.{suffix}")


def _delete(folder: Path) -> None:
    """Renamed first, so that half of it neither looks complete nor like anyone's."""
    gone = folder if folder.suffix == ".deleted" else folder.with_suffix(".deleted")
    if gone != folder:
        if gone.exists():
            shutil.rmtree(gone)
        folder.rename(gone)
    shutil.rmtree(gone)


def _is_empty(folder: Path) -> bool:
    """Nothing, or as far as `CheckpointStore.prepare` came before it had written the owner."""
    return folder.is_dir() and all(path.name == f"{OWNER}.tmp" for path in folder.iterdir())


def _owner(folder: Path) -> str | None:
    try:
        return (folder / OWNER).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None


def _versions() -> dict[str, str]:
    versions = {"mrlhf": __version__}
    for package in ("megatron-core", "torch"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _write_synced(path: Path, text: str) -> None:
    """Write a whole file or none."""
    part = path.with_name(f"{path.name}.tmp")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Bring renames in ``folder`` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
