"""A tiny PPO run on ranks that a test can kill, and what it leaves."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from mrlhf.parallel.heartbeat import Beat, read_beats
from tests import ranks, tiny_run

ITERATIONS = 3
PHASES = ("rollout", "inference", "train", "save")
BASE = (
    f"trainer.iterations={ITERATIONS}",
    "trainer.overwrite=false",
    "trainer.resume=auto",
    "checkpoint.interval=1",
    "rollout.prompts_per_iteration=4",
    "ppo.epochs=1",
    "ppo.minibatch_size=2",
    "ppo.micro_batch_size=1",
)


def run(inputs: Path, output: Path, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Train on the ranks of this world; the weights of this rank, and why the run stopped early."""
    trainer = tiny_run.train(tiny_run.make_config(inputs, output, *BASE, *overrides))
    models = {model.name: model.weights_hash() for model in (trainer.actor, trainer.critic) if model is not None}
    return {"weights": models, "first": trainer.checkpoints.first, "stopped": trainer.stopped}


def tables(output: Path) -> dict[str, list[dict[str, Any]]]:
    """What the run wrote, without what measures the machine."""
    files = [output / name for name in ("metrics.jsonl", "samples.jsonl")]
    return {path.name: tiny_run.steady(tiny_run.read_lines(path)) for path in files}


class KillableRun:
    """`run` on some ranks."""

    def __init__(self, world_size: int, inputs: Path, output: Path, overrides: tuple[str, ...]) -> None:
        """Start the ranks."""
        self.output, self.world_size = output, world_size
        self.left: list[psutil.Process] = []
        """Processes that the ranks had started and that outlived them."""
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self.processes = [], []
        store = os.path.join(self._folder.name, "store")
        for rank in range(world_size):
            receiver, sender = ranks._context.Pipe(duplex=False)
            arguments = (rank, world_size, store, run, (inputs, output, overrides), sender)
            process = ranks._context.Process(target=ranks._worker, args=arguments)
            process.start()
            sender.close()
            self._pipes.append(receiver)
            self.processes.append(process)

    def kill(self, rank: int, when: Callable[[Beat], bool], delay: float = 0.0, timeout: float = 120.0) -> Beat | None:
        """SIGKILL one rank some time after its heartbeat is as wanted, then the others, as a launcher does.

        Returns:
            The rank's last heartbeat; None when it had ended by itself.
        """
        deadline = time.monotonic() + timeout
        process = self.processes[rank]
        while time.monotonic() < deadline and process.is_alive():
            beats = {beat.pid: beat for beat in read_beats(self.output / "heartbeat", self.world_size)}
            if process.pid in beats and when(beats[process.pid]):
                break
            time.sleep(0.002)
        time.sleep(delay)
        alive = process.is_alive() and not self._pipes[rank].poll()
        ranks_alive = [psutil.Process(p.pid) for p in self.processes if p.is_alive()]
        helpers = [child for parent in ranks_alive for child in parent.children(recursive=True)]
        for victim in (process, *self.processes):
            if victim.is_alive() and victim.pid is not None:
                os.kill(victim.pid, signal.SIGKILL)
            victim.join()
        # Whoever inherits a dead one may be slow to notice.
        self.left = [helper for helper in psutil.wait_procs(helpers, timeout=10)[1] if not _is_dead(helper)]
        for helper in self.left:
            helper.kill()
        last = {beat.pid: beat for beat in read_beats(self.output / "heartbeat", self.world_size)}
        self._folder.cleanup()
        return last.get(process.pid) if alive else None


def _is_dead(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def complete(world_size: int, inputs: Path, output: Path, *overrides: str) -> list[dict[str, Any]]:
    """The run to its end, or from its checkpoint to its end; results of all ranks."""
    return ranks.run_ranks(run, world_size, inputs, output, overrides)
