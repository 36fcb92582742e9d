"""How much of the work of actor and critic runs at the same time under ``placement: split``, by their time stamps.

    python benchmarks/split_placement.py [--iterations 4] [--hidden 192] [--layers 4] [--rows 16] [--response 48]

The same PPO run is made twice on two ranks of this machine: colocated (two replicas of all models), and with critic and
reward model on the second rank. Of the latter every rank notes, by the machine's clock, when it computes (and does not
wait for the other). Printed are the seconds of both sides in inference and in training, the seconds in which both
computed, their ratio to the shorter side, and the times of an iteration of both placements.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
WARM_UP = 1
PHASES = ("inference", "train")

Span = tuple[str, float, float]


def overlap(one: list[Span], other: list[Span]) -> float:
    """Seconds in which a span of both is under way."""
    return sum(max(min(a[2], b[2]) - max(a[1], b[1]), 0.0) for a in one for b in other)


def main() -> None:
    """Both runs, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("iterations", 4), ("hidden", 192), ("layers", 4), ("rows", 16), ("response", 48)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(Path(arguments.worker))
        return
    with tempfile.TemporaryDirectory(prefix="mrlhf-split-") as temporary:
        folder = Path(temporary)
        write_inputs(folder, arguments)
        found = {placement: run(folder, placement) for placement in ("colocated", "split")}
    show(found)


def write_inputs(folder: Path, arguments: argparse.Namespace) -> None:
    """Models, prompts, and the configuration of both runs but their placement."""
    from tools.make_tiny_model import make_tiny_model

    sizes = {"hidden_size": arguments.hidden, "num_layers": arguments.layers, "ffn_hidden_size": 3 * arguments.hidden}
    make_tiny_model(folder / "actor", seed=1, **sizes)
    make_tiny_model(folder / "reward", seed=2, classifier=True, **sizes)
    words = ("the sea", "a small bird", "rain", "old trees in the wind")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in words))
    values = {
        "actor.path": str(folder / "actor"),
        "reward.sources": f"[{{kind: model, path: '{folder / 'reward'}'}}]",
        "data.prompts": str(folder / "prompts.jsonl"),
        "data.max_prompt_length": 32,
        "rollout.prompts_per_iteration": arguments.rows,
        "rollout.max_response_length": arguments.response,
        "ppo.minibatch_size": arguments.rows // 2,
        "ppo.micro_batch_size": 4,
        "trainer.iterations": arguments.iterations + WARM_UP,
        "trainer.progress": "off",
        "trainer.tensorboard": "false",
        "trainer.export": "false",
    }
    (folder / "overrides.json").write_text(json.dumps([f"{key}={value}" for key, value in values.items()]))


def run(folder: Path, placement: str) -> dict[str, Any]:
    """One run under torchrun; what its rank 0 has written."""
    target = folder / placement
    target.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([*command, "--worker", str(target)], env=environment, stderr=subprocess.PIPE, text=True)
    if ended.returncode:
        raise SystemExit(f"{ended.stderr}\nthe {placement} run has failed")
    found: dict[str, Any] = json.loads((target / "found.json").read_text())
    return found


def work(target: Path) -> None:
    """On a rank: the run, and the spans of both ranks after the first iterations."""
    warnings.filterwarnings("ignore")
    import torch.distributed as dist

    from mrlhf.config import load_config
    from mrlhf.trainer.ppo import build_trainer

    overrides = json.loads((target.parent / "overrides.json").read_text())
    given = [*overrides, f"placement={target.name}", f"trainer.output_dir={target / 'out'}"]
    trainer = build_trainer(load_config(None, given))
    whole, spans = trainer.advance, list[Span]()

    def advance(index: int, display: Any) -> dict[str, float]:
        """An iteration, whose spans are kept."""
        metrics = whole(index, display)
        if index >= WARM_UP and trainer.timer is not None:
            spans.extend(trainer.timer.spans)
        return metrics

    trainer.advance = advance  # type: ignore[method-assign]
    trainer.train()
    every: list[Any] = [None, None]
    dist.all_gather_object(every, spans)
    if dist.get_rank() == 0:
        lines = (target / "out" / "metrics.jsonl").read_text().splitlines()[WARM_UP:]
        (target / "found.json").write_text(json.dumps({"spans": every, "metrics": [json.loads(x) for x in lines]}))
    dist.barrier()
    dist.destroy_process_group()


def show(found: dict[str, dict[str, Any]]) -> None:
    """The table, and the two times of an iteration."""
    actor, critic = found["split"]["spans"]
    count = len(found["split"]["metrics"])
    print(f"seconds an iteration, mean of {count}, on {os.cpu_count()} cores")
    print(f"{'phase':<12}{'actor side':>12}{'critic side':>12}{'both at once':>14}{'of the shorter':>16}")
    for phase in PHASES:
        ours, theirs = ([s for s in side if s[0].endswith(phase)] for side in (actor, critic))
        lengths = [sum(end - begin for _, begin, end in side) / count for side in (ours, theirs)]
        both = overlap(ours, theirs) / count
        print(f"{phase:<12}{lengths[0]:>12.3f}{lengths[1]:>12.3f}{both:>14.3f}{both / min(lengths):>16.1%}")
    begin = min(span[1] for span in actor)
    print("first spans (seconds since the first one):")
    for who, side in (("actor ", actor), ("critic", critic)):
        print(f"  {who}: " + ", ".join(f"{name} {a - begin:.3f}-{b - begin:.3f}" for name, a, b in side[:5]))
    for phase in ("rollout", *PHASES, "iteration"):
        times = [sum(row[f"time_{phase}"] for row in found[p]["metrics"]) / count for p in ("colocated", "split")]
        print(f"{phase:<12}colocated {times[0]:.3f}, split {times[1]:.3f}: ratio {times[0] / times[1]:.2f}")


if __name__ == "__main__":
    main()
