"""Log-probs of a vocabulary split over two ranks (gloo): ours, Megatron-Core's cross entropy, and gathered logits.

    python benchmarks/vocab_parallel.py [--tokens 16 256 2048] [--vocab 32768]

Forward and backward on the same logits. The number of collectives of one run is counted and shown.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import ROOT, Ranks, Report, alternate, compare, finish, parser, serve

OURS = "ours"
NAMES = (OURS, "Megatron-Core", "Megatron-Core fused", "gathered logits")
# What any of them has to do: a softmax, a pass for the gradient and one message. It gives no log-probs.
FLOOR = "softmax, gradient's pass, one all-gather"
TARGETS = {16: 3.0, 2048: 1.4}


def variant(name: str) -> Callable[[Any, Any], Any]:
    """``(logits of this rank [n, V/2], targets [n])`` to log-probs ``[n]``."""
    import torch
    import torch.distributed as dist

    group = dist.group.WORLD
    if name == OURS:
        from mrlhf.parallel.vocab import vocab_parallel_logprobs

        return lambda x, t: vocab_parallel_logprobs(x, t, group, vocab_size=2 * x.shape[1])[0]
    if name == FLOOR:

        class Floor(torch.autograd.Function):
            """The least work with this much traffic."""

            @staticmethod
            def forward(ctx: Any, x: Any) -> Any:
                """[n, V/2] to [n]."""
                ctx.kept = x.softmax(dim=-1)
                dist.all_gather_into_tensor(x.new_empty(6, x.shape[0]), x.new_empty(3, x.shape[0]))
                return ctx.kept[:, 0]

            @staticmethod
            def backward(ctx: Any, grad: Any) -> Any:
                """[n] to [n, V/2]."""
                return ctx.kept.mul_(grad.unsqueeze(1))

        return lambda x, t: Floor.apply(x)
    if name == "gathered logits":

        class Gather(torch.autograd.Function):
            """All columns on every rank; the gradient of this rank's ones."""

            @staticmethod
            def forward(ctx: Any, x: Any) -> Any:
                """[n, V/2] to [n, V]."""
                parts = [torch.empty_like(x) for _ in range(2)]
                dist.all_gather(parts, x)
                return torch.cat(parts, dim=1)

            @staticmethod
            def backward(ctx: Any, grad: Any) -> Any:
                """The own half."""
                return grad.chunk(2, dim=1)[dist.get_rank()].contiguous()

        return lambda x, t: Gather.apply(x).log_softmax(dim=-1).gather(1, t[:, None]).squeeze(1)
    if name == "Megatron-Core fused":
        from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

        return lambda x, t: -fused_vocab_parallel_cross_entropy(x.unsqueeze(1), t.unsqueeze(1), group).squeeze(1)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    return lambda x, t: -vocab_parallel_cross_entropy(x, t)


class Logits:
    """This rank's columns of one size, the same for every variant."""

    def __init__(self, tokens: int, vocab: int) -> None:
        import torch
        import torch.distributed as dist

        generator = torch.Generator().manual_seed(0)
        whole = torch.randn(tokens, vocab, generator=generator)
        self.logits = whole.chunk(2, dim=1)[dist.get_rank()].contiguous()
        self.targets = torch.randint(0, vocab, (tokens,), generator=generator)
        self.expected = whole.log_softmax(1).gather(1, self.targets[:, None]).squeeze(1)

    def run(self, name: str) -> float:
        """Seconds of forward and backward, ranks begun together."""
        import torch
        import torch.distributed as dist

        call = variant(name)
        # Megatron-Core writes into its input.
        logits = self.logits.clone().requires_grad_()
        dist.barrier()
        begin = time.perf_counter()
        logprobs = call(logits, self.targets)
        logprobs.sum().backward()
        seconds = time.perf_counter() - begin
        if name == FLOOR:
            return seconds
        torch.testing.assert_close(logprobs.detach(), self.expected, rtol=1e-4, atol=1e-4)
        return seconds

    def collectives(self, name: str) -> int:
        """How many one run takes, the barrier before it left out."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            self.run(name)
        names = [event.name for event in recorded.events() if event.name.startswith("c10d::")]
        return sum("barrier" not in each for each in names)


def handler() -> Callable[..., dict[str, Any]]:
    """Answers requests on one rank."""
    import torch.distributed as dist

    from mrlhf.parallel.allocator import keep_freed_memory

    keep_freed_memory()  # as in any run of ours on CPU; the peers run in the same processes and have it too
    dist.init_process_group("gloo")
    kept: dict[tuple[int, int], Logits] = {}

    def handle(name: str, tokens: int, vocab: int, what: str) -> dict[str, Any]:
        size = (tokens, vocab)
        if size not in kept:
            kept.clear()
            kept[size] = Logits(*size)
        return {"figure": getattr(kept[size], what)(name)}

    return handle


def main() -> None:
    """Measure all sizes."""
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, nargs="+", default=[16, 256, 2048])
    options.add_argument("--vocab", type=int, default=32_768)
    options.add_argument("--serve", action="store_true", help="be a rank (used by this program itself)")
    arguments = options.parse_args()
    if arguments.serve:
        serve(handler())
        return
    ranks = Ranks([sys.executable, __file__, "--serve"], 2, PYTHONPATH=str(ROOT), PYTHONWARNINGS="ignore")
    report = Report("vocab_parallel")
    for tokens in arguments.tokens:

        def ask(name: str, what: str, tokens: int = tokens) -> float:
            return max(a["figure"] for a in ranks.ask(name=name, tokens=tokens, vocab=arguments.vocab, what=what))

        counts = {name: int(ask(name, "collectives")) for name in NAMES}
        if counts[OURS] != 1:
            raise SystemExit(f"{counts[OURS]} collectives for the log-probs of a batch, not 1")
        figures = alternate(
            {name: lambda name=name: ask(name, "run") for name in (*NAMES, FLOOR)},
            repeats=3 * arguments.repeats,
            warmup=3,
        )
        for name in NAMES[1:]:
            note = f"collectives: 1, {counts[name]}"
            target = TARGETS.get(tokens) if name.startswith("Megatron") else None
            case = f"TP2, {tokens} tokens, V {arguments.vocab}"
            report.add(compare(case, figures, OURS, name, target=target, note=note))
        report.add(compare(f"TP2, {tokens} tokens, V {arguments.vocab}", figures, OURS, FLOOR))
    ranks.close()
    finish(report, arguments.json)


if __name__ == "__main__":
    main()
