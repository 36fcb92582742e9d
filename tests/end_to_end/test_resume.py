"""A run that is stopped and resumed is the run that was not: metrics, text and weights, bit for bit."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mrlhf.errors import CheckpointError
from tests import preference_run, sft_run, tiny_run
from tests.ranks import run_ranks

ITERATIONS, SAVED = 4, 2
OVERRIDES = (f"trainer.iterations={ITERATIONS}", f"checkpoint.interval={SAVED}", "trainer.overwrite=false")
OWN_CRITIC = ("critic.parallel={pipeline_model_parallel_size: 2}",)
TP2, DP2 = ("parallel.tensor_model_parallel_size=2",), ("optimizer.distributed=true",)

PPO = {
    "everything": (
        *OVERRIDES,
        "rollout.prompts_per_iteration=4",
        "ppo.epochs=1",
        "ppo.ema_decay=0.9",
        "ppo.kl_target=0.1",
        "ppo.kl_horizon=20",
        "reward.normalize=true",
        "actor.dropout=0.1",
        "optimizer.actor.lr_schedule=cosine",
    ),
    "skip_old_logprobs": (
        *(*OVERRIDES, "ppo.epochs=1", "ppo.minibatch_size=8", "ppo.skip_old_logprobs=true", "rollout.logprobs=true"),
        *("ppo.kl_target=0.1", "ppo.kl_horizon=20"),
    ),
    "deepspeed_chat": (*OVERRIDES, "rollout.prompts_per_iteration=4", "ppo.epochs=1", "semantics=deepspeed_chat"),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("resume")
    folders = {
        "ppo": tiny_run.make_inputs(root / "ppo"),
        "sft": sft_run.make_inputs(root / "sft"),
        "preferences": preference_run.make_inputs(root / "preferences"),
    }
    (root / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one", "two", "a tree")))
    return folders | {"texts": root / "texts.jsonl"}


def make(kind: str, inputs: dict[str, Path], output: Path, *overrides: str) -> tuple[Any, Callable[[Any], Any]]:
    """The configuration of a run, and what trains it."""
    if kind in PPO:
        texts = (f"ptx.path={inputs['texts']}", "ptx.batch_size=2") if kind == "everything" else ()
        return tiny_run.make_config(inputs["ppo"], output, *PPO[kind], *texts, *overrides), tiny_run.train
    if kind == "sft":
        return sft_run.make_config(inputs["sft"], output, *OVERRIDES, *overrides), sft_run.train
    build = preference_run.reward_config if kind == "reward" else preference_run.dpo_config
    return build(inputs["preferences"], output, *OVERRIDES, "data.shuffle=true", *overrides), preference_run.train


def final(trainer: Any) -> dict[str, str]:
    models = [getattr(trainer, name, None) for name in ("actor", "critic", "model")]
    hashes = {model.name: model.weights_hash() for model in models if model is not None}
    if getattr(trainer, "ema", None) is not None:
        with trainer.ema.swapped_in():
            hashes["ema"] = trainer.actor.weights_hash()
    return hashes


def rows(output: Path) -> dict[str, list[dict[str, Any]]]:
    tables = {name: output / name for name in ("metrics.jsonl", "samples.jsonl")}
    return {name: tiny_run.steady(tiny_run.read_lines(path)) for name, path in tables.items() if path.exists()}


def three_runs(kinds: list[str], inputs: dict[str, Path], root: Path, overrides: tuple[str, ...]) -> None:
    """The whole run; the first half, killed later than its save; and the rest, in the folder of the first half."""
    for kind in kinds:
        config, train = make(kind, inputs, root / kind / "whole", *overrides)
        whole = train(config)
        config, _ = make(kind, inputs, root / kind / "parts", *overrides)
        first = train(config)
        assert final(first) == final(whole), kind
        cut(root / kind / "parts")
        config, _ = make(kind, inputs, root / kind / "parts", *overrides, "trainer.resume=auto")
        resumed = train(config)
        assert resumed.checkpoints.first == SAVED, kind
        assert resumed.checkpoints.run_id == first.checkpoints.run_id
        assert final(resumed) == final(whole), kind
        ours, theirs = rows(root / kind / "parts"), rows(root / kind / "whole")
        assert ours == theirs, kind
        assert [row["step"] for row in ours["metrics.jsonl"]] == list(range(ITERATIONS))
        # A run that has come to its end has nothing more to do.
        again = train(config)
        assert again.checkpoints.first == ITERATIONS
        assert final(again) == final(whole)
        assert rows(root / kind / "parts") == theirs


def cut(output: Path) -> None:
    """What a kill in the last iteration leaves: no last checkpoint, and half a line."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        shutil.rmtree(output / "checkpoints" / f"iter_{ITERATIONS:07d}")
        with (output / "metrics.jsonl").open("a") as file:
            file.write('{"step": 4, "sco')
    dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(PPO))
