"""Advantage estimation by a blocked scan next to the usual loop over time: 64 responses of 1,024 tokens.

python benchmarks/gae.py [--rows 64] [--width 1024]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.measure import Report, alternate, compare, finish, parser
from mrlhf.parallel.allocator import keep_freed_memory
from mrlhf.rl.advantages import gae


def loop(rewards: torch.Tensor, values: torch.Tensor, gamma: float, gae_lambda: float) -> torch.Tensor:
    """DeepSpeed-Chat's and TRL's way: one step of Python for each position, backwards."""
    last, reversed_advantages = torch.zeros(rewards.shape[0]), []
    for t in reversed(range(rewards.shape[1])):
        next_value = values[:, t + 1] if t < rewards.shape[1] - 1 else 0.0
        last = rewards[:, t] + gamma * next_value - values[:, t] + gamma * gae_lambda * last
        reversed_advantages.append(last)
    return torch.stack(reversed_advantages[::-1], dim=1)


def main() -> None:
    """Measure, after a check that both give the same numbers."""
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=64)
    options.add_argument("--width", type=int, default=1024)
    arguments = options.parse_args()
    keep_freed_memory()  # as in any run of ours on CPU; the loop's small blocks are not concerned
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(arguments.rows, arguments.width, generator=generator) for _ in range(2))
    mask = torch.ones_like(rewards, dtype=torch.bool)

    def blocked() -> torch.Tensor:
        return gae(rewards, values, mask, gamma=1.0, gae_lambda=0.95)[0]

    torch.testing.assert_close(blocked(), loop(rewards, values, 1.0, 0.95), rtol=1e-4, atol=1e-4)
    variants = {
        "blocked scan": lambda: _times(20, blocked),
        "loop": lambda: _times(2, lambda: loop(rewards, values, 1.0, 0.95)),
    }
    figures = alternate(variants, repeats=arguments.repeats)
    report = Report("gae")
    report.add(compare(f"{arguments.rows} x {arguments.width}", figures, "blocked scan", "loop", target=20))
    finish(report, arguments.json)


def _times(count: int, run) -> float:  # noqa: ANN001
    import time

    begin = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - begin) / count


if __name__ == "__main__":
    main()
