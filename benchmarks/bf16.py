"""A training step and a pass without gradient in bf16, next to fp32 and to torch's own bf16 products on this processor.

    python benchmarks/bf16.py [--rows 16] [--length 128] [--native]

In processor time of one thread. Where there are instructions for bf16 (AMX, AVX-512 bf16), products are torch's own
anyway, and ``--native`` adds nothing; elsewhere it shows what they would cost, which takes minutes.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from benchmarks.measure import Report, alternate, compare, finish, parser
from benchmarks.models import build_trained, make_rows
from mrlhf.parallel.allocator import keep_freed_memory
from mrlhf.parallel.products import Products, chosen, has_fast_bf16
from mrlhf.planner import ParallelSizes
from mrlhf.roles.language_model import learned_request, nll_loss
from mrlhf.roles.micro_batches import by_rows

VARIANTS: dict[str, tuple[torch.dtype, Products]] = {
    "bf16": (torch.bfloat16, "auto"),
    "fp32": (torch.float32, "auto"),
    "bf16, torch's products": (torch.bfloat16, "native"),
}
VOCAB = 8192


class Job:
    """One model in one number format, on the rows that all of them have."""

    def __init__(self, name: str, rows: int, length: int) -> None:
        self.dtype, self.products = VARIANTS[name]
        with chosen(self.products):
            self.model = build_trained(ParallelSizes(), vocab=VOCAB, length=length, dtype=self.dtype)
        self.batch = make_rows([length - 1] * rows, vocab=VOCAB)
        self.plan = by_rows(rows, max(rows // 2, 1))

    def step(self) -> float:
        """Processor seconds of one optimizer step."""
        assert self.batch.response_mask is not None
        count = float(self.batch.response_mask.sum())
        with chosen(self.products):
            begin = time.process_time()
            self.model.update(self.batch, self.plan, nll_loss, count, learned_request)
            return time.process_time() - begin

    def inference(self) -> float:
        """Processor seconds of the log-probs of all rows."""
        with chosen(self.products):
            begin = time.process_time()
            self.model.per_token(self.batch, self.plan, learned_request)
            return time.process_time() - begin


def main() -> None:
    """Measure by turns."""
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=16)
    options.add_argument("--length", type=int, default=128)
    options.add_argument("--native", action="store_true", help="torch's own products as well")
    arguments = options.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    names = [name for name in VARIANTS if arguments.native or VARIANTS[name][1] == "auto"]
    jobs = {name: Job(name, arguments.rows, arguments.length) for name in names}
    report = Report("bf16")
    note = "torch's own products" if has_fast_bf16() else "bf16 products in fp32"
    for what in ("step", "inference"):
        figures = alternate({name: getattr(job, what) for name, job in jobs.items()}, repeats=arguments.repeats)
        for peer in names[1:]:
            case = f"L4 h256 V{VOCAB}, {arguments.rows} rows of {arguments.length}, {what}"
            report.add(compare(case, figures, "bf16", peer, note=note))
    finish(report, arguments.json)


if __name__ == "__main__":
    main()