def test_ppo_resumes_bit_for_bit_on_one_rank(kind: str, inputs: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(three_runs, 1, [kind], inputs, tmp_path, ())


def test_ppo_resumes_bit_for_bit_on_two_ranks(inputs: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(three_runs, 2, ["everything"], inputs, tmp_path / "tp", (*TP2, "checkpoint.asynchronous=true"))
    run_ranks(three_runs, 2, ["deepspeed_chat"], inputs, tmp_path / "dp", (*DP2, *OWN_CRITIC))


def test_supervised_runs_resume_bit_for_bit(inputs: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(three_runs, 1, ["sft", "reward"], inputs, tmp_path / "one", ())
    run_ranks(three_runs, 2, ["dpo"], inputs, tmp_path / "two", DP2)
    run_ranks(three_runs, 2, ["sft"], inputs, tmp_path / "tp", TP2)


def refusals(inputs: dict[str, Path], root: Path) -> dict[str, str]:
    """What the messages say when something is not as it was."""
    config, train = make("sft", inputs, root / "run", "trainer.iterations=2")
    train(config)
    other = sft_run.make_inputs(root / "other")
    lines = (other / "train.jsonl").read_text().splitlines()
    (other / "train.jsonl").write_text("\n".join(reversed(lines)) + "\n")
    resume = ("trainer.resume=auto", "trainer.iterations=3")
    messages = {}
    for name, overrides in {
        "seed": ["seed=8"],
        "data": [f"data.train={other / 'train.jsonl'}"],
        "validation": ["data.validation=[]", "trainer.eval_interval=0"],
        "precision": ["precision.dtype=bf16"],
        "path": [f"trainer.resume={root / 'nowhere'}", f"trainer.output_dir={root / 'new'}"],
    }.items():
        with pytest.raises(CheckpointError) as caught:
            train(make("sft", inputs, root / "run", *resume, *overrides)[0])
        messages[name] = str(caught.value)
    # c11: other data start at 0, with a warning, once that is allowed; the same go on at position 8 of their order.
    data = f"data.train={other / 'train.jsonl'}"
    with pytest.warns(UserWarning, match="not those of the checkpoint: starting at the first one"):
        trainer = train(make("sft", inputs, root / "run", *resume, data, "trainer.allow_changes=true")[0])
    assert trainer.stream.position == 4
    # Weights only: a run of its own that begins at 0 with a fresh optimizer.
    light = (f"trainer.resume={root / 'run'}", "trainer.weights_only=true", "trainer.iterations=2")
    fresh = train(make("sft", inputs, root / "light", *light)[0])
    assert fresh.checkpoints.first == 0
    assert fresh.checkpoints.run_id != trainer.checkpoints.run_id
    return messages


def test_c11_other_inputs_are_named(inputs: dict[str, Path], tmp_path: Path) -> None:
    messages = run_ranks(refusals, 1, inputs, tmp_path)[0]
    assert "seed was 7, now 8" in messages["seed"]
    assert "data.train was" in messages["data"]
    assert "data.validation (only in the checkpoint)" in messages["validation"]
    assert all("trainer.allow_changes=true" in messages[name] for name in ("seed", "data", "validation"))
    assert "torch.bfloat16" in messages["precision"]
    assert "nowhere does not exist" in messages["path"]


def failing_saves(inputs: dict[str, Path], root: Path) -> str:
    """The second save fails while it is written: the first is still there, and the run goes on or ends as told."""
    import resource

    import torch.distributed as dist

    def limited(save: Any) -> Any:
        def after(done: int, numbers: Any) -> None:
            if done == ITERATIONS:
                resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
            try:
                save(done, numbers)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)

        return after

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    message = ""
    for policy in ("warn", "stop"):
        from mrlhf.trainer.sft import build_trainer

        config, _ = make("sft", inputs, root / policy, f"checkpoint.on_save_error={policy}")
        trainer = build_trainer(config)
        trainer.checkpoints.after = limited(trainer.checkpoints.after)  # type: ignore[method-assign]
        if policy == "stop":
            with pytest.raises(CheckpointError) as caught:
                trainer.train()
            message = str(caught.value)
        else:
            trainer.train()
        dist.barrier()  # rank 0 takes the broken one away
        # The last save is tried again at the end of a run that goes on.
        kept = {"warn": ["iter_0000002", "iter_0000004"], "stop": ["iter_0000002"]}
        assert [path.name for path in sorted((root / policy / "checkpoints").iterdir())] == kept[policy]
    return message


def test_a_save_that_fails_leaves_the_earlier_one(inputs: dict[str, Path], tmp_path: Path) -> None:
    for message in run_ranks(failing_saves, 2, inputs, tmp_path):
        assert "checkpoint.on_save_error=warn" in message


def other_layout(inputs: dict[str, Path], root: Path, *overrides: str) -> list[dict[str, Any]]:
    config, train = make("everything", inputs, root / "run", "actor.dropout=0", *overrides)
    train(config)
    return rows(root / "run")["metrics.jsonl"]


def test_a_run_goes_on_under_another_layout(inputs: dict[str, Path], tmp_path: Path) -> None:
    """C13: saved under TP 2, resumed under DP 2 with a critic in stages: the same numbers up to rounding."""
    whole = run_ranks(other_layout, 2, inputs, tmp_path, *TP2)[0]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "iter_0000004")
    small = ("trainer.resume=auto", "ppo.micro_batch_size=1")
    resumed = run_ranks(other_layout, 2, inputs, tmp_path, *small, *OWN_CRITIC)[0]
    assert [row["step"] for row in resumed] == list(range(ITERATIONS))
    assert resumed[:SAVED] == whole[:SAVED]
    for key in ("score_mean", "kl_k1", "policy_loss", "value_loss", "ptx_loss", "actor_lr", "kl_coef"):
        ours, theirs = [row[key] for row in resumed], [row[key] for row in whole]
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5), key


