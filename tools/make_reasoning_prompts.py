#!/usr/bin/env python
"""Write prompts with answers that can be checked, from a task of ``reasoning-gym``.

pip install "mrlhf[reasoning]"
python tools/make_reasoning_prompts.py --task chain_sum --count 200 --seed 0 --output prompts.jsonl max_terms=3

Each line has the question and what the scorer needs; ``{kind: function, target: "examples.rewards:verified_answer"}``
scores responses to them. Settings of the task follow as key=value.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


def make_reasoning_prompts(
    task: str,
    count: int,
    seed: int,
    output: str | Path,
    *,
    chat: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``count`` lines ``{"prompt", "answer", "metadata"}``; the same arguments give the same file.

    Args:
        task: name of a reasoning-gym dataset.
        count: number of lines.
        seed: of the questions.
        output: JSONL file to write.
        chat: prompts are a user's chat message instead of text.
        settings: of the task, such as ``{"max_terms": 3}``.

    Raises:
        ValueError: no such task, a setting it refuses, or a task whose metadata cannot be kept in JSON.
    """
    import reasoning_gym

    try:
        dataset = reasoning_gym.create_dataset(task, size=count, seed=seed, **(settings or {}))
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"reasoning-gym refuses the task {task!r}: {error}") from error
    lines = []
    for entry in dataset:
        question = entry["question"]
        prompt = [{"role": "user", "content": question}] if chat else question
        line = {"prompt": prompt, "answer": entry["answer"], "metadata": entry["metadata"]}
        try:
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
        except TypeError as error:
            raise ValueError(f"the task {task!r} cannot be kept in a file: {error}") from error
    file = Path(output)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(lines), encoding="utf-8")
    return file


def main() -> None:
    """Parse the command line and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True, help="name of the dataset, such as chain_sum")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--chat", action="store_true", help="write chat messages instead of text")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of the task")
    arguments = parser.parse_args()
    pairs = [setting.partition("=") for setting in arguments.settings]
    settings = {key: yaml.safe_load(value) for key, _, value in pairs}
    try:
        file = make_reasoning_prompts(
            arguments.task,
            arguments.count,
            arguments.seed,
            arguments.output,
            chat=arguments.chat,
            settings=settings,
        )
    except (ValueError, ImportError) as error:
        raise SystemExit(f"error: {error}") from None
    print(f"{file}: {arguments.count} prompts of {arguments.task}")


if __name__ == "__main__":
    main()
