"""A tiny run of supervised fine-tuning: model, texts, configuration, and the trainer on the ranks of a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mrlhf.config import load_config
from mrlhf.config_supervised import SFTConfig
from mrlhf.data.sft import SFTExample
from mrlhf.trainer.sft import build_trainer
from mrlhf.trainer.supervised import SupervisedTrainer

SIZES: dict[str, Any] = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden_size": 64}
LINES = [
    ("the sea", " is wide and blue"),
    ("a bird", " sings"),
    ("what is rain", " water that falls out of clouds, on everyone alike"),
    ("old", " trees stand"),
    ("in the morning the baker", " opens the shop"),
    ("tea", " is hot"),
    ("mud", " sticks to every boot that walks through it after the rain"),
    ("one day", " a"),
    ("stars", " are far away"),
    ("a robot who reads", " books all night"),
    ("bread", " and butter"),
]


def make_inputs(folder: Path, **model: Any) -> Path:
    """Write ``model/``, ``train.jsonl`` (11 lines of very different length) and ``held_out.jsonl`` (5 lines)."""
    from tools.make_tiny_model import make_tiny_model

    make_tiny_model(folder / "model", seed=0, **{**SIZES, **model})
    for name, lines in (("train", LINES), ("held_out", LINES[::2][:5])):
        rows = [json.dumps({"prompt": prompt, "response": response}) for prompt, response in lines]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def make_config(inputs: Path, output: Path, *overrides: str) -> SFTConfig:
    """Five steps of 4 examples in micro-batches of 2, validated after 2, 4 and 5 steps."""
    base = {
        "seed": 7,
        "model.path": inputs / "model",
        "data.train": inputs / "train.jsonl",
        "data.validation": inputs / "held_out.jsonl",
        "train.batch_size": 4,
        "train.micro_batch_size": 2,
        "optimizer.lr": 3e-3,
        "optimizer.weight_decay": 0.1,
        "optimizer.lr_schedule": "cosine",
        "optimizer.warmup_iterations": 2,
        "trainer.iterations": 5,
        "trainer.eval_interval": 2,
        "trainer.output_dir": output,
        "trainer.overwrite": "true",
        "trainer.progress": "off",
        "trainer.tensorboard": "false",
        "trainer.export": "false",
    }
    return load_config(None, [*(f"{key}={value}" for key, value in base.items()), *overrides], SFTConfig)


def train(config: SFTConfig) -> SupervisedTrainer[SFTExample]:
    """All of a run but leaving the process group, which belongs to the test."""
    trainer = build_trainer(config)
    trainer.train()
    if config.trainer.export:
        trainer.export()
    return trainer