class FakeWandb(ModuleType):
    """What of Weights & Biases matters here: a run is continued by its id, and its own steps only go up."""

    def __init__(self, file: Path) -> None:
        """Everything that arrives is appended to ``file``."""
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None)
        self.file = file

    def init(self, *, id: str | None, resume: str, **_: Any) -> FakeWandb:  # noqa: A002  W&B's name
        import torch.distributed as dist

        self.id = id or "made-up"
        # A continued run goes on after the last step that it was sent.
        self.step = sum("row" in line for line in self.lines() if line["id"] == self.id)
        self.axis = "own"
        self.tell(began=dist.get_rank(), resume=resume)
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        if name == "*" and step_metric is not None:
            self.axis = step_metric

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        if step is not None and step < self.step:
            return
        self.step = (self.step if step is None else step) + 1
        self.tell(row=self.step - 1 if self.axis == "own" else data[self.axis])

    def finish(self) -> None:
        """Nothing is kept back."""

    def tell(self, **values: Any) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps({"id": self.id, **values}) + "\n")

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []


def wandb_run(inputs: dict[str, Path], root: Path) -> None:
    """A run that is killed after its save, and goes on."""
    sys.modules["wandb"] = FakeWandb(root / "wandb.jsonl")
    options = ("trainer.wandb=true", "trainer.export=false")
    config, train = make("sft", inputs, root / "run", *options)
    train(config)
    cut(root / "run")
    train(make("sft", inputs, root / "run", *options, "trainer.resume=auto")[0])
    del sys.modules["wandb"]


def test_f5_a_resumed_run_goes_on_in_its_wandb_run(inputs: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(wandb_run, 2, inputs, tmp_path)
    lines = FakeWandb(tmp_path / "wandb.jsonl").lines()
    # The first rank alone begins, and both times in the same run; steps after the save are sent again, none is lost.
    assert [line["began"] for line in lines if "began" in line] == [0, 0]
    assert {line["id"] for line in lines} == {"made-up"}
    assert [line["row"] for line in lines if "row" in line] == [*range(ITERATIONS), *range(SAVED, ITERATIONS)]


def exports(inputs: dict[str, Path], root: Path) -> None:
    """What `mrlhf convert export RUN_DIR` writes is what the run itself exports at its end."""
    from mrlhf.checkpoint.convert_state import export_state
    from tests.distributed.hf_tools import read_tensors

    config, train = make("everything", inputs, root / "run", "trainer.export=true", *TP2)
    train(config)
    for role in ("actor", "ema", "critic"):
        export_state(root / "run", root / role, role, pipeline_model_parallel_size=2)
        ours, theirs = read_tensors(root / role), read_tensors(root / "run" / role)
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not ours[name].equal(theirs[name])] == [], role
        names = [{path.name for path in folder.iterdir()} for folder in (root / role, root / "run" / role)]
        assert names[0] == names[1]
    with pytest.raises(CheckpointError, match="holds actor, critic, ema; choose one with --role"):
        export_state(root / "run", root / "none", None)
    with pytest.raises(CheckpointError, match="not 'model'"):
        export_state(root / "run", root / "none", "model")


def test_models_of_a_checkpoint_are_exported(inputs: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(exports, 2, inputs, tmp_path)
