"""Supervised fine-tuning as a user runs it, and what its export is good for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.end_to_end.jobs import Run, run_command
from tests.sft_run import LINES, make_config, make_inputs
from tests.tiny_run import read_lines

TEMPLATE = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_inputs(tmp_path_factory.mktemp("sft"), num_layers=4)
    # The tokenizer lives elsewhere, as it does where a model starts from nothing.
    (folder / "tokenizer").mkdir()
    for file in (folder / "model").glob("token*"):
        (folder / "tokenizer" / file.name).write_bytes(file.read_bytes())
        file.unlink()
    (folder / "chat.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def run(inputs: Path) -> Run:
    """Two replicas, 30 passes over the packed lines; the whole job is one YAML file."""
    config = {
        "seed": 1,
        "model": {"path": str(inputs / "model")},
        "tokenizer": {"path": str(inputs / "tokenizer"), "chat_template": str(inputs / "chat.jinja")},
        "data": {"train": str(inputs / "train.jsonl"), "validation": str(inputs / "held_out.jsonl")},
        "train": {"batch_size": 4, "micro_batch_tokens": 128, "packing": True},
        "optimizer": {"lr": 1e-2},
        "trainer": {"epochs": 12, "eval_interval": 8, "export_interval": 30, "output_dir": str(inputs / "out")},
        "launch": {"timeout_minutes": 1.0},
    }
    (inputs / "sft.yaml").write_text(yaml.safe_dump(config))
    return run_command("sft", inputs / "sft.yaml", "trainer.progress=plain", ranks=2)


def test_it_trains_and_says_how_well(run: Run, inputs: Path) -> None:
    assert run.status == 0, run.stderr
    rows = read_lines(inputs / "out" / "metrics.jsonl")
    assert len(rows) == 33  # 12 passes over 11 lines in batches of 4
    assert [row["step"] for row in rows if "validation/loss" in row] == [7, 15, 23, 31, 32]
    assert rows[-1]["epoch"] == 12
    assert rows[-1]["validation/loss"] < rows[7]["validation/loss"] < math.log(97) - 1
    best = min((row for row in rows if "validation/loss" in row), key=lambda row: row["validation/loss"])
    assert f"best validation, after {best['step'] + 1} steps: loss {best['validation/loss']:.4f}" in run.stderr
    assert f"last validation, after 33 steps: loss {rows[-1]['validation/loss']:.4f}, perplexity" in run.stderr
    assert "11 training examples, 5 held out; 33 steps" in run.stderr
    assert f"model exported to {inputs / 'out' / 'model'}" in run.stderr
    for name in ("grad_norm", "lr", "tokens_per_second", "peak_memory_gib", "perplexity"):
        assert rows[0][name] > 0, name
    assert (inputs / "out" / "model-000030" / "model.safetensors").is_file()
    assert list((inputs / "out" / "tensorboard").iterdir())


def test_a_second_run_does_not_take_its_place(run: Run, inputs: Path) -> None:
    from mrlhf.config import load_config
    from mrlhf.config_supervised import SFTConfig
    from mrlhf.errors import ConfigError
    from mrlhf.trainer.supervised_inputs import check_supervised_output

    with pytest.raises(ConfigError, match="holds a run already .metrics.jsonl."):
        check_supervised_output(load_config(inputs / "sft.yaml", (), SFTConfig))


def test_transformers_loads_the_export_with_its_tokenizer(run: Run, inputs: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = inputs / "out" / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "[hi]"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total, count = 0.0, 0
    for prompt, response in LINES[::2][:5]:
        start = tokenizer.encode(prompt)
        ids = torch.tensor([start + tokenizer.encode(response) + [tokenizer.eos_token_id]])
        labels = ids.clone()
        labels[:, : len(start)] = -100
        learned = ids.size(1) - len(start)
        total, count = total + model(ids, labels=labels).loss.item() * learned, count + learned
    last = read_lines(inputs / "out" / "metrics.jsonl")[-1]
    assert total / count == pytest.approx(last["validation/loss"], rel=1e-5)


def train_ppo(inputs: Path, output: Path) -> float:
    from tests.tiny_run import make_config as make_ppo_config
    from tests.tiny_run import train as train_ppo_run

    source = "[{kind: function, target: 'tests.tiny_run:letters'}]"
    trainer = train_ppo_run(
        make_ppo_config(
            inputs, output, f"actor.path={inputs / 'out' / 'model'}", f"reward.sources={source}", "trainer.iterations=1"
        )
    )
    return float(trainer.actor.config.vocab_size)


def test_ppo_starts_from_the_export(run: Run, run_ranks: Any, inputs: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": prompt}) for prompt, _ in LINES]
    (inputs / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    assert run_ranks(train_ppo, 1, inputs, tmp_path / "ppo") == [97]
    assert read_lines(tmp_path / "ppo" / "metrics.jsonl")[0]["ratio_error_before_update"] < 1e-5


def validate(inputs: Path, learn_on: str, overrides: tuple[str, ...]) -> dict[str, float]:
    from mrlhf.trainer.sft import build_trainer

    config = make_config(
        inputs, inputs / "unused", f"tokenizer.path={inputs / 'tokenizer'}", f"data.learn_on={learn_on}", *overrides
    )
    return build_trainer(config).evaluate()


# Virtual stages train in pairs of micro-batches; the 5 rows of a validation need not make pairs.
VIRTUAL = (
    "parallel.pipeline_model_parallel_size=2",
    "parallel.virtual_pipeline_model_parallel_size=2",
    "train.micro_batch_tokens=16",
)


@pytest.mark.parametrize(("learn_on", "world", "overrides"), [("response", 1, ()), ("all", 2, VIRTUAL)])
def test_what_is_learned_is_what_counts(
    run_ranks: Any, inputs: Path, learn_on: str, world: int, overrides: tuple[str, ...]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(inputs / "tokenizer")
    model = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32)
    total, count = 0.0, 0
    for prompt, response in LINES[::2][:5]:
        start = tokenizer.encode(prompt)
        ids = torch.tensor([start + tokenizer.encode(response) + [tokenizer.eos_token_id]])
        labels = ids.clone()
        skipped = len(start) if learn_on == "response" else 1
        labels[:, :skipped] = -100
        total += model(ids, labels=labels).loss.item() * (ids.size(1) - skipped)
        count += ids.size(1) - skipped
    for result in run_ranks(validate, world, inputs, learn_on, overrides):
        assert result["loss"] == pytest.approx(total / count, rel=1e-5)
        assert result["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
