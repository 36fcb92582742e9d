"""Stopping between two iterations when someone asks for it: a signal, a file, or the time that is left.

A run that stops so saves first, exits with `mrlhf.parallel.launch.STOPPED` (75) and goes on when started again.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol

import psutil
import torch
import torch.distributed as dist

from mrlhf.parallel.collectives import all_gather_objects, group_device
from mrlhf.parallel.heartbeat import Heartbeat
from mrlhf.parallel.launch import is_peer_failure, shutdown, stopped_status

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers send some time before they kill a job; Slurm's ``--signal`` names one and the time."""
STOP_FILE = "stop"
REPEAT_SECONDS = 10.0
_TIME, _FILE, _USR1, _TERM = 1, 2, 3, 4


class StopRequest:
    """Notices requests to stop, and makes all ranks come to the same answer.

    As a context manager it takes over SIGTERM and SIGUSR1: the first one is a request, and one that comes later than
    `REPEAT_SECONDS` does what it did before (it ends the process), so that whoever cannot wait need not. Earlier ones
    are the same request: Slurm signals every process of a step, and torchrun passes on to its ranks what it gets.
    """

    def __init__(
        self, folder: Path, *, time_limit_minutes: float | None = None, group: dist.ProcessGroup | None = None
    ) -> None:
        """Nothing is installed yet.

        Args:
            folder: of the run, for the file ``stop``; rank 0 looks for it.
            time_limit_minutes: of this process, see `process_seconds`; None: no limit.
            group: of all ranks; by default the world.
        """
        self.stop_file = folder / STOP_FILE
        self.limit = None if time_limit_minutes is None else 60.0 * time_limit_minutes
        self.group = group
        self._signal, self._since = 0, 0.0
        self._before: dict[int, Any] = {}
        self._iteration = self._save = 0.0

    def __enter__(self) -> StopRequest:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        if self._signal == _TERM and error is not None and is_peer_failure(error):
            # It was no request: the launcher ends the ranks that are left when one has failed, and that one said why.
            os.kill(os.getpid(), signal.SIGTERM)

    def saved(self, seconds: float) -> None:
        """Say how long a save took; the longest one must still fit into the time limit."""
        self._save = max(self._save, seconds)

    def check(self, seconds: float) -> str | None:
        """Why to stop now, the same on every rank; None to go on. Every rank calls this once after each iteration.

        Args:
            seconds: that the iteration took, with everything that belongs to one (evaluation, a save).

        Returns:
            The reason, for a message. A stop file has been removed then.
        """
        self._iteration = max(self._iteration, seconds)
        found = max(self._signal, self._of_file(), self._of_time())
        answer = torch.tensor(found, dtype=torch.int64, device=group_device(self.group))
        dist.all_reduce(answer, dist.ReduceOp.MAX, group=self.group)
        reason = int(answer)
        if reason and dist.get_rank() == 0:
            # It was honoured, or something else was: the next start must not stop at once.
            self.stop_file.unlink(missing_ok=True)
        if reason == _TIME:
            assert self.limit is not None
            return f"the next iteration might not end within trainer.time_limit, {self.limit / 60:g} minutes"
        return {_FILE: f"{self.stop_file} was there", _USR1: "SIGUSR1", _TERM: "SIGTERM"}.get(reason)

    def _of_file(self) -> int:
        return _FILE if dist.get_rank() == 0 and self.stop_file.exists() else 0

    def _of_time(self) -> int:
        if self.limit is None:
            return 0
        # Before the first save nobody knows how long one takes.
        needed = self._iteration + (self._save or self._iteration)
        return _TIME if process_seconds() + needed > self.limit else 0

    def _take(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signal and now - self._since > REPEAT_SECONDS:
            signal.signal(number, self._before[number])
            os.kill(os.getpid(), number)
            return
        if not self._signal:
            self._since = now
        self._signal = max(self._signal, _TERM if number == signal.SIGTERM else _USR1)


def open_heartbeat(folder: Path, timeout_minutes: float) -> Heartbeat:
    """This rank's heartbeat in the output folder of its run; all ranks call this together."""
    attempt = all_gather_objects(uuid.uuid4().hex[:8])[0]
    rank, size = dist.get_rank(), dist.get_world_size()
    return Heartbeat(folder / "heartbeat", rank, size, timeout_seconds=60.0 * timeout_minutes, attempt=attempt)


class Stoppable(Protocol):
    """A trainer whose loop looks at a `StopRequest`.

    Attributes:
        stopped: the reason for which `train` ended early and saved, else None.
    """

    stopped: str | None

    def train(self) -> None:
        """All iterations, or those up to a request to stop."""

    def export(self) -> None:
        """Write the trained models."""


def run_to_end(trainer: Stoppable, *, export: bool) -> int:
    """Train, export unless stopped early, and leave the process group; returns the exit status of this process."""
    trainer.train()
    if export and trainer.stopped is None:
        trainer.export()
    dist.barrier()
    shutdown()
    return stopped_status(os.environ) if trainer.stopped is not None else 0


def process_seconds() -> float:
    """Seconds since this process started, imports and the loading of models included.

    Under torchrun since its agent started: ranks that it starts again have no more time than those before them.
    """
    process = psutil.Process()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        process = process.parent() or process
    return time.time() - process.create_time()
