"""Where each rank is, so that when ranks wait for each other in vain somebody can say for whom.

Each rank writes a small file whenever its phase changes. A time-out is seen by the ranks that wait; they read the files
of all and name the rank that they wait for. gloo's time-outs are Python errors and get the text as a note; NCCL's
end the process from a thread of their own, so rank 0 says it in good time before that.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

# gloo, NCCL's watchdog, the store.
_TIMED_OUT = re.compile(r"timed out|timeout|before timing out|wait timeout after|deadlineexceeded", re.IGNORECASE)


@dataclass(frozen=True)
class Beat:
    """The last thing that a rank has begun."""

    rank: int
    host: str
    pid: int
    iteration: int
    phase: str
    steps: int
    """Phases that the rank has begun so far; ranks begin the same ones in the same order."""
    alone: bool
    """It does something in which no other rank takes part, so it is not waiting for one."""
    since: float
    """Seconds since the epoch."""
    attempt: str = ""
    """Of the job: the files of an earlier one may still be there."""

    def describe(self, now: float) -> str:
        """One line for people."""
        where = f"rank {self.rank} ({self.host}, process {self.pid})"
        return f"{where}: {self.phase}, iteration {self.iteration}, for {now - self.since:.1f} s"


class Heartbeat:
    """The file of this rank, and as a context manager the watch over all of them."""

    def __init__(
        self, folder: Path, rank: int, world_size: int, *, timeout_seconds: float = 3600.0, attempt: str = ""
    ) -> None:
        """Nothing is written yet.

        Args:
            folder: that all ranks see; made where it is missing.
            rank: of this process.
            world_size: number of ranks.
            timeout_seconds: of the collectives.
            attempt: the same on all ranks of this job; files of other ones do not count.
        """
        self.attempt = attempt
        self.folder, self.rank, self.world_size, self.timeout = folder, rank, world_size, timeout_seconds
        self._iteration, self._phase, self._steps = 0, "start", 0
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def iteration(self, iteration: int) -> None:
        """Number of the iteration that the next phases belong to."""
        self._iteration = iteration

    def phase(self, name: str) -> None:
        """This rank begins something that all ranks do together."""
        self._phase, self._steps = name, self._steps + 1
        self._write(name, alone=False)

    @contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """This rank does something by itself, such as calling a user's function."""
        self._write(f"{self._phase}, {what}", alone=True)
        yield
        # Not after an error: the message about it shall still see what went wrong.
        self._write(self._phase, alone=False)

    def __enter__(self) -> Heartbeat:
        self._end.clear()
        self.phase("start")
        if self.rank == 0 and self.world_size > 1:
            self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if error is not None and is_timeout(error):
            error.add_note(self.report())

    def report(self) -> str:
        """Which rank is behind, in which phase, since when; then where every rank is."""
        beats = self._beats()
        now = time.time()
        return "\n".join([_verdict(beats, self.world_size, now), *(f"  {beat.describe(now)}" for beat in beats)])

    def _beats(self) -> list[Beat]:
        return [beat for beat in read_beats(self.folder, self.world_size) if beat.attempt == self.attempt]

    def _write(self, phase: str, *, alone: bool) -> None:
        beat = Beat(
            self.rank,
            socket.gethostname(),
            os.getpid(),
            self._iteration,
            phase,
            self._steps,
            alone,
            time.time(),
            self.attempt,
        )
        # A full disk is the business of whoever has something to save.
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            part = self.folder / f"rank_{self.rank:05d}.tmp"
            part.write_text(json.dumps(asdict(beat)), encoding="utf-8")
            part.replace(part.with_suffix(".json"))

    def _watch(self) -> None:
        """Say once, half-way to the time-out, that nothing moves."""
        told = 0.0
        while not self._end.wait(min(self.timeout / 20, 30.0)):
            newest = max((beat.since for beat in self._beats()), default=time.time())
            if time.time() - newest > self.timeout / 2 and newest != told:
                told = newest
                still = f"no rank has begun anything for {time.time() - newest:.0f} s (launch.timeout_minutes is "
                print(f"{still}{self.timeout / 60:g}): {self.report()}", file=sys.stderr, flush=True)


def read_beats(folder: Path, world_size: int) -> list[Beat]:
    """The last beats of all ranks that have left one."""
    beats = []
    for rank in range(world_size):
        with suppress(OSError, ValueError, TypeError):
            beats.append(Beat(**json.loads((folder / f"rank_{rank:05d}.json").read_text(encoding="utf-8"))))
    return beats


def is_timeout(error: BaseException) -> bool:
    """Whether this rank waited for another one in vain."""
    return isinstance(error, RuntimeError) and bool(_TIMED_OUT.search(str(error)))


def _verdict(beats: list[Beat], world_size: int, now: float) -> str:
    missing = sorted(set(range(world_size)) - {beat.rank for beat in beats})
    if missing:
        return f"ranks {missing} have not come as far as the first phase"
    alone = [beat for beat in beats if beat.alone]
    if alone:
        longest = min(alone, key=lambda beat: beat.since)
        return f"the others wait for {longest.describe(now)}"
    behind = min(beats, key=lambda beat: beat.steps)
    if behind.steps < max(beat.steps for beat in beats):
        return f"the others wait for {behind.describe(now)}"
    return f"all ranks are in the same phase, {behind.phase} of iteration {behind.iteration}"
