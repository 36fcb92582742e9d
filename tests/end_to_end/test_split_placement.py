"""``placement: split``: the run on ranks of two kinds is the colocated run, and leaves the same behind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mrlhf.errors import ConfigError, MrlhfError
from mrlhf.progress import OffDisplay
from mrlhf.trainer.critic_part import CriticTrainer
from mrlhf.trainer.ppo import PPOTrainer, build_trainer
from tests import tiny_run
from tests.end_to_end.test_resume import cut, final, rows, three_runs
from tests.ranks import run_ranks

SPLIT = "placement=split"
EPS = ("optimizer.actor.eps=1e-3", "optimizer.critic.eps=1e-3")
"""Entries with a tiny gradient would otherwise move by the sign of their rounding error."""
TP2, PP2 = "parallel.tensor_model_parallel_size=2", "critic.parallel={pipeline_model_parallel_size: 2}"

RUNS: dict[str, tuple[str, ...]] = {
    # All that couples the two models, or passes from one to the other.
    "everything": (
        *("trainer.iterations=3", "ppo.critic_warmup_iterations=1", "rollout.prompts_per_iteration=4"),
        *("rollout.samples_per_prompt=2", "reward.normalize=true", "reward.missing_eos_penalty=0.5"),
        *("ppo.whiten_advantages=true", "ppo.whiten_rewards=true", "ppo.bootstrap_truncated=true"),
        *("ppo.ema_decay=0.9", "ppo.kl_target=0.1", "ppo.kl_horizon=20", "ppo.target_approx_kl=0.02"),
        *("trainer.eval_interval=2", "evaluation.samples_per_prompt=2", "evaluation.temperature=1.0"),
        *("evaluation.max_prompts=3", "trainer.export=true", "optimizer.critic.lr_schedule=cosine"),
    ),
    "deepspeed_chat": (
        *("semantics=deepspeed_chat", "trainer.export=true", "trainer.export_interval=1"),
        *("trainer.eval_interval=2", "evaluation.max_prompts=3"),
    ),
    # No critic: the ranks of their own have the reward model.
    "grpo": (
        *("ppo.advantage=grpo", "rollout.samples_per_prompt=2", "rollout.prompts_per_iteration=4"),
        *("ppo.kl_loss_coef=0.1", "trainer.iterations=1", "trainer.export=true"),
    ),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_run.make_inputs(tmp_path_factory.mktemp("split"))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in ("one", "two", "a tree", "the sea"))
    (folder / "texts.jsonl").write_text(lines)
    return folder


def _all_runs(inputs: Path, root: Path, names: list[str], overrides: tuple[str, ...]) -> list[bool]:
    """Whether this rank had the critic, for each run."""
    kinds = []
    for name in names:
        texts = [f"ptx.path={inputs / 'texts.jsonl'}"] if name == "everything" else []
        given = [*RUNS[name], *EPS, f"evaluation.prompts={inputs / 'prompts.jsonl'}", *texts, *overrides]
        trainer = tiny_run.train(tiny_run.make_config(inputs, root / name, *given))
        kinds.append(isinstance(trainer, CriticTrainer))
    return kinds


@pytest.fixture(scope="module")
def colocated(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("colocated")
    run_ranks(_all_runs, 1, inputs, root, list(RUNS), ())
    # Or there would be little to compare.
    metrics = tiny_run.read_lines(root / "everything" / "metrics.jsonl")
    assert [row["critic_updates"] for row in metrics] == [4.0, 4.0, 4.0]
    assert metrics[0]["actor_updates"] == 0.0 < metrics[1]["actor_updates"]
    assert any(row["early_stopped"] for row in metrics)
    assert all(row["ptx_updates"] == row["actor_updates"] for row in metrics[1:])
    assert 0 < metrics[-1]["truncated_fraction"] < 1
    assert "eval/score_mean" in metrics[-1]
    return root


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _assert_same(ours: Path, theirs: Path, tolerance: float) -> None:
    """The same text, and numbers and weights within what another order of additions does to Adam's steps."""
    found, expected = rows(ours), rows(theirs)
    exact = ("iteration", "sample_id", "prompt", "response", "response_length", "truncated")
    assert [{k: row[k] for k in exact} for row in found["samples.jsonl"]] == [
        {k: row[k] for k in exact} for row in expected["samples.jsonl"]
    ]
    assert len(found["metrics.jsonl"]) == len(expected["metrics.jsonl"])
    for step, (a, b) in enumerate(zip(found["metrics.jsonl"], expected["metrics.jsonl"], strict=True)):
        assert a.keys() == b.keys()
        for name in a:
            if name == "ratio_error_before_update":
                assert max(a[name], b[name]) < 1e-5
                continue
            if not isinstance(b[name], float | int):
                # The standard error of a single prompt is no number.
                assert a[name] == b[name], (step, name)
                continue
            assert a[name] == pytest.approx(b[name], rel=tolerance, abs=2e-5, nan_ok=True), (step, name)
    exports = sorted(path.name for path in theirs.iterdir() if (path / "config.json").exists())
    assert exports == sorted(path.name for path in ours.iterdir() if (path / "config.json").exists())
    assert exports
    for name in exports:
        a, b = _weights(ours / name), _weights(theirs / name)
        assert a.keys() == b.keys()
        for key in a:
            torch.testing.assert_close(a[key], b[key], rtol=tolerance, atol=1e-4, msg=f"{name} {key}")


