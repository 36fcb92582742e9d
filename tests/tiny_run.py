"""A tiny PPO run: models, prompts, configuration, and the trainer on the ranks of a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mrlhf.config import load_config
from mrlhf.config_schema import PPOConfig
from mrlhf.trainer.critic_part import CriticTrainer
from mrlhf.trainer.ppo import PPOTrainer, build_trainer

SIZES: dict[str, Any] = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden_size": 64}
VOLATILE = ("time_", "tokens_per_second", "memory")


def letters(prompts: list[str], responses: list[str], **meta: Any) -> list[float]:
    """Share of vowels, plus what the line's ``bonus`` says."""
    bonus = meta.get("bonus", [0.0] * len(responses))
    return [sum(c in "aeiou" for c in r) / max(len(r), 1) + (b or 0.0) for r, b in zip(responses, bonus, strict=True)]


def make_inputs(folder: Path, **model: Any) -> Path:
    """Write ``actor/``, ``reward/`` and ``prompts.jsonl``."""
    from tools.make_tiny_model import make_tiny_model

    make_tiny_model(folder / "actor", seed=0, **{**SIZES, **model})
    make_tiny_model(folder / "reward", seed=1, classifier=True, **{**SIZES, **model})
    words = ["the sea", "a small bird", "rain", "old trees in the wind", "tea", "a robot who reads", "mud", "one day"]
    with (folder / "prompts.jsonl").open("w") as file:
        for index, text in enumerate(words):
            line = {"prompt": text} if index == 3 else {"prompt": text, "bonus": index / 10}
            file.write(json.dumps(line) + "\n")
    return folder


def make_config(inputs: Path, output: Path, *overrides: str) -> PPOConfig:
    """Two iterations of 8 prompts, 2 passes in minibatches of 4."""
    base = {
        "seed": 11,
        "actor.path": inputs / "actor",
        "reward.sources": (
            f"[{{kind: model, path: '{inputs / 'reward'}', weight: 0.5}}, "
            "{kind: function, target: 'tests.tiny_run:letters', weight: 2.0}]"
        ),
        "data.prompts": inputs / "prompts.jsonl",
        "data.max_prompt_length": 32,
        "rollout.prompts_per_iteration": 8,
        "rollout.max_response_length": 6,
        "rollout.batch_size": 8,
        "rollout.stop_token_ids": "[5, 9, 20, 31]",
        "ppo.epochs": 2,
        "ppo.minibatch_size": 4,
        "ppo.micro_batch_size": 2,
        "ppo.log_entropy": "true",
        "optimizer.actor.lr": 2e-3,
        "optimizer.critic.lr": 2e-3,
        "trainer.iterations": 2,
        "trainer.output_dir": output,
        "trainer.overwrite": "true",
        "trainer.sample_interval": 1,
        "trainer.progress": "off",
        "trainer.tensorboard": "false",
        "trainer.export": "false",
    }
    return load_config(None, [*(f"{key}={value}" for key, value in base.items()), *overrides])


def train(config: PPOConfig) -> PPOTrainer | CriticTrainer:
    """All of a run but leaving the process group, which belongs to the test."""
    trainer = build_trainer(config)
    trainer.train()
    if config.trainer.export:
        trainer.export()
    return trainer


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def steady(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without those that measure the machine."""
    return [{k: v for k, v in row.items() if not any(word in k for word in VOLATILE)} for row in rows]
