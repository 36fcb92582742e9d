"""Memory and time of the fused log-prob head next to ``log_softmax`` + ``gather``, forward and backward.

    python benchmarks/logprob_head.py [--skip-naive] [--tokens 8192] [--hidden 512] [--vocab 128256]

Each variant runs in a process of its own. The extra memory is the rise of the peak resident set (``VmHWM``) over what
inputs, weight and already allocated gradients of both take. The naive variant needs about 12 GB at the default sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time


def peak_megabytes() -> float:
    """Peak resident memory of this process, MiB."""
    try:
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith("VmHWM"):
                    return int(line.split()[1]) / 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(variant: str, tokens: int, hidden_size: int, vocab: int, entropy: bool) -> dict[str, float]:
    """Run one variant once in this process, after a small warm-up that loads the libraries' code and pools."""
    import torch

    from mrlhf.parallel.tiled_head import fused_logprobs

    def run(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if variant == "fused":
            logprobs, value = fused_logprobs(
                hidden, weight, targets, group=None, vocab_size=weight.shape[0], with_entropy=entropy
            )
        else:
            table = torch.log_softmax((hidden @ weight.t()).float(), dim=-1)
            logprobs = table.gather(1, targets[:, None]).squeeze(1)
            value = -(table.exp() * table).sum(1) if entropy else None
        loss = -logprobs.mean() if value is None else -logprobs.mean() - 0.01 * value.mean()
        loss.backward()
        return logprobs.detach()

    def inputs(n: int, v: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(n, hidden_size, generator=generator).requires_grad_()
        weight = (torch.randn(v, hidden_size, generator=generator) * hidden_size**-0.5).requires_grad_()
        return hidden, weight, torch.randint(0, v, (n,), generator=generator)

    run(*inputs(64, 256))
    hidden, weight, targets = inputs(tokens, vocab)
    gradients = [torch.ones_like(hidden), torch.ones_like(weight)]  # resident, as the real ones will be
    before = peak_megabytes()
    del gradients
    begin = time.perf_counter()
    logprobs = run(hidden, weight, targets)
    seconds = time.perf_counter() - begin
    assert hidden.grad is not None
    assert weight.grad is not None
    return {
        "extra_megabytes": peak_megabytes() - before,
        "seconds": seconds,
        "mean_logprob": logprobs.mean().item(),
        "weight_gradient_norm": weight.grad.norm().item(),
    }


def main() -> None:
    """Parse the command line, run the variants, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--entropy", action="store_true")
    parser.add_argument("--skip-naive", action="store_true")
    parser.add_argument("--variant", choices=["fused", "naive"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.variant:
        figures = measure(arguments.variant, arguments.tokens, arguments.hidden, arguments.vocab, arguments.entropy)
        print(json.dumps(figures))
        return
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    results = {}
    for variant in ["fused"] if arguments.skip_naive else ["fused", "naive"]:
        command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant]
        output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        results[variant] = json.loads(output.splitlines()[-1])
        print(
            f"{variant:6} extra peak {results[variant]['extra_megabytes']:9.1f} MiB   "
            f"{results[variant]['seconds']:7.2f} s   mean log-prob {results[variant]['mean_logprob']:.6f}   "
            f"weight gradient norm {results[variant]['weight_gradient_norm']:.6e}",
            flush=True,
        )
    if "naive" in results:
        for name in ("extra_megabytes", "seconds"):
            print(f"naive / fused, {name}: {results['naive'][name] / max(results['fused'][name], 1e-9):.2f}")


if __name__ == "__main__":
    main()