LAYOUTS: dict[str, tuple[int, tuple[str, ...], list[bool]]] = {
    "1+1": (2, (SPLIT,), [False, True]),
    "dp2+1": (3, (SPLIT, "critic_ranks=1"), [False, False, True]),
    "tp2+pp2": (4, (SPLIT, TP2, PP2), [False, False, True, True]),
    "dp2+dp2": (4, (SPLIT, "critic_ranks=2", "optimizer.distributed=true"), [False, False, True, True]),
    "pp2+1": (3, (SPLIT, "parallel.pipeline_model_parallel_size=2", "critic.parallel={}"), [False, False, True]),
}
QUICK = {"tp2+pp2": ["everything"], "dp2+1": ["deepspeed_chat", "grpo"]}
CASES = [pytest.param(layout, [name], marks=pytest.mark.slow) for layout in LAYOUTS for name in RUNS]
CASES = [*QUICK.items(), *(case for case in CASES if case.values[1][0] not in QUICK.get(str(case.values[0]), []))]  # type: ignore[index,list-item]


@pytest.mark.parametrize(("layout", "names"), CASES)
def test_the_run_is_the_colocated_one(
    inputs: Path, colocated: Path, tmp_path: Path, layout: str, names: list[str]
) -> None:
    world, overrides, critics = LAYOUTS[layout]
    # The reward model must have a layout that fits the critic's ranks.
    own = "{pipeline_model_parallel_size: 2}" if "+pp2" in layout else "{}"
    model = f"{{kind: model, path: '{inputs / 'reward'}', weight: 0.5, parallel: {own}}}"
    sources = f"reward.sources=[{model}, {{kind: function, target: 'tests.tiny_run:letters', weight: 2.0}}]"
    found = run_ranks(_all_runs, world, inputs, tmp_path, names, (*overrides, sources))
    assert found == [[critic] * len(names) for critic in critics]
    for name in names:
        _assert_same(tmp_path / name, colocated / name, 5e-4)
        timed = tiny_run.read_lines(tmp_path / name / "metrics.jsonl")[-1]
        parts = ("actor_inference", "critic_inference", "actor_train", *(["critic_train"] if name != "grpo" else []))
        assert all(timed[f"time_{part}"] > 0 for part in parts)


UNEVEN = {
    # Critic's replicas with two prompts' rows and one's, with two rows and none, and evaluations likewise.
    3: ("ppo.minibatch_size=2", "evaluation.max_prompts=1", "trainer.export=true"),
    1: ("ppo.minibatch_size=2", "evaluation.max_prompts=3", "trainer.export=true"),
}


def _uneven(inputs: Path, root: Path, *overrides: str) -> None:
    """Runs whose prompts cannot be shared out evenly over the critic's replicas."""
    common = ("rollout.samples_per_prompt=2", "ppo.micro_batch_size=1", "trainer.eval_interval=1", *EPS, *overrides)
    for prompts, given in UNEVEN.items():
        own = (f"rollout.prompts_per_iteration={prompts}", f"evaluation.prompts={inputs / 'prompts.jsonl'}")
        tiny_run.train(tiny_run.make_config(inputs, root / str(prompts), *common, *own, *given))


@pytest.mark.slow
def test_replicas_with_different_numbers_of_rows(inputs: Path, tmp_path: Path) -> None:
    run_ranks(_uneven, 1, inputs, tmp_path / "colocated")
    run_ranks(_uneven, 3, inputs, tmp_path / "split", SPLIT, "critic_ranks=2")
    for prompts in map(str, UNEVEN):
        _assert_same(tmp_path / "split" / prompts, tmp_path / "colocated" / prompts, 5e-4)


