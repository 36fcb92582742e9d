"""A tiny PPO job on disk, and the command line run on it as a user would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

from tools.make_tiny_model import make_tiny_model

ROOT = Path(__file__).parents[2]

REWARDS = '''
"""Reward functions that behave and that do not."""
import os


def vowels(prompts, responses, **meta):
    return [sum(c in "aeiou" for c in r) / max(len(r), 1) for r in responses]


def fails_on_one_replica(prompts, responses, topic, **meta):
    if os.environ.get("RANK") == "1":
        raise RuntimeError("the scoring server said no to rank 1")
    return vowels(prompts, responses)


def fails_everywhere(prompts, responses, **meta):
    raise ValueError("no score today")


def unexpected(prompts, responses, **meta):
    # Not an Exception, so that nothing turns it into one of our messages.
    if os.environ.get("RANK", "1") == "1":
        raise GeneratorExit("unexpected end of the scorer")
    return vowels(prompts, responses)


def vanishes(prompts, responses, **meta):
    if os.environ.get("RANK") == "1":
        os._exit(7)
    return vowels(prompts, responses)


number = 3
'''


@dataclass(frozen=True)
class TinyJob:
    """Folders and files of the job; ``config`` names them absolutely."""

    folder: Path
    config: Path
    actor: Path
    reward: Path
    prompts: Path


@dataclass(frozen=True)
class Run:
    """What a command did."""

    status: int
    stdout: str
    stderr: str
    seconds: float


def write_tiny_job(folder: Path) -> TinyJob:
    """Models with 4 heads, 2 KV heads, 2 layers and 97 ids; 8 prompts, half of them chat messages."""
    size = {"hidden_size": 32, "num_layers": 2, "ffn_hidden_size": 64, "max_position_embeddings": 64}
    actor = make_tiny_model(folder / "actor", seed=1, **size)
    reward = make_tiny_model(folder / "reward", seed=2, classifier=True, **size)
    (folder / "tinyrewards.py").write_text(REWARDS)
    lines = []
    for index in range(8):
        text = f"a question about number {index}"
        prompt = text if index % 2 else [{"role": "user", "content": text}]
        lines.append(json.dumps({"prompt": prompt, "topic": f"t{index}"}))
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(lines) + "\n")
    config = folder / "config.yaml"
    values = {
        "seed": 3,
        "actor": {"path": str(actor)},
        "reward": {"sources": [{"kind": "model", "path": str(reward)}]},
        "data": {"prompts": str(prompts), "max_prompt_length": 48},
        "rollout": {"prompts_per_iteration": 8, "max_response_length": 8, "batch_size": 8},
        "ppo": {"minibatch_size": 4, "micro_batch_size": 2},
        "optimizer": {"actor": {"lr": 1e-3}, "critic": {"lr": 1e-3}},
        "trainer": {
            "iterations": 2,
            "output_dir": str(folder / "out"),
            "overwrite": True,
            "tensorboard": False,
            "sample_interval": 1,
        },
        "launch": {"timeout_minutes": 1.0},
    }
    config.write_text(yaml.safe_dump(values))
    return TinyJob(folder, config, actor, reward, prompts)


def function_reward(target: str) -> str:
    """Override that scores with one Python function."""
    return f"reward.sources=[{{kind: function, target: '{target}'}}]"


def run_command(
    *arguments: str | Path, ranks: int = 1, module: str | Path = "mrlhf", cwd: Path = ROOT, timeout: float = 240.0
) -> Run:
    """Run ``python -m mrlhf`` (or a script), under torchrun where ``ranks`` is over 1.

    A command that outlasts ``timeout`` is ended with all its ranks and fails the test.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    called = [str(module)] if str(module).endswith(".py") else ["-m", str(module)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(cwd), str(ROOT)])
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *launcher, *called, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        raise AssertionError(f"{arguments} did not end within {timeout:.0f} s:\n{stdout}\n{stderr}") from None
    return Run(process.returncode, stdout, stderr, time.monotonic() - start)


def rank_lines(text: str) -> list[str]:
    """Lines of the ranks themselves, without the launcher's log and closing summary."""
    lines = []
    for line in text.splitlines():
        # torchrun's own log begins here: "W1130 12:00:00.1 pid torch/distributed/..." or "E1130 ...".
        if "torch/distributed/" in line and line[:1] in "WEI":
            continue
        if line.startswith("Traceback (most recent call last)"):
            break
        lines.append(line)
    return [line for line in lines if line.strip()]
