"""JSON lines files that grow while a run goes on."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class LineFile:
    """Objects appended to a file, each on disk as soon as it is written.

    A full disk must not end a run: what could not be written is kept, and comes first the next time.
    """

    def __init__(self, path: Path) -> None:
        """Nothing is opened yet.

        Args:
            path: of the file, in a folder that exists by the first `write`.
        """
        self.path = path
        self.pending = b""
        """What is not on disk."""

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append one line for each of ``rows``, which JSON can hold (no NaN)."""
        whole = not self.pending
        self.pending += "".join(json.dumps(row, allow_nan=False, ensure_ascii=False) + "\n" for row in rows).encode()
        try:
            # Unbuffered, so that it is known how much of the last line is there.
            with self.path.open("ab", buffering=0) as file:
                while self.pending:
                    self.pending = self.pending[file.write(self.pending) :]
        except OSError as error:
            if whole:
                warnings.warn(f"{self.path}: {error.strerror}; the lines are kept and tried again", stacklevel=2)


def cut_lines(path: Path, key: str, end: int) -> None:
    """Keep the lines of a JSON lines file whose ``key`` is below ``end``; one that a dying process cut off goes too."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and row.get(key, end) < end:
            kept.append(line)
    part = path.with_name(f"{path.name}.tmp")
    part.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    part.replace(path)