def _across(inputs: dict[str, Path], root: Path) -> list[dict[str, str]]:
    """A split run that goes on with a colocated run's checkpoint, and a colocated run with a split one's."""
    import torch.distributed as dist

    ends = []
    for before, after in ((), (SPLIT,)), ((SPLIT,), ()):
        folder = root / ("to_split" if after else "to_colocated")
        config = tiny_run.make_config(inputs["ppo"], folder, *_RESUMED, *before)
        if before:
            # A request to stop is one for both parts.
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "stop").touch()
            dist.barrier()
            stopped = tiny_run.train(config)
            assert stopped.stopped is not None
            assert stopped.checkpoints.first == 0
            config = tiny_run.make_config(inputs["ppo"], folder, *_RESUMED, *before, "trainer.resume=auto")
            assert tiny_run.train(config).checkpoints.first == 1
        else:
            tiny_run.train(config)
        cut(folder)
        resumed = tiny_run.train(tiny_run.make_config(inputs["ppo"], folder, *_RESUMED, *after, "trainer.resume=auto"))
        assert resumed.checkpoints.first == 2
        ends.append(final(resumed))
    return ends


_RESUMED = (
    *("trainer.iterations=4", "checkpoint.interval=2", "trainer.overwrite=false", "ppo.epochs=1"),
    *("rollout.prompts_per_iteration=4", "trainer.export=true", "reward.normalize=true", "optimizer.distributed=true"),
    *EPS,
)


