"""Where the time of an iteration goes: a torch profiler trace, and a table of its phases by kind of work."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from mrlhf.config_sections import OutputConfig
from mrlhf.trainer.report import PHASE_PREFIX

KINDS: dict[str, tuple[str, ...]] = {
    "attention": ("scaled_dot_product", "flash_attn", "fused_attn", "flash_attention"),
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::matmul", "gemm", "mkldnn"),
    "collectives": ("gloo:", "nccl:", "c10d::", "record_param_comms"),
}
"""Kinds of work, by what the names of their operators contain; the rest of the operators is ``other operators``."""
OTHER, OUTSIDE = "other operators", "outside operators"
"""``outside operators`` is a phase's time without any: Python, waiting for other ranks, files, reward functions."""


@dataclass(frozen=True)
class PhaseTime:
    """One phase of an iteration; all times in seconds, the kinds by operator time of all threads together.

    Attributes:
        phase: its name.
        seconds: from begin to end.
        kinds: kind of work -> seconds; on CUDA seconds of its kernels.
    """

    phase: str
    seconds: float
    kinds: dict[str, float]


def kind_of(name: str) -> str:
    """The kind of work of an operator, by its name."""
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), OTHER)


def phase_times(events: Iterable[Any]) -> list[PhaseTime]:
    """The phases among the profiler's events with the operators that began within them, in order of time.

    Args:
        events: ``torch.autograd.profiler_util.FunctionEvent``; times in microseconds.
    """
    everything = list(events)
    host = [event for event in everything if event.device_type == torch.autograd.DeviceType.CPU]
    phases = sorted((e for e in host if e.name.startswith(PHASE_PREFIX)), key=lambda e: e.time_range.start)
    on_device = any(event.self_device_time_total for event in host)
    work = [(e.time_range.start, e) for e in host if not e.name.startswith((PHASE_PREFIX, "ProfilerStep"))]
    times = []
    for phase in phases:
        begin, end = phase.time_range.start, phase.time_range.end
        kinds: dict[str, float] = defaultdict(float)
        for start, event in work:
            if begin <= start < end:
                spent = event.self_device_time_total if on_device else event.self_cpu_time_total
                kinds[kind_of(event.name)] += spent / 1e6
        seconds = (end - begin) / 1e6
        kinds[OUTSIDE] = max(seconds - sum(kinds.values()), 0.0)
        times.append(PhaseTime(phase.name.removeprefix(PHASE_PREFIX), seconds, dict(kinds)))
    return times


def phase_table(times: Collection[PhaseTime], title: str) -> str:
    """A Markdown table, a line for each phase: seconds, and the share of each kind of work."""
    columns = [*KINDS, OTHER, OUTSIDE]
    table = Table("phase", "seconds", *columns, box=MARKDOWN, title=title, title_justify="left")
    for time in times:
        shares = (f"{100 * time.kinds.get(kind, 0.0) / max(time.seconds, 1e-9):.0f}%" for kind in columns)
        table.add_row(time.phase, f"{time.seconds:.3f}", *shares)
    console = Console(width=140, file=None, record=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip()


class Profiler:
    """Profiles the iterations that `trainer.profile` names, on the ranks of `trainer.profile_ranks`."""

    def __init__(self, settings: OutputConfig, folder: Path, rank: int, message: Callable[[str], None]) -> None:
        """Nothing is written yet.

        Args:
            settings: with the numbers of the iterations (from 1) and ranks.
            folder: for the files, made when there is something to write.
            rank: this one.
            message: shows a text.
        """
        self.iterations = frozenset(settings.profile) if rank in settings.profile_ranks else frozenset()
        self.folder, self.rank, self.message = folder, rank, message

    @contextmanager
    def iteration(self, number: int) -> Iterator[None]:
        """Profile what runs inside, if iteration ``number`` (from 1) is one of those asked for."""
        if number not in self.iterations:
            yield
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as recorded:
            yield
        self._write(recorded, number)

    def _write(self, recorded: Any, number: int) -> None:
        name = f"iteration-{number:06d}-rank{self.rank}"
        times = phase_times(recorded.events())
        table = phase_table(times, f"iteration {number}, rank {self.rank}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(self.folder / f"{name}.trace.json.gz"))
            phases = {"iteration": number, "rank": self.rank, "phases": [asdict(time) for time in times]}
            (self.folder / f"{name}.json").write_text(json.dumps(phases, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            # A full disk is no reason to lose the run.
            self.message(f"{table}\nwarning: the profile could not be written: {error}")
            return
        self.message(f"{table}\nfor https://ui.perfetto.dev: {self.folder / name}.trace.json.gz")


def unreached(settings: OutputConfig, first: int, iterations: int, world_size: int) -> list[str]:
    """Warnings that name the iterations of `trainer.profile`, and the ranks, that this run does not have.

    Args:
        settings: of the run.
        first: iterations that were done before.
        iterations: of the whole run.
        world_size: number of ranks.
    """
    if not settings.profile:
        return []
    found = []
    if missing := [number for number in settings.profile if not first < number <= iterations]:
        named = ", ".join(map(str, missing))
        found.append(f"trainer.profile: no iteration {named} here, where iterations {first + 1} to {iterations} run")
    if absent := [rank for rank in settings.profile_ranks if rank >= world_size]:
        named = ", ".join(map(str, absent))
        found.append(f"trainer.profile_ranks: no rank {named} here, the last one is {world_size - 1}")
    return [f"warning: {text}" for text in found]
