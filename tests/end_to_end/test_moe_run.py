"""Whole PPO runs of a mixture-of-experts actor: the same numbers with experts on one rank and shared over ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mrlhf.checkpoint.convert_state import export_state
from tests import sft_run
from tests.distributed.hf_tools import assert_same_tensors, read_tensors
from tests.distributed.moe_tools import write_moe
from tests.end_to_end.test_ppo_run import _assert_same_run
from tests.ranks import run_ranks
from tests.tiny_run import make_config, make_inputs, read_lines, steady, train

EP2 = ("parallel.expert_model_parallel_size=2",)
PP2 = "parallel.pipeline_model_parallel_size=2"
TP2 = ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")
TOKENS = ("ppo.micro_batch_tokens=60", "inference.micro_batch_tokens=70")
BALANCED = ("ppo.ema_decay=0.9", "actor.moe_aux_loss_coef=0.01")
ONE = "ppo.micro_batch_size=1"
METRICS = "metrics.jsonl"
LAYOUTS = {
    # Three prompts at once of four, and micro-batches by tokens: replicas have different numbers of passes.
    "ep2": (2, [*EP2, "optimizer.distributed=true", "rollout.batch_size=3", *TOKENS]),
    "tp2-ep4": (4, [*TP2, "parallel.expert_model_parallel_size=4", "parallel.expert_tensor_parallel_size=1", ONE]),
    "ep2-pp2": (4, [*EP2, PP2, ONE]),
    # Two ranks for the actor and its experts, one for critic and reward model.
    "ep2-split": (3, [*EP2, "placement=split", "critic_ranks=1"]),
    "ep2-recompute": (2, [*EP2, "parallel.recompute=true"]),
}
SLOW = ("tp2-ep4", "ep2-pp2", "ep2-split", "ep2-recompute")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_inputs(tmp_path_factory.mktemp("moe"))
    write_moe(folder / "moe", "qwen3_moe", seed=5, tokenizer=True, initializer_range=0.1)
    return folder


def config(inputs: Path, output: Path, *overrides: str) -> Any:
    """The dense critic and reward model have a layout of their own."""
    sources = (
        f"[{{kind: model, path: '{inputs / 'reward'}', weight: 0.5, parallel: {{}}}}, "
        "{kind: function, target: 'tests.tiny_run:letters', weight: 2.0}]"
    )
    base = [f"actor.path={inputs / 'moe'}", f"reward.sources={sources}", "critic.parallel={}"]
    return make_config(inputs, output, *base, "rollout.max_response_length=9", *overrides)


def run(inputs: Path, output: Path, *overrides: str) -> None:
    train(config(inputs, output, *overrides))


@pytest.fixture(scope="module")
def alone(inputs: Path) -> Path:
    run_ranks(run, 1, inputs, inputs / "alone", "trainer.export=true")
    return inputs / "alone"


@pytest.mark.parametrize("layout", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in LAYOUTS])
def test_the_layout_changes_nothing(inputs: Path, alone: Path, layout: str) -> None:
    world, overrides = LAYOUTS[layout]
    lengths = {row["response_length"] for row in read_lines(alone / "samples.jsonl")}
    assert len(lengths) > 1  # so that one replica ends before the other
    run_ranks(run, world, inputs, inputs / layout, *overrides, "trainer.export=true")
    _assert_same_run(inputs / layout, alone)
    ours, theirs = read_tensors(inputs / layout / "actor"), read_tensors(alone / "actor")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        # Adam moves an entry of a tiny gradient by the sign of its rounding error.
        assert float((ours[name] - tensor).abs().mean()) < 2e-5, name


def run_all(inputs: Path, output: Path, *overrides: str) -> None:
    """Actor, critic, reference and reward model are mixtures of experts; there is one held-out prompt."""
    train(
        make_config(
            inputs,
            output,
            f"actor.path={inputs / 'moe'}",
            f"reward.sources=[{{kind: model, path: '{inputs / 'moe_reward'}'}}]",
            f"evaluation.prompts={inputs / 'one.jsonl'}",
            "trainer.eval_interval=1",
            "rollout.max_response_length=9",
            *overrides,
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("semantics", ["deepspeed_chat", "standard"])
def test_all_models_are_mixtures_of_experts(inputs: Path, tmp_path: Path, semantics: str) -> None:
    """One replica has no held-out prompt; packed micro-batches of tokens are not equally many."""
    write_moe(inputs / "moe_reward", "mixtral", seed=6, classifier=True, initializer_range=0.1)
    (inputs / "one.jsonl").write_text(json.dumps({"prompt": "tea"}) + "\n")
    shared = [f"semantics={semantics}", ONE]
    uneven: list[str] = []
    if semantics == "deepspeed_chat":
        shared += ["ppo.ds_group_size=2", "ppo.log_entropy=false", "ppo.epochs=1"]
    else:
        uneven = [*TOKENS, "ppo.packing=true", "inference.packing=true"]
    run_ranks(run_all, 1, inputs, tmp_path / "one", *shared)
    run_ranks(run_all, 2, inputs, tmp_path / "ep2", *shared, *EP2, *uneven)
    for name in ("one", "ep2"):
        # Of one prompt there is no standard error.
        read = read_lines(tmp_path / name / METRICS)
        rows = [{k: v for k, v in row.items() if isinstance(v, int | float)} for row in read]
        assert all("eval/score_mean" in row for row in rows)
        (tmp_path / name / METRICS).write_text("\n".join(map(json.dumps, rows)))
    _assert_same_run(tmp_path / "ep2", tmp_path / "one")


def resumed(inputs: Path, root: Path, *overrides: str) -> None:
    """Two iterations in one go, and the second one of them again."""
    shared = ("checkpoint.interval=1", *BALANCED, *overrides)
    train(config(inputs, root / "whole", *shared, "trainer.export=true"))
    train(config(inputs, root / "part", *shared, "trainer.iterations=1"))


def go_on(inputs: Path, root: Path, *overrides: str) -> None:
    shared = ("checkpoint.interval=1", *BALANCED, "trainer.resume=auto")
    train(config(inputs, root / "part", *shared, *overrides))


def export(checkpoint: Path, target: Path, role: str, tensor_model_parallel_size: int) -> None:
    export_state(checkpoint, target, role, tensor_model_parallel_size=tensor_model_parallel_size)


@pytest.mark.slow
def test_a_run_goes_on_with_its_experts_elsewhere(inputs: Path, tmp_path: Path) -> None:
    run_ranks(resumed, 2, inputs, tmp_path, *EP2, "optimizer.distributed=true")
    whole = read_lines(tmp_path / "whole" / "metrics.jsonl")[1]
    for name, overrides in {"same": [*EP2, "optimizer.distributed=true"], "ep1": []}.items():
        shutil.copytree(tmp_path / "part", tmp_path / name / "part")
        run_ranks(go_on, 2, inputs, tmp_path / name, *overrides)
        part = read_lines(tmp_path / name / "part" / "metrics.jsonl")[1]
        keys = ("score_mean", "policy_loss", "actor_grad_norm", "value_loss", "kl_k1", "load_balancing_loss")
        expected = {key: whole[key] for key in keys}
        if name == "same":
            assert {key: part[key] for key in keys} == expected
        assert {key: part[key] for key in keys} == pytest.approx(expected, rel=1e-3, abs=1e-5)
    for world, role, folder in ((1, "actor", "actor"), (2, "ema", "ema")):
        run_ranks(export, world, tmp_path / "whole", tmp_path / role, role, world)
        assert_same_tensors(tmp_path / role, tmp_path / "whole" / folder)


def tune(inputs: Path, output: Path, *overrides: str) -> None:
    sft_run.train(sft_run.make_config(inputs, output, f"model.path={inputs / 'moe'}", *overrides))


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["false", "true"])
def test_supervised_fine_tuning_with_shares_that_differ(inputs: Path, tmp_path: Path, packing: str) -> None:
    """Of five held-out lines one replica has three; by tokens they have different numbers of micro-batches too."""
    sft_run.make_inputs(inputs)
    shared = (f"train.packing={packing}", "train.micro_batch_tokens=80")
    run_ranks(tune, 1, inputs, tmp_path / "one", *shared)
    run_ranks(tune, 2, inputs, tmp_path / "ep2", *shared, *EP2)
    one, two = (steady(read_lines(tmp_path / name / "metrics.jsonl")) for name in ("one", "ep2"))
    assert len(one) == 5
    for ours, theirs in zip(two, one, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-4, abs=2e-5)
