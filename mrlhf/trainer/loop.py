"""The loop around every training: resume, iterations, metrics, exports, checkpoints, requests to stop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch.distributed as dist

from mrlhf.config_sections import OutputConfig
from mrlhf.data.prompts import PromptStream
from mrlhf.errors import CheckpointError, RewardError
from mrlhf.parallel.heartbeat import Heartbeat
from mrlhf.progress import Display, open_display
from mrlhf.trainer.checkpointing import Checkpointer
from mrlhf.trainer.job import Job
from mrlhf.trainer.outputs import open_output
from mrlhf.trainer.profile import Profiler, unreached
from mrlhf.trainer.stopping import StopRequest


class Looped(Protocol):
    """A trainer as the loop sees it.

    Attributes:
        job: the world and the configuration.
        heartbeat: of this rank.
        checkpoints: of the run.
        stopped: set to the reason for which the loop ended early, after a save.
    """

    job: Job[Any]
    heartbeat: Heartbeat
    checkpoints: Checkpointer
    stopped: str | None

    def announce(self, display: Display) -> None:
        """Say what is going to be done."""

    def advance(self, index: int, display: Display) -> dict[str, float]:
        """One iteration; its metrics, complete on every rank.

        Raises:
            RewardError: on every rank, and the trainer is as it was before.
        """

    def measure(self, index: int, display: Display) -> dict[str, float]:
        """Metrics of the evaluation that is due after an iteration, if one is. Raises `RewardError` on every rank."""

    def export(self, suffix: str = "") -> None:
        """Write the trained models; all ranks call this together."""

    def summary(self, first: int, begun: Mapping[str, float], last: Mapping[str, float]) -> str:
        """The last word: the number of the first iteration, its metrics and those of the last one (empty: none)."""


@contextmanager
def rewound(stream: PromptStream) -> Iterator[None]:
    """Puts the stream back when the reward fails inside: nothing else has changed when scores are asked for."""
    before = stream.state_dict()
    try:
        yield
    except RewardError:
        stream.load_state_dict(before)
        raise


def run_loop(trainer: Looped, settings: OutputConfig, *, iterations: int, exports: Sequence[str], noun: str) -> None:
    """All iterations, or those up to a request to stop; every rank calls this.

    Args:
        trainer: see `Looped`.
        settings: about the output.
        iterations: of the whole run.
        exports: names of the exported folders.
        noun: what an iteration is called.
    """
    config, checkpoints = trainer.job.config, trainer.checkpoints
    first = checkpoints.resume()
    writers = None
    if dist.get_rank() == 0:
        writers = open_output(
            config, settings, exports, first_step=first, run_id=checkpoints.wandb_id, own=checkpoints.own
        )
        checkpoints.wandb_id = writers.run_id
    begun: dict[str, float] = {}
    metrics: Mapping[str, float] = {}
    with (
        open_display(settings.progress, iterations, rank=dist.get_rank(), first_step=first) as display,
        StopRequest(config.output_dir, time_limit_minutes=settings.time_limit) as stop,
        trainer.heartbeat,
    ):
        checkpoints.message = display.message
        trainer.announce(display)
        profiler = Profiler(settings, config.output_dir / "profile", dist.get_rank(), display.message)
        for warning in unreached(settings, first, iterations, dist.get_world_size()):
            display.message(warning)
        for index in range(first, iterations):
            started, done = time.perf_counter(), index
            try:
                with profiler.iteration(index + 1):
                    metrics = trainer.advance(index, display)
                done = index + 1
                metrics = {**metrics, **trainer.measure(index, display)}
            except RewardError:
                if writers is not None and done > index:
                    writers.write(index, metrics)
                _save_before_end(checkpoints, done, metrics, display, noun)
                raise
            begun = begun or dict(metrics)
            if writers is not None:
                writers.write(index, metrics)
            display.iteration(done, metrics)
            if settings.export_interval and done % settings.export_interval == 0:
                trainer.export(f"-{done:06d}")
            trainer.heartbeat.phase("save")
            checkpoints.after(done, metrics)
            stop.saved(checkpoints.save_seconds)
            reason = stop.check(time.perf_counter() - started)
            if reason is not None and done < iterations:
                checkpoints.stop(done, metrics)
                trainer.stopped = reason
                display.message(f"stopped after {noun} {done}: {reason}")
                break
        checkpoints.finish()
        display.message(trainer.summary(first, begun, metrics))
    if writers is not None:
        writers.close()


def _save_before_end(
    checkpoints: Checkpointer, done: int, metrics: Mapping[str, float], display: Display, noun: str
) -> None:
    """Keep what has been learned when the run cannot go on."""
    if done == 0:
        return
    try:
        checkpoints.stop(done, metrics)
    except CheckpointError as error:
        display.message(f"warning: {error}")
        return
    display.message(f"saved as after {noun} {done}: nothing is lost, trainer.resume=auto goes on from there")
