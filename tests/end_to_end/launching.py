"""Starts a tiny run the way a launcher or a user would, several processes or nodes at once, and ends what is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil

from tests.end_to_end.jobs import ROOT, TinyJob

SCRIPT = ROOT / "examples" / "run_ppo_70b.sh"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
# What a test session may itself have been started with.
_FOREIGN = ("SLURM_", "OMPI_", "PMI", "PET_", "TORCHELASTIC_", "MASTER_", "NNODES", "NODE_RANK", "NPROC_PER_NODE")
_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment without anything of a launcher, plus ``extra``; this Python comes first on PATH."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN) and k not in _RANK}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    return {**kept, "PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), **extra}


def free_port() -> int:
    """A TCP port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def layout(*, tp: int = 1, pp: int = 1) -> list[str]:
    """Overrides of the tiny job: the layout, and one short iteration."""
    sizes = [f"parallel.tensor_model_parallel_size={tp}", f"parallel.pipeline_model_parallel_size={pp}"]
    return [*sizes, "trainer.iterations=1", "trainer.progress=plain", "trainer.resume=never", "trainer.export=false"]


def of_70b(job: TinyJob) -> list[str]:
    """Overrides of ``examples/configs/ppo_70b.yaml`` itself: tiny models, and lengths and batches that they can do.

    What the example asks for stays: TP with sequence parallelism, PP, bf16, the distributed optimizer. FP8 is emulated.
    """
    return [
        f"actor.path={job.actor}",
        f"reward.sources=[{{kind: model, path: '{job.reward}'}}]",
        f"data.prompts={job.prompts}",
        "parallel.tensor_model_parallel_size=2",
        "parallel.pipeline_model_parallel_size=2",
        "data.max_prompt_length=48",
        "rollout.prompts_per_iteration=8",
        "rollout.max_response_length=8",
        "ppo.minibatch_size=8",
        "precision.fp8_emulation=true",
        "optimizer.actor.warmup_iterations=0",
        "optimizer.critic.warmup_iterations=0",
        "trainer.iterations=1",
        "trainer.export=false",
        "checkpoint.interval=0",
    ]


class Processes:
    """Commands that run beside each other; as a context manager none outlives the test."""

    def __init__(
        self,
        commands: Sequence[Sequence[str | Path]],
        environments: Sequence[Mapping[str, str]],
        *,
        cwd: Path = ROOT,
    ) -> None:
        """Start ``commands``, each in its environment and with a process group of its own."""
        self._folder = tempfile.TemporaryDirectory()
        self.cwd = cwd
        self.processes: list[subprocess.Popen[bytes]] = []
        for command, environment in zip(commands, environments, strict=True):
            self.start(command, environment)

    def start(self, command: Sequence[str | Path], environment: Mapping[str, str]) -> None:
        """One more."""
        with self._file(len(self.processes)).open("ab") as file:
            process = subprocess.Popen(
                [str(part) for part in command],
                env=dict(environment),
                cwd=self.cwd,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)

    def _file(self, index: int) -> Path:
        return Path(self._folder.name) / str(index)

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for index in range(len(self.processes)):
            self.kill(index)
        if error is not None:
            error.add_note("\n".join(f"--- {index}:\n{text}" for index, text in enumerate(self.outputs())))
        self._folder.cleanup()

    def outputs(self) -> list[str]:
        """What each has said so far."""
        return [self._file(index).read_text(errors="replace") for index in range(len(self.processes))]

    def wait(self, timeout: float) -> list[int]:
        """Exit statuses, in order."""
        end = time.monotonic() + timeout
        return [process.wait(max(end - time.monotonic(), 0.1)) for process in self.processes]

    def kill(self, index: int) -> None:
        """SIGKILL one of them and all that it has started, as when its node loses power."""
        process = self.processes[index]
        try:
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for member in family:
            with suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)
        process.wait(30)

    @staticmethod
    def signal(pid: int, name: str) -> None:
        """Send it to one process."""
        os.kill(pid, signal.Signals[name])

    def wait_for(self, index: int, text: str, timeout: float) -> None:
        """Until one of them has said ``text``."""
        end = time.monotonic() + timeout
        while text not in self.outputs()[index]:
            if self.processes[index].poll() is not None or time.monotonic() > end:
                raise AssertionError(f"process {index} never said {text!r}")
            time.sleep(0.1)


def run(command: Sequence[str | Path], environment: Mapping[str, str], timeout: float = 240.0) -> tuple[int, str]:
    """Exit status and output of one command."""
    with Processes([command], [environment]) as processes:
        (status,) = processes.wait(timeout)
        return status, processes.outputs()[0]
