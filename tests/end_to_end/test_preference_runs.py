"""Reward model training and DPO as a user runs them: learning, exports, and what PPO does with the reward model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.end_to_end.jobs import run_command
from tests.preference_run import (
    dpo_config,
    load_classifier,
    load_policy,
    make_inputs,
    read_examples,
    reward_config,
    train,
    write_pairs,
)
from tests.ranks import run_ranks
from tests.tiny_run import read_lines

WORDS = ["sea", "bird", "rain", "tree", "baker", "tea", "mud", "star", "robot", "bread", "wind", "stone"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("runs"))


def learn(inputs: Path, output: Path) -> dict[str, Any]:
    """A reward model of a clear rule, a DPO policy of the same, and what it says afterwards."""
    for name, words in (("rule", WORDS[:8]), ("rule_held_out", WORDS[8:])):
        pairs = [(f"{start} {word}", " yes", " no", 0.0) for word in words for start in ("the", "a")]
        write_pairs(inputs / f"{name}.jsonl", pairs)
    options = (
        f"data.train={inputs / 'rule.jsonl'}",
        f"data.validation={inputs / 'rule_held_out.jsonl'}",
        "data.shuffle=true",
        "train.batch_size=16",
        "train.micro_batch_size=16",
        "trainer.eval_interval=10",
    )
    scorer = (f"model.path={inputs / 'policy'}", "optimizer.lr=5e-3", "trainer.iterations=20", "trainer.export=true")
    train(reward_config(inputs, output / "reward", *options, *scorer))
    train(dpo_config(inputs, output / "dpo", *options, "optimizer.lr=3e-3", "trainer.iterations=20"))
    return {name: read_lines(output / name / "metrics.jsonl") for name in ("reward", "dpo")}


@pytest.fixture(scope="module")
def learned(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    output = tmp_path_factory.mktemp("learned")
    results: dict[str, Any] = run_ranks(learn, 1, inputs, output)[0]
    return output, results


def test_a_clear_rule_is_learned_and_holds_for_unseen_prompts(learned: tuple[Path, dict[str, Any]]) -> None:
    for name, margin in (("reward", "score_margin"), ("dpo", "reward_margin")):
        rows = learned[1][name]
        assert [index for index, row in enumerate(rows) if "validation/accuracy" in row] == [9, 19]
        assert rows[-1]["validation/accuracy"] == 1.0, name
        assert rows[-1]["validation/loss"] < 0.3 < 0.5 < rows[0]["loss"], name
        assert rows[-1][f"validation/{margin}"] > 1.0, name


def test_transformers_gives_the_exported_reward_models_scores(
    inputs: Path, learned: tuple[Path, dict[str, Any]]
) -> None:
    folder = learned[0] / "reward" / "model"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    model = load_classifier(folder)
    assert model.score.weight.shape == (1, 32)
    assert model.score.bias is None
    # Whole rows in a padded batch, as a user of transformers would score them.
    examples = read_examples(inputs, "rule_held_out.jsonl")
    rows = [e.prompt_ids + answer for e in examples for answer in (e.chosen_ids, e.rejected_ids)]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    with torch.no_grad():
        scores = model(input_ids=tokens, attention_mask=(tokens != 0).long()).logits[:, 0]
    last = learned[1]["reward"][-1]
    assert float(scores[::2].mean()) == pytest.approx(last["validation/chosen_score"], rel=1e-5)
    assert float(scores[1::2].mean()) == pytest.approx(last["validation/rejected_score"], rel=1e-5)


def ppo_with(inputs: Path, reward: Path, output: Path) -> tuple[list[dict[str, Any]], Path]:
    from tests.tiny_run import make_config
    from tests.tiny_run import train as train_ppo

    (inputs / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"the {word}"}) + "\n" for word in WORDS[:8]))
    sources = f"reward.sources=[{{kind: model, path: '{reward}'}}]"
    actor = f"actor.path={inputs / 'policy'}"
    train_ppo(make_config(inputs, output, actor, sources, "trainer.iterations=1", "ppo.epochs=1"))
    return read_lines(output / "metrics.jsonl"), output


def test_ppo_takes_the_exported_reward_model_as_reward_and_critic(
    inputs: Path, learned: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    reward = learned[0] / "reward" / "model"
    rows, output = run_ranks(ppo_with, 2, inputs, reward, tmp_path)[0]
    samples = read_lines(output / "samples.jsonl")
    assert len(rows) == 1
    assert samples
    assert all(math.isfinite(sample["score"]) for sample in samples)
    critic = yaml.safe_load((output / "config.yaml").read_text())["critic"]
    assert critic["path"] == str(reward)


def write_yaml(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(values))
    return path


def test_from_the_command_line(inputs: Path, tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "model": {"path": str(inputs / "policy")},
        "data": {"train": str(inputs / "train.jsonl"), "validation_fraction": 0.3},
        "train": {"batch_size": 4, "micro_batch_size": 2},
        "optimizer": {"lr": 1e-3},
        "trainer": {"iterations": 2, "tensorboard": False, "progress": "plain"},
        "launch": {"timeout_minutes": 1.0},
    }
    config = write_yaml(tmp_path / "config.yaml", values)
    out = tmp_path / "reward"
    pipeline = "parallel.pipeline_model_parallel_size=2"
    result = run_command("reward", config, f"trainer.output_dir={out}", "reward.loss=deepspeed_chat",
                         "reward.use_margin=false", pipeline, ranks=2)  # fmt: skip
    assert result.status == 0, result.stderr
    assert "accuracy" in result.stdout + result.stderr
    assert len(read_lines(out / "metrics.jsonl")) == 2
    assert load_classifier(out / "model").config.num_labels == 1
    assert (out / "model" / "tokenizer.json").is_file()

    out = tmp_path / "dpo"
    result = run_command("dpo", config, f"trainer.output_dir={out}", "dpo.loss=ipo")
    assert result.status == 0, result.stderr
    rows = read_lines(out / "metrics.jsonl")
    # Before the first update h is 0: the loss is (1 / (2 beta))^2 = 25.
    assert rows[0]["loss"] == pytest.approx(25.0, rel=1e-6)
    assert {"validation/accuracy", "validation/reward_margin", "validation/loss"} <= rows[-1].keys()
    assert rows[-1]["validation/loss"] != pytest.approx(25.0, rel=1e-6)
    trained, start = load_policy(out / "model"), load_policy(inputs / "policy")
    assert not torch.equal(trained.lm_head.weight, start.lm_head.weight)


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("reward", ("reward.loss=deepspeed_chat",), "data.train: line 1 has a margin"),
        ("reward", ("model.head=loaded",), "is a language model without a value head"),
        ("dpo", ("model.path={scorer}", "tokenizer.path={policy}"), "is a sequence classifier; dpo trains"),
    ],
)
def test_refused_before_training(
    command: str, options: tuple[str, ...], message: str, inputs: Path, tmp_path: Path
) -> None:
    from mrlhf.errors import ConfigError
    from mrlhf.trainer import dpo, reward

    filled = [option.format(scorer=inputs / "scorer", policy=inputs / "policy") for option in options]
    make, build = (reward_config, reward.build_trainer) if command == "reward" else (dpo_config, dpo.build_trainer)
    config: Any = make(inputs, tmp_path, f"model.path={inputs / 'policy'}", *filled)
    with pytest.raises(ConfigError, match=message):
        build(config)
