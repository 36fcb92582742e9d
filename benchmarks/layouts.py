"""Training steps of one job (8 micro-batches) in one process with two threads, and as DP2, TP2 and PP2 with one each.

    python benchmarks/layouts.py [--rows 16] [--length 128]

The same rows, weights and number of optimizer steps everywhere; what is compared is rows per second.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import ROOT, Ranks, Report, alternate, compare, finish, parser, serve
from mrlhf.parallel.allocator import keep_freed_memory

SIZES: dict[str, dict[str, int]] = {
    "one process": {},
    "DP2": {},
    "TP2": {"tensor_model_parallel_size": 2},
    "PP2": {"pipeline_model_parallel_size": 2},
}
TARGETS = {"DP2": 0.95, "TP2": 0.8, "PP2": 0.75}
MICRO_BATCHES = 8


def trained(layout: str, rows: int, length: int) -> Callable[[], dict[str, float]]:
    """Joins the other ranks; each call makes one optimizer step and tells its seconds and loss."""
    import torch
    import torch.distributed as dist

    warnings.filterwarnings("ignore")
    keep_freed_memory()  # as in any run of ours on CPU
    dist.init_process_group("gloo")

    from benchmarks.models import build_trained, make_rows
    from mrlhf.parallel.layout import data_parallel_slice
    from mrlhf.planner import ParallelSizes
    from mrlhf.roles.language_model import learned_request, nll_loss
    from mrlhf.roles.micro_batches import by_rows

    model = build_trained(ParallelSizes(world_size=dist.get_world_size(), **SIZES[layout]), vocab=8192, length=length)
    batch = make_rows([length - 1] * rows, vocab=8192)
    dp = model.groups.dp
    mine = batch.select(list(range(rows))[data_parallel_slice(rows, dp.rank(), dp.size())])
    # As many micro-batches in the whole job, and as large ones, under every layout.
    plan = by_rows(mine.size, rows // MICRO_BATCHES)
    assert batch.response_mask is not None
    count = float(batch.response_mask.sum())

    def step() -> dict[str, float]:
        dist.barrier()
        begin = time.perf_counter()
        update = model.update(mine, plan, nll_loss, count, learned_request)
        dist.barrier()
        loss = torch.tensor([float(update.metrics["loss"].value) if model.counts_metrics else 0.0])
        seconds = time.perf_counter() - begin
        dist.all_reduce(loss)
        return {"seconds": seconds, "loss": loss.item() / count}

    return step


def main() -> None:
    """Measure, after a look at whether all layouts have the same loss."""
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=16)
    options.add_argument("--length", type=int, default=128)
    options.add_argument("--serve", choices=list(SIZES), help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.serve:
        serve(trained(arguments.serve, arguments.rows, arguments.length))
        return
    sizes = ["--rows", str(arguments.rows), "--length", str(arguments.length)]
    jobs = {}
    for name in SIZES:
        world, threads = (1, "2") if name == "one process" else (2, "1")
        command = [sys.executable, __file__, "--serve", name, *sizes]
        jobs[name] = Ranks(command, world, OMP_NUM_THREADS=threads, PYTHONPATH=str(ROOT))
    losses: dict[str, list[float]] = {name: [] for name in SIZES}

    def turn(name: str) -> float:
        answers: list[dict[str, Any]] = jobs[name].ask()
        losses[name].append(answers[0]["loss"])
        return max(answer["seconds"] for answer in answers)

    figures = alternate({name: lambda name=name: turn(name) for name in SIZES}, repeats=arguments.repeats)
    for name, found in losses.items():
        if any(abs(a - b) > 1e-3 * abs(b) for a, b in zip(found, losses["one process"], strict=True)):
            raise SystemExit(f"{name} trains on something else: losses {found}, one process {losses['one process']}")
    report = Report("layouts")
    for name, target in TARGETS.items():
        case = f"L4 h256 V8192, {arguments.rows} rows of {arguments.length}, {MICRO_BATCHES} micro-batches"
        report.add(compare(case, figures, name, "one process", target=target, note="2 x 1 thread next to 1 x 2"))
    for job in jobs.values():
        job.close()
    finish(report, arguments.json)


if __name__ == "__main__":
    main()
