"""Time of training on packed rows next to padded ones, where lengths differ much.

    python benchmarks/packing.py [--rows 64] [--longest 512] [--micro-batch-size 16] [--repeats 3]

Lengths are skewed as those of chats are: most rows are short, a few are long (log-normal, cut at ``--longest``). Both
variants take the same rows in the same micro-batches and give the same loss; the ratio of their times is printed,
beside the ratio of the tokens that they compute.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

VOCABULARY = 4096


def main() -> None:
    """Parse the command line, time both variants by turns, print the ratio."""
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--micro-batch-size", type=int, default=16)
    parser.add_argument("--shape", default="small", choices=["small", "135M"])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    store = Path(tempfile.mkdtemp(prefix="mrlhf-packing-")) / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)

    from benchmarks.models import build_trained, make_rows
    from mrlhf.planner import ParallelSizes
    from mrlhf.roles.micro_batches import by_rows

    model = build_trained(ParallelSizes(), vocab=VOCABULARY, length=arguments.longest, shape=arguments.shape)
    batch = make_rows(skewed_lengths(arguments.rows, arguments.longest), vocab=VOCABULARY)
    plan = by_rows(batch.size, arguments.micro_batch_size)
    padded_tokens = sum(len(rows) * (int(batch.lengths[rows].max()) + 1) for rows in plan)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    losses: dict[bool, float] = {}
    for repeat in range(arguments.repeats + 1):
        for packed in (False, True):
            begin = time.perf_counter()
            losses[packed] = run(model, batch, plan, packed)
            if repeat:  # the first round warms up
                seconds[packed].append(time.perf_counter() - begin)
    best = {packed: min(times) for packed, times in seconds.items()}
    print(f"{batch.size} rows of {int(batch.lengths.min())} to {int(batch.lengths.max())} tokens, {len(plan)} passes")
    for packed, tokens in ((False, padded_tokens), (True, int(batch.lengths.sum()))):
        name = "packed" if packed else "padded"
        print(f"{name}  {tokens:7d} tokens computed  {best[packed]:7.2f} s  loss {losses[packed]:.6f}")
    print(
        f"padded / packed: tokens {padded_tokens / int(batch.lengths.sum()):.2f}, time {best[False] / best[True]:.2f}"
    )
    dist.destroy_process_group()


def skewed_lengths(rows: int, longest: int) -> list[int]:
    """Log-normal, as those of chats are."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = (torch.randn(rows, generator=generator) + 4).exp().round().clamp(2, longest).long().tolist()
    return lengths


def run(model, batch, plan, packed: bool) -> float:  # noqa: ANN001
    """One forward and backward pass over all rows; the loss."""
    from mrlhf.trainer.sft import learned_request, nll_loss

    count = float(batch.response_mask.sum())
    gradients = model.gradients(batch, plan, nll_loss, count, learned_request, packed=packed)
    return float(gradients.metrics["loss"].result())


if __name__ == "__main__":
    main()
