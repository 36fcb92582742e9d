"""What the benchmarks share: alternating measurement, ratios with their spread, and the table they end in.

Machines are noisy and their clocks wander, so a time alone says little. Variants run by turns in one process (or in
worker processes that are asked by turns, `Worker`), each round gives one ratio, and the median of the rounds is
quoted with its quartiles.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REPEATS = 7
LEAST_REPEATS, BUDGET_SECONDS = 3, 420.0
"""A comparison that has taken so long ends after fewer rounds: one whose peer needs minutes for each."""


@dataclass(frozen=True)
class Comparison:
    """One line of the table: a figure of the peer over the same figure of ours, from rounds that ran by turns.

    Attributes:
        case: sizes and settings, in words.
        figure: what is compared, ``time`` or ``memory``.
        ours: name and median of our variant (seconds or MiB).
        peer: of what it is compared with.
        ratio: median over the rounds of peer / ours; above 1 we are ahead.
        low: lower quartile of the rounds' ratios.
        high: upper quartile.
        rounds: how many there were.
        target: what the ratio should reach, or None.
        note: anything a reader must know.
    """

    case: str
    figure: str
    ours: tuple[str, float]
    peer: tuple[str, float]
    ratio: float
    low: float
    high: float
    rounds: int
    target: float | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None without one."""
        return None if self.target is None else self.ratio >= self.target


@dataclass
class Report:
    """What one benchmark found."""

    name: str
    rows: list[Comparison] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=lambda: machine())

    def add(self, row: Comparison) -> None:
        """Keep a line, and show it at once."""
        self.rows.append(row)
        print(f"{self.name}: {_line(row)}", flush=True)

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        rows = [asdict(row) | {"met": row.met} for row in self.rows]
        return {"benchmark": self.name, "machine": self.machine, "rows": rows}


def alternate(
    variants: Mapping[str, Callable[[], float | None]],
    *,
    repeats: int = REPEATS,
    warmup: int = 1,
    budget: float = BUDGET_SECONDS,
) -> dict[str, list[float]]:
    """Run the variants by turns, in an order that changes from round to round.

    Args:
        variants: name -> one run; its result is taken as the figure (seconds that a worker measured, bytes), and where
            it is None, the wall time.
        repeats: rounds that count.
        warmup: rounds before them that do not.
        budget: seconds after which `LEAST_REPEATS` rounds are enough.

    Returns:
        Name -> one figure for each round.
    """
    figures: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    start = time.perf_counter()
    for turn in range(warmup + repeats):
        if turn >= warmup + LEAST_REPEATS and time.perf_counter() - start > budget:
            break
        for name in names if turn % 2 == 0 else reversed(names):
            begin = time.perf_counter()
            figure = variants[name]()
            seconds = time.perf_counter() - begin
            if turn >= warmup:
                figures[name].append(seconds if figure is None else figure)
    return figures