def test_resume_bit_for_bit(inputs: Path, tmp_path: Path) -> None:
    run_ranks(three_runs, 2, ["everything"], {"ppo": inputs, "texts": inputs / "texts.jsonl"}, tmp_path, (SPLIT,))


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides", [("critic_ranks=1", "optimizer.distributed=true"), ("checkpoint.asynchronous=true", TP2)]
)
def test_resume_of_chats_bit_for_bit(inputs: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    folders = {"ppo": inputs, "texts": inputs / "texts.jsonl"}
    own = ("critic.parallel={}", "reward.sources=[{kind: function, target: 'tests.tiny_run:letters'}]")
    run_ranks(three_runs, 3, ["deepspeed_chat"], folders, tmp_path, (SPLIT, *own, *overrides))


@pytest.mark.slow
def test_resume_across_placements(inputs: Path, tmp_path: Path) -> None:
    folders = {"ppo": inputs, "texts": inputs / "texts.jsonl"}
    ends = run_ranks(_across, 2, folders, tmp_path)
    # Rank 0 has the actor of the split run alone, rank 1 its critic.
    assert [end.keys() for end in ends[0]] == [{"actor"}, {"actor", "critic"}]
    assert [end.keys() for end in ends[1]] == [{"critic"}, {"actor", "critic"}]
    _assert_same(tmp_path / "to_split", tmp_path / "to_colocated", 5e-4)


def _spoiled(inputs: Path, root: Path) -> Mapping[str, Any]:
    """Updates with a value that is not finite on one side: neither model may move."""
    config = tiny_run.make_config(
        inputs, root, SPLIT, "ppo.epochs=1", "ppo.minibatch_size=8", "trainer.max_bad_steps=2"
    )
    trainer = build_trainer(config)
    model = trainer.actor if isinstance(trainer, PPOTrainer) else trainer.critic
    assert model is not None
    role, seen = model.name, []
    whole = trainer.updater.run

    def run(batch: Any, iteration: int, **options: Any) -> Any:
        """The updates of an iteration, after one field of one side was spoiled."""
        field = {0: "advantages", 1: "returns"}.get(iteration % 3)
        if field is not None and getattr(batch, field) is not None:
            bad = getattr(batch, field).clone()
            bad[:, int(batch.prompt_lengths.min()) - 1 :] = float("nan")
            batch = batch.replace(
                **{field: bad if role == {0: "actor", 1: "critic"}[iteration % 3] else bad.nan_to_num()}
            )
        before = model.weights_hash()
        result = whole(batch, iteration, **options)
        steps = [(step.actor.updated, step.critic.updated) for step in result[1]]
        seen.append((steps, model.weights_hash() != before, trainer.updater.bad_steps))
        return result

    trainer.updater.run = run  # type: ignore[method-assign]
    for iteration in (0, 1, 2):
        trainer.advance(iteration, OffDisplay())
    failed = ""
    try:
        for _ in range(4):
            trainer.advance(0, OffDisplay())
    except MrlhfError as error:
        failed = str(error)
    return {"role": role, "seen": seen[:3], "failed": failed}


def test_both_models_skip_together_and_give_up_together(inputs: Path, tmp_path: Path) -> None:
    actor, critic = run_ranks(_spoiled, 2, inputs, tmp_path)
    assert (actor["role"], critic["role"]) == ("actor", "critic")
    skipped, made = [(False, False)], [(True, True)]
    expected = [(skipped, False, 1), (skipped, False, 2), (made, True, 0)]
    assert actor["seen"] == critic["seen"] == expected
    assert "3 optimizer steps in a row were skipped" in actor["failed"]
    assert actor["failed"] == critic["failed"]


def _from_megatron(inputs: Path, root: Path) -> list[float]:
    """A run whose actor is a Megatron folder, which all ranks of the world open together."""
    import torch.distributed as dist

    from mrlhf.checkpoint.convert import import_hf

    if dist.get_world_size() == 1:
        import_hf(inputs / "actor", inputs / "actor_megatron")
        return []
    overrides = ("trainer.iterations=1", "trainer.export=true", SPLIT)
    tiny_run.train(tiny_run.make_config(inputs, root / "hf", *overrides))
    tiny_run.train(
        tiny_run.make_config(inputs, root / "megatron", *overrides, f"actor.path={inputs / 'actor_megatron'}")
    )
    return [1.0]


@pytest.mark.slow
def test_megatron_folders(inputs: Path, tmp_path: Path) -> None:
    run_ranks(_from_megatron, 1, inputs, tmp_path)
    run_ranks(_from_megatron, 2, inputs, tmp_path)
    assert rows(tmp_path / "hf") == rows(tmp_path / "megatron")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("critic_ranks=2",), "critic_ranks 2 has no meaning with placement colocated"),
        (
            (SPLIT, "ppo.advantage=reinforce_plus_plus", "reward.sources=[{kind: function, target: 'a:b'}]"),
            "needs no critic and reward.sources names no model; set placement=colocated",
        ),
        (("placement=apart",), "expected 'colocated' or 'split'"),
    ],
)
def test_settings_that_say_nothing(inputs: Path, tmp_path: Path, overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny_run.make_config(inputs, tmp_path, *overrides)


@pytest.mark.parametrize(
    ("critic", "count"),
    [
        ("{}", 1),
        ("{tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2}", 4),
        # As many as hold all experts once.
        ("{expert_model_parallel_size: 4}", 4),
        ("{tensor_model_parallel_size: 2, sequence_parallel: true, expert_model_parallel_size: 2}", 4),
    ],
)
def test_ranks_without_a_number(inputs: Path, tmp_path: Path, critic: str, count: int) -> None:
    config = tiny_run.make_config(inputs, tmp_path, SPLIT, f"critic.parallel={critic}")
    assert config.critic_ranks_of(16) == range(16 - count, 16)
    assert config.smallest_world == 1 + count


@pytest.mark.parametrize(
    ("world", "overrides", "words"),
    [
        (1, (SPLIT,), "one replica of critic and reward models: 1 of 1 ranks leave none for actor and reference; "
         "start 2 ranks or more, or set placement=colocated"),
        (2, (SPLIT, "critic_ranks=2", TP2), "critic_ranks 2 of 2 ranks leave none .*; start 4 ranks or more, lower"),
        (4, (SPLIT, TP2, "critic_ranks=1", "critic.parallel={}", "reward.sources=[{kind: function, target: 'a:b'}]"),
         "actor, reference .ranks 0 to 2 of 4, critic_ranks 1; .*world size 3 is not a multiple of TP 2"),
        (4, (SPLIT, PP2, "critic_ranks=1"), "critic .*ranks 3 to 3 of 4.*size 1 is not a multiple of TP 1 x PP 2"),
        (5, (SPLIT, "critic_ranks=3"), "critic, reward0 .*ranks 2 to 4.*minibatch_size 4 is not a multiple of DP 3"),
        (6, (SPLIT, "critic_ranks=3", "ppo.minibatch_size=6"), "prompts_per_iteration 8 is not a multiple of DP 3"),
    ],
)  # fmt: skip
def test_layouts_that_do_not_fit(inputs: Path, tmp_path: Path, world: int, overrides: Any, words: str) -> None:
    """Before any process group exists; with the names of the keys."""
    from mrlhf.config import check_run
    from mrlhf.trainer.ppo_job import read_models

    config = tiny_run.make_config(inputs, tmp_path, *overrides)
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        check_run(config, world, read_models(config))
