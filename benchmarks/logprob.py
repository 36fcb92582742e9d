"""Hidden states to log-probs and entropy: time and peak memory next to what others use for it.

    python benchmarks/logprob.py [--vocab 32768 131072 262144] [--tokens 2048] [--hidden 256] [--peers .venv-peers]

Variants: ours (`mrlhf.parallel.tiled_head.fused_logprobs`), ``log_softmax`` + ``gather``, ``F.cross_entropy`` (no
entropy), the bare matrix product as the floor, and, where an environment with them is given (`make peers`), TRL's
chunked function and ``cut-cross-entropy`` with ``impl="torch_compile"`` (no entropy). Forward alone, then forward and
backward; memory is the rise of the peak resident set in a process of its own.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import ROOT, Report, Worker, alternate, compare, finish, parser, peak_mebibytes, serve
from mrlhf.parallel.allocator import keep_freed_memory

OURS, FLOOR = "ours", "matrix product"
LOCAL = (OURS, "log_softmax + gather", "cross_entropy", FLOOR)
PEERS = ("TRL chunked", "cut-cross-entropy")
NO_ENTROPY = ("cross_entropy", "cut-cross-entropy", FLOOR)


def variant(name: str) -> Callable[..., Any]:
    """``(hidden, weight, targets, with_entropy)`` to log-probs, or log-probs and entropy."""
    import torch

    if name == OURS:
        from mrlhf.parallel.tiled_head import fused_logprobs

        return lambda h, w, t, e: fused_logprobs(h, w, t, group=None, vocab_size=w.shape[0], with_entropy=e)
    if name == "log_softmax + gather":

        def naive(h: Any, w: Any, t: Any, entropy: bool) -> Any:
            """The textbook's two lines."""
            table = torch.log_softmax((h @ w.t()).float(), dim=-1)
            logprobs = table.gather(1, t[:, None]).squeeze(1)
            return logprobs, -(table.exp() * table).sum(1) if entropy else None

        return naive
    if name == "cross_entropy":
        return lambda h, w, t, e: (-torch.nn.functional.cross_entropy(h @ w.t(), t, reduction="none"), None)
    if name == FLOOR:
        return lambda h, w, t, e: ((h @ w.t())[:, 0], None)
    if name == "TRL chunked":
        from trl.trainer.utils import _ChunkedLogProbFunction

        return lambda h, w, t, e: _ChunkedLogProbFunction.apply(h, w, t, 1.0, 8192)
    from cut_cross_entropy import linear_cross_entropy

    return lambda h, w, t, e: (-linear_cross_entropy(h, w, t, reduction="none", impl="torch_compile"), None)


class Case:
    """Inputs of one size, and runs of a variant on them."""

    def __init__(self, tokens: int, hidden: int, vocab: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(tokens, hidden, generator=generator).requires_grad_()
        self.weight = (torch.randn(vocab, hidden, generator=generator) * hidden**-0.5).requires_grad_()
        self.targets = torch.randint(0, vocab, (tokens,), generator=generator)

    def run(self, name: str, backward: bool) -> float:
        """Seconds of one run."""
        import torch

        call = variant(name)
        self.hidden.grad = self.weight.grad = None
        begin = time.perf_counter()
        with torch.set_grad_enabled(backward):
            logprobs, entropy = call(self.hidden, self.weight, self.targets, name not in NO_ENTROPY)
        if backward:
            # Only ours has the entropy's own gradient; TRL's is left out of its backward pass.
            loss = logprobs.mean() if entropy is None else logprobs.mean() + 0.01 * entropy.mean()
            loss.backward()
        return time.perf_counter() - begin

    def memory(self, name: str, backward: bool) -> float:
        """MiB beyond inputs and their gradients; the first run of a variant in this process."""
        import torch

        gradients = [torch.ones_like(self.hidden), torch.ones_like(self.weight)] if backward else []
        before = peak_mebibytes()
        del gradients
        self.run(name, backward)
        return peak_mebibytes() - before


def handler(settled: bool) -> Callable[..., dict[str, Any]]:
    """Answers requests of the parent process; the inputs of the last size are kept. ``settled``: as in our runs."""
    kept: dict[tuple[int, int, int], Case] = {}
    if settled:
        # As every run of ours on a CPU; for the bare product too, which would spend half its time on fresh pages.
        keep_freed_memory()

    def handle(name: str, size: list[int], backward: bool, what: str) -> dict[str, Any]:
        key = (size[0], size[1], size[2])
        if key not in kept:
            kept.clear()
            kept[key] = Case(*key)
        if what == "memory":
            Case(64, key[1], 512).run(name, backward)
        return {"figure": getattr(kept[key], what)(name, backward)}

    return handle


def main() -> None:
    """Measure all sizes."""
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=2048)
    options.add_argument("--hidden", type=int, default=256)
    options.add_argument("--vocab", type=int, nargs="+", default=[32_768, 131_072, 262_144])
    options.add_argument("--peers", type=Path, default=ROOT / ".venv-peers", help="environment with TRL and the like")
    options.add_argument("--serve", nargs="?", const="", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.serve is not None:
        serve(handler(arguments.serve in (OURS, FLOOR)))
        return
    report = Report("logprob")
    peers = arguments.peers / "bin" / "python"
    names = [*LOCAL, *(PEERS if peers.exists() else ())]
    for vocab in arguments.vocab:
        size = [arguments.tokens, arguments.hidden, vocab]
        measure_times(report, names, size, peers, arguments.repeats)
        measure_memory(report, size)
    finish(report, arguments.json)


def measure_times(report: Report, names: list[str], size: list[int], peers: Path, repeats: int) -> None:
    """Forward, and forward with backward, all variants by turns."""
    workers = {name: start(name, peers) for name in names}
    case = f"N {size[0]}, h {size[1]}, V {size[2]}"
    targets = {
        False: {"TRL chunked": 1.5, "log_softmax + gather": 3.0, FLOOR: 1 / 1.6},
        True: {"cut-cross-entropy": 1.0},
    }
    for backward in (False, True):

        def ask(name: str, backward: bool = backward) -> Callable[[], float]:
            return lambda: workers[name].ask(name=name, size=size, backward=backward, what="run")["figure"]

        figures = alternate({name: ask(name) for name in names}, repeats=repeats)
        for name in names:
            if name != OURS:
                direction = "forward + backward" if backward else "forward"
                target = targets[backward].get(name)
                note = "without entropy" if name in NO_ENTROPY else ""
                report.add(compare(f"{case}, {direction}", figures, OURS, name, target=target, note=note))
    for worker in workers.values():
        worker.close()


def measure_memory(report: Report, size: list[int]) -> None:
    """Peak memory of forward and backward, each variant in a fresh process."""
    figures = {}
    for name in (OURS, "log_softmax + gather"):
        worker = start(name, Path())
        figures[name] = [max(worker.ask(name=name, size=size, backward=True, what="memory")["figure"], 0.1)]
        worker.close()
    case = f"N {size[0]}, h {size[1]}, V {size[2]}, forward + backward"
    report.add(compare(case, figures, OURS, "log_softmax + gather", figure="memory", target=20))


def start(name: str, peers: Path) -> Worker:
    """The process of a variant."""
    python = str(peers) if name in PEERS else sys.executable
    return Worker([python, __file__, "--serve", name], PYTHONPATH=str(ROOT))


if __name__ == "__main__":
    main()
