"""TRL's side of `ppo_step`, run by the Python of `.venv-peers`: `trl.experimental.ppo.PPOTrainer`, tuned for a CPU.

One forward batch for the whole rollout, no gradient accumulation, no logging, saving or sample tables. An iteration of
`train` ends in the callback, which answers the parent process and waits for its next request.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer

from benchmarks.measure import peak_mebibytes, resident_mebibytes
from benchmarks.ppo_job import SIZES, Size


class Turns(TrainerCallback):
    """Lets one iteration run for each line of standard input."""

    def __init__(self, base: float, weights: float) -> None:
        self.base, self.weights = base, weights
        self.begin = 0.0

    def on_train_begin(self, *arguments: object, **keywords: object) -> None:
        """Wait for the first request."""
        self._wait()

    def on_step_end(self, *arguments: object, **keywords: object) -> None:
        """Answer, and wait for the next."""
        figures = {"seconds": time.perf_counter() - self.begin, "memory": peak_mebibytes() - self.base - self.weights}
        print(json.dumps({"answer": figures}), flush=True)
        self._wait()

    def _wait(self) -> None:
        if not sys.stdin.readline():
            raise SystemExit(0)
        self.begin = time.perf_counter()


def main() -> None:
    """Build the four models and train for as long as there are requests."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("size", choices=sorted(SIZES))
    parser.add_argument("epochs", type=int)
    arguments = parser.parse_args()
    size = SIZES[arguments.size]
    base = resident_mebibytes()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[size.dtype]
    actor, reference = (AutoModelForCausalLM.from_pretrained(arguments.folder / "actor", dtype=dtype) for _ in range(2))
    reward, value = (
        AutoModelForSequenceClassification.from_pretrained(arguments.folder / "reward", dtype=dtype, num_labels=1)
        for _ in range(2)
    )
    models = (actor, reference, reward, value)
    weights = sum(p.numel() * p.element_size() for model in models for p in model.parameters()) / 2**20
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder / "actor", padding_side="left")
    lines = (arguments.folder / "prompts.jsonl").read_text().splitlines()
    ids = [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]
    trainer = PPOTrainer(
        args=settings(size, arguments.folder, arguments.epochs),
        processing_class=tokenizer,
        model=actor,
        ref_model=reference,
        reward_model=reward,
        value_model=value,
        train_dataset=Dataset.from_dict({"input_ids": ids}),
        callbacks=[Turns(base, weights)],
    )
    trainer.train()


def settings(size: Size, folder: Path, epochs: int) -> PPOConfig:
    """As fast as TRL can be made here."""
    return PPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        num_sample_generations=0,
        total_episodes=size.rows * 10_000,
        # The rows of an iteration; a pass takes a minibatch of them.
        per_device_train_batch_size=size.rows,
        gradient_accumulation_steps=1,
        num_mini_batches=size.rows // size.minibatch,
        local_rollout_forward_batch_size=size.rows,
        response_length=size.response,
        num_ppo_epochs=epochs,
        temperature=1.0,
        kl_coef=0.1,
        learning_rate=1e-5,
        gradient_checkpointing=False,
        bf16=False,
    )


if __name__ == "__main__":
    main()
