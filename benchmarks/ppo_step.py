"""A whole PPO iteration (rollout, inference, 1 and 4 epochs) next to TRL's `PPOTrainer`: time, and memory above models.

    make peers && python benchmarks/ppo_step.py [--cells "8k fp32" "32k fp32"] [--peers .venv-peers] [--threads 2]

The same four models, prompts, responses (of full length), minibatches and numbers of updates on both sides, which run
by turns. Memory is the peak resident set less that of the imported libraries and less the bytes of the four models.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import (
    ROOT,
    Report,
    Worker,
    alternate,
    compare,
    finish,
    parser,
    peak_mebibytes,
    resident_mebibytes,
    serve,
)
from benchmarks.ppo_job import SIZES, Size, make_job

OURS, TRL = "mrlhf", "TRL"
TARGETS = {"8k fp32": 2.0, "32k fp32": 3.0, "8k bf16": 3.0}


def ours(folder: Path, size: Size, epochs: int) -> Callable[..., dict[str, float]]:
    """One iteration of ours per request."""
    import torch._dynamo  # noqa: F401  torch's optimizers do

    from mrlhf.config import load_config
    from mrlhf.config_schema import PPOConfig
    from mrlhf.data.tokenizer import load_tokenizer
    from mrlhf.megatron import device
    from mrlhf.progress import open_display
    from mrlhf.trainer import ppo

    # Libraries that a run imports when it first needs them; TRL's side has imported all of its own by now too.
    with contextlib.redirect_stdout(sys.stderr):
        device.install()
        load_tokenizer(str(folder / "actor"))
    base = resident_mebibytes()
    # Everything the libraries print goes elsewhere than the answers.
    with contextlib.redirect_stdout(sys.stderr):
        trainer = ppo.build_trainer(load_config(None, overrides(folder, size, epochs), PPOConfig))
    models = [trainer.actor, trainer.reference, *(model for model, _ in trainer.scorer.models)]
    models += [trainer.critic] if trainer.critic is not None else []
    chunks = [chunk for model in models for chunk in model.chunks]
    weights = sum(p.numel() * p.element_size() for chunk in chunks for p in chunk.parameters()) / 2**20
    display = open_display("off", 1, rank=1)
    iteration = 0

    def handle() -> dict[str, float]:
        nonlocal iteration
        begin = time.perf_counter()
        metrics = trainer.iterate(iteration, display)
        seconds = time.perf_counter() - begin
        assert metrics["actor_updates"] == epochs * size.rows // size.minibatch
        iteration += 1
        phases = {name: value for name, value in metrics.items() if name.startswith("time_")}
        return {"seconds": seconds, "memory": peak_mebibytes() - base - weights, **phases}

    return handle


def overrides(folder: Path, size: Size, epochs: int) -> list[str]:
    """The same job as TRL's."""
    values: dict[str, Any] = {
        "actor.path": folder / "actor",
        "reward.sources": f"[{{kind: model, path: '{folder / 'reward'}'}}]",
        "data.prompts": folder / "prompts.jsonl",
        "data.max_prompt_length": 512 if size.smollm2 else size.prompt,
        "rollout.prompts_per_iteration": size.rows,
        "rollout.batch_size": size.rows,
        "rollout.max_response_length": size.response,
        "inference.micro_batch_size": size.minibatch,
        "ppo.epochs": epochs,
        "ppo.minibatch_size": size.minibatch,
        "ppo.micro_batch_size": size.minibatch,
        "ppo.whiten_advantages": "true",
        "ppo.log_entropy": "true",
        "optimizer.actor.lr": 1e-5,
        "optimizer.critic.lr": 1e-5,
        "precision.dtype": size.dtype,
        "trainer.iterations": 10_000,
        "trainer.output_dir": folder / "ours",
        "trainer.tensorboard": "false",
        "trainer.progress": '"off"',
    }
    return [f"{key}={value}" for key, value in values.items()]


def main() -> None:
    """Measure all cells."""
    options = parser(__doc__)
    options.add_argument("--cells", nargs="+", default=list(SIZES), choices=list(SIZES))
    options.add_argument("--epochs", type=int, nargs="+", default=[1, 4], help="of the first cell; the others take 1")
    options.add_argument("--threads", type=int, default=2, help="of either side (default %(default)s)")
    options.add_argument("--peers", type=Path, default=ROOT / ".venv-peers", help="environment with TRL")
    options.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.serve:
        folder, name, epochs = arguments.serve
        serve(ours(Path(folder), SIZES[name], int(epochs)))
        return
    peer = arguments.peers / "bin" / "python"
    if not peer.exists():
        raise SystemExit(f"no environment with TRL in {arguments.peers}: make peers")
    report = Report("ppo_step")
    for cell in arguments.cells:
        with tempfile.TemporaryDirectory(prefix="mrlhf-ppo-step-") as folder:
            make_job(Path(folder), SIZES[cell])
            for epochs in arguments.epochs if cell == arguments.cells[0] else arguments.epochs[:1]:
                measure(report, Path(folder), cell, epochs, arguments, str(peer))
    finish(report, arguments.json)


def measure(report: Report, folder: Path, cell: str, epochs: int, arguments: argparse.Namespace, peer: str) -> None:
    """One cell with one number of epochs."""
    common = {"OMP_NUM_THREADS": str(arguments.threads), "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    script = Path(__file__)
    workers = {
        OURS: Worker([sys.executable, str(script), "--serve", str(folder), cell, str(epochs)], **common),
        TRL: Worker([peer, str(script.with_name("ppo_step_trl.py")), str(folder), cell, str(epochs)], **common),
    }
    memory: dict[str, list[float]] = {name: [] for name in workers}

    def turn(name: str) -> float:
        answer = workers[name].ask()
        memory[name] = [answer["memory"]]
        return answer["seconds"]

    figures = alternate({name: lambda name=name: turn(name) for name in workers}, repeats=arguments.repeats)
    case = f"{cell}, {epochs} epoch{'s' if epochs > 1 else ''}"
    report.add(compare(case, figures, OURS, TRL, target=TARGETS.get(cell) if epochs == 1 else None))
    report.add(compare(case, memory, OURS, TRL, figure="memory", target=2.0 if cell == "32k fp32" else None))
    for worker in workers.values():
        worker.close()


if __name__ == "__main__":
    main()