def compare(
    case: str,
    figures: Mapping[str, Sequence[float]],
    ours: str,
    peer: str,
    *,
    figure: str = "time",
    target: float | None = None,
    note: str = "",
) -> Comparison:
    """The line for two of the variants that `alternate` ran."""
    ratios = [b / a for a, b in zip(figures[ours], figures[peer], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else [ratios[0]] * 3
    return Comparison(
        case=case,
        figure=figure,
        ours=(ours, statistics.median(figures[ours])),
        peer=(peer, statistics.median(figures[peer])),
        ratio=statistics.median(ratios),
        low=low,
        high=high,
        rounds=len(ratios),
        target=target,
        note=note,
    )


def machine() -> dict[str, Any]:
    """Processor, cores, threads and the versions of what matters."""
    import torch

    versions = {}
    for package in ("torch", "megatron-core", "transformers", "trl", "cut-cross-entropy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": versions,
    }


def peak_mebibytes() -> float:
    """Peak resident memory of this process so far."""
    return _status("VmHWM")


def resident_mebibytes() -> float:
    """Resident memory of this process now."""
    return _status("VmRSS")


def _status(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


class Worker:
    """A process that runs one variant when asked: a peer in its own environment, or ranks of ours.

    It speaks a line of JSON for every request, on its standard output; anything else it prints there is passed over.
    """

    def __init__(self, command: Sequence[str], **environment: str) -> None:
        """Start ``command`` with extra variables of the environment."""
        self.command = list(command)
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        """One request and its answer. Raises `RuntimeError` when the process has ended."""
        self.send(**request)
        return self.receive()

    def send(self, **request: Any) -> None:
        """A request whose answer is fetched later: ranks of one job must all have it before any can answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """The answer to the last request. Raises `RuntimeError` when the process has ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith('{"answer"'):
                answer: dict[str, Any] = json.loads(line)["answer"]
                return answer
        raise RuntimeError(f"{' '.join(self.command)} ended with status {self.process.wait()}")

    def close(self) -> None:
        """End the process."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait(timeout=60)


class Ranks:
    """The worker processes of one distributed job on this machine."""

    def __init__(self, command: Sequence[str], world_size: int, **environment: str) -> None:
        """Start ``world_size`` of ``command`` with the variables that torchrun would set."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self.workers = [
            Worker(command, **shared, RANK=str(rank), LOCAL_RANK=str(rank), **environment) for rank in range(world_size)
        ]

    def ask(self, **request: Any) -> list[dict[str, Any]]:
        """One request to all ranks, and their answers."""
        for worker in self.workers:
            worker.send(**request)
        return [worker.receive() for worker in self.workers]

    def close(self) -> None:
        """End the job."""
        for worker in self.workers:
            worker.close()


def serve(handler: Callable[..., dict[str, Any]]) -> None:
    """The other side of `Worker`: answer every line of standard input until it ends."""
    for line in sys.stdin:
        print(json.dumps({"answer": handler(**json.loads(line))}), flush=True)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Options that every benchmark has."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--repeats", type=int, default=REPEATS, help="rounds that count (default %(default)s)")
    made.add_argument("--json", type=Path, help="write the figures to this file too")
    return made


def finish(report: Report, path: Path | None) -> None:
    """Print the table and write the file."""
    print(markdown([report]))
    if path is not None:
        path.write_text(json.dumps(report.as_json(), indent=1) + "\n")


def markdown(reports: Sequence[Report]) -> str:
    """The tables of some benchmarks, with the machine above them."""
    about = reports[0].machine
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    lines = [
        f"{about['processor']} ({about['instructions']}), {about['cores']} cores, {about['threads']} threads, "
        f"Python {about['python']}, {versions}.",
        "Ratios are the peer's figure over ours, medians of rounds that ran by turns, with their quartiles.",
        "",
        "| benchmark | case | ours | peer | peer / ours | target |",
        "|---|---|---|---|---|---|",
    ]
    for report in reports:
        lines += [f"| {report.name} | {_cells(row)} |" for row in report.rows]
    return "\n".join(lines)


def _cells(row: Comparison) -> str:
    unit = _memory if row.figure == "memory" else _time
    target = "" if row.target is None else f"{row.target:g} {'met' if row.met else 'missed'}"
    ratio = f"{row.ratio:.2f} ({row.low:.2f} to {row.high:.2f})" if row.rounds > 1 else f"{row.ratio:.2f}"
    ratio += f", {row.rounds} rounds" if 1 < row.rounds < REPEATS else ""
    case = f"{row.case}{', ' + row.figure if row.figure != 'time' else ''}{' (' + row.note + ')' if row.note else ''}"
    return " | ".join([case, *(f"{name} {unit(value)}" for name, value in (row.ours, row.peer)), ratio, target])


def _line(row: Comparison) -> str:
    return _cells(row).replace(" | ", "; ")


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def _memory(mebibytes: float) -> str:
    return f"{mebibytes:.1f} MiB"
