"""A complete checkpoint on the disk: its marker, the sizes and checksums of its files, and how it is found.

Only files: nothing here knows what the files hold.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from mrlhf.errors import CheckpointError

MARKER = "complete.json"
FOLDER = re.compile(r"iter_(\d+)")
_BLOCK = 1 << 22


class FileRecord(NamedTuple):
    """Size in bytes and CRC-32 of a file."""

    bytes: int
    crc32: int


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, as its marker describes it."""

    path: Path
    iteration: int
    run_id: str
    sequence: int
    """Counts the saves into this folder: the newest has the highest, also after a run went back to an earlier one."""
    layout: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    saved_at: float = 0.0

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(record.bytes for record in self.files.values())


def list_checkpoints(root: Path) -> list[Checkpoint]:
    """All complete checkpoints below ``root``, of all runs, in the order of their saves.

    Folders without a marker, and those whose marker is damaged, do not count.
    """
    found = []
    for folder in candidates(root):
        try:
            found.append(read_checkpoint(folder))
        except CheckpointError:
            continue
    return sorted(found, key=lambda checkpoint: checkpoint.sequence)


def latest(root: Path) -> Checkpoint | None:
    """The newest complete checkpoint below ``root``, None without one.

    Raises:
        CheckpointError: one of a higher iteration has a damaged marker; the message offers the newest readable one.
    """
    found = list_checkpoints(root)
    newest = found[-1] if found else None
    for folder in sorted(candidates(root), reverse=True):
        match = FOLDER.match(folder.name)
        if newest is None or (match and int(match[1]) > newest.iteration):
            try:
                read_checkpoint(folder)
            except CheckpointError as error:
                raise CheckpointError(f"{error}; {_offer(newest)}") from None
    return newest


def locate(path: Path) -> Checkpoint:
    """The checkpoint that ``path`` names: its folder, a folder of checkpoints, or the output folder of a run.

    Raises:
        CheckpointError: there is none, or it is incomplete.
    """
    if (path / MARKER).exists():
        return read_checkpoint(path)
    for root in (path, path / "checkpoints"):
        checkpoint = latest(root)
        if checkpoint is not None:
            return checkpoint
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; expected a checkpoint, or the output folder of a run with some")
    what = "is an incomplete checkpoint" if path.name.startswith("iter_") else "holds no complete checkpoint"
    raise CheckpointError(f"{path} {what}: there is no {MARKER}; {_offer(_newest_readable(path.parent))}")


def read_checkpoint(folder: Path) -> Checkpoint:
    """What the marker of ``folder`` says.

    Raises:
        CheckpointError: there is no marker, or it cannot be read.
    """
    marker = folder / MARKER
    try:
        data = json.loads(marker.read_text(encoding="utf-8"))
        files = {name: FileRecord(int(r["bytes"]), int(r["crc32"])) for name, r in data.pop("files").items()}
        checkpoint = Checkpoint(path=folder, files=files, **data)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a complete checkpoint: {MARKER} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{marker} is damaged ({type(error).__name__}: {error})") from None
    named = FOLDER.match(folder.name)
    if named and int(named[1]) != checkpoint.iteration:
        raise CheckpointError(f"{marker} is damaged: it names iteration {checkpoint.iteration}")
    return checkpoint


def verify(checkpoint: Checkpoint, names: Iterable[str] | None = None) -> None:
    """Compare files with the sizes and checksums that they were saved with.

    Args:
        checkpoint: to check.
        names: of its files; by default all. Ranks can share them out.

    Raises:
        CheckpointError: naming the first damaged file and the previous complete checkpoint.
    """
    chosen = checkpoint.files if names is None else {name: checkpoint.files[name] for name in names}
    try:
        verify_files(checkpoint.path, chosen)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_offer(previous(checkpoint))}") from None


def previous(checkpoint: Checkpoint) -> Checkpoint | None:
    """The complete checkpoint that was saved before ``checkpoint`` into the same folder, if any."""
    return _newest_readable(checkpoint.path.parent, before=checkpoint.sequence)


def file_records(folder: Path, names: Iterable[str] | None = None) -> dict[str, FileRecord]:
    """Size and checksum of files, each brought to the disk first.

    Args:
        folder: of a checkpoint.
        names: paths relative to it; by default all files.
    """
    records = {}
    for name in file_names(folder) if names is None else names:
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())
            records[name] = _read_record(file)
    return records


def verify_files(folder: Path, records: Mapping[str, FileRecord], *, sizes_only: bool = False) -> None:
    """Compare files below ``folder`` with ``records``. Raises `CheckpointError` naming the first that differs."""
    for name, record in records.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != record.bytes:
                raise CheckpointError(f"{path} is damaged: {size} bytes, {record.bytes} were saved")
            if sizes_only:
                continue
            with path.open("rb") as file:
                if _read_record(file) != record:
                    raise CheckpointError(f"{path} is damaged: its checksum is not the one that was saved")
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror})") from None


def candidates(root: Path) -> list[Path]:
    """Folders with a marker, among them one whose successor did not come to take its place."""
    found = [p for p in root.glob("iter_*") if FOLDER.fullmatch(p.name) and (p / MARKER).exists()]
    for old in root.glob("iter_*.replaced"):
        if (old / MARKER).exists() and not (old.with_suffix("") / MARKER).exists():
            found.append(old)
    return found


def file_names(folder: Path) -> list[str]:
    """Paths below ``folder`` that belong to a checkpoint: all files but the marker."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(folder)) for path in files if path.name not in (MARKER, f"{MARKER}.tmp"))


def _read_record(file: BinaryIO) -> FileRecord:
    size, crc = 0, 0
    while block := file.read(_BLOCK):
        size, crc = size + len(block), zlib.crc32(block, crc)
    return FileRecord(size, crc)


def _newest_readable(root: Path, before: float = math.inf) -> Checkpoint | None:
    return next((c for c in reversed(list_checkpoints(root)) if c.sequence < before), None)


def _offer(checkpoint: Checkpoint | None) -> str:
    if checkpoint is None:
        return "there is no other complete checkpoint beside it"
    iteration, path = checkpoint.iteration, checkpoint.path
    return f"the newest other checkpoint beside it is that of iteration {iteration}: trainer.resume={path}"
