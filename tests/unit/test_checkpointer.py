"""When a run saves, what it says about saves that fail, and which checkpoint it goes on from: without any model."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from mrlhf.config_sections import OffloadConfig, OutputConfig, RunConfig
from mrlhf.errors import CheckpointError, ConfigError
from mrlhf.trainer.checkpointing import Checkpointer
from mrlhf.trainer.outputs import check_shared
from tests.ranks import run_ranks


class TinyConfig(RunConfig):
    """A configuration with nothing but an output folder."""

    trainer: OutputConfig
    folder: str
    offload: OffloadConfig = OffloadConfig()

    @property
    def output_dir(self) -> Path:
        return Path(self.folder)


class State:
    """A trainer that counts."""

    def __init__(self) -> None:
        self.count = 0
        self.marks = {"data": "a"}

    def models(self) -> dict[str, Any]:
        return {}

    def averages(self) -> dict[str, Any]:
        return {}

    def inputs(self) -> dict[str, Any]:
        return dict(self.marks)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def make(output: Path, *, checkpoint: dict[str, Any] | None = None, **trainer: Any) -> tuple[Checkpointer, list[str]]:
    config = TinyConfig.model_validate(
        {"folder": str(output), "trainer": trainer, "checkpoint": {"interval": 2, **(checkpoint or {})}}
    )
    job: Any = SimpleNamespace(config=config, described_layout=lambda: {"world_size": 1}, groups=None)
    checkpointer = Checkpointer(job, config.trainer, State(), iterations=6)
    said: list[str] = []
    checkpointer.message = said.append
    return checkpointer, said


def fail(checkpointer: Checkpointer, times: int) -> None:
    """Let the next saves fail."""
    left, before = [times], checkpointer.state.state_dict

    def broken() -> dict[str, Any]:
        left[0] -= 1
        return {"count": {1, 2}} if left[0] >= 0 else before()

    checkpointer.state.state_dict = broken  # type: ignore[method-assign]


def failed_saves(root: Path) -> None:
    for asynchronous in (False, True):
        settings = {"asynchronous": asynchronous, "on_save_error": "warn"}
        checkpoints, said = make(root / f"stop{asynchronous}", checkpoint=settings)
        checkpoints.resume()
        fail(checkpoints, 2)
        checkpoints.after(2, {})
        assert "warning: the save after iteration 2 failed" in said[-1]
        checkpoints.stop(2, {})
        assert "checkpoint after iteration 2" in said[-1]
        fail(checkpoints, 2)
        with pytest.raises(CheckpointError, match=r"ends early after iteration 3, but .* that of iteration 2"):
            checkpoints.stop(3, {})
        fail(checkpoints, 1)
        checkpoints.after(6, {})
        checkpoints.finish()
        assert "checkpoint after iteration 6" in said[-1]


def test_a_failed_save_is_never_taken_for_a_good_one(tmp_path: Path) -> None:
    run_ranks(failed_saves, 1, tmp_path)


def changed_settings(root: Path) -> None:
    first, _ = make(root)
    first.resume()
    first.save(2, {})
    again, said = make(root, resume="auto", progress="off")
    again.config = again.config.model_copy(update={"seed": 5, "offload": OffloadConfig(reference=True)})
    assert again.resume() == 2
    # Where memory lies and what is shown changes no number.
    assert [line.split()[0] for line in said if "in the checkpoint, now it is" in line] == ["seed"]


def test_only_settings_that_numbers_depend_on_are_named(tmp_path: Path) -> None:
    run_ranks(changed_settings, 1, tmp_path)


def changed_inputs(root: Path) -> None:
    first, _ = make(root)
    first.resume()
    first.state.marks = {"data": "b"}  # type: ignore[attr-defined]
    first.save(2, {})
    again, _ = make(root, resume="auto")
    assert again.resume() == 2, "the marks are those of what the run has read"
    other, _ = make(root, resume="auto")
    other.state.marks = {"data": "b"}  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="data was a, now b"):
        other.resume()


def test_inputs_are_marked_at_the_start(tmp_path: Path) -> None:
    run_ranks(changed_inputs, 1, tmp_path)


def misspelt(root: Path) -> None:
    checkpoints, said = make(root, checkpoint={"best_metric": "scores_mean"})
    checkpoints.resume()
    for done in (2, 4):
        checkpoints.after(done, {"score_mean": 1.0, "x": 2.0})
    found = [line for line in said if "best_metric" in line]
    assert len(found) == 1
    assert "did you mean score_mean?" in found[0]


def test_a_metric_that_is_not_there_is_named(tmp_path: Path) -> None:
    run_ranks(misspelt, 1, tmp_path)


def forks(root: Path) -> None:
    first, _ = make(root / "run")
    first.resume()
    first.wandb_id = "w"
    first.save(4, {})
    for resume in ("auto", str(root / "run"), str(root / "run" / "checkpoints" / "iter_0000004")):
        again, _ = make(root / "run", resume=resume)
        assert again.resume() == 4
        assert (again.own, again.run_id, again.wandb_id) == (True, first.run_id, "w")
    fork, _ = make(root / "run" / "fork", resume=str(root / "run"))
    assert fork.resume() == 4
    assert not fork.own
    assert fork.run_id != first.run_id
    assert fork.wandb_id is None
    assert fork.save(6, {})
    # The fork dies, and torchrun starts its ranks again: it goes on with its own checkpoint.
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    for weights_only in (False, True):
        again, _ = make(root / "run" / "fork", resume=str(root / "run"), weights_only=weights_only)
        assert again.resume() == 6
        assert again.run_id == fork.run_id
    early, _ = make(root / "early", resume=str(root / "run"))
    assert early.resume() == 4


def test_a_run_from_another_ones_checkpoint_is_a_run_of_its_own(tmp_path: Path) -> None:
    run_ranks(forks, 1, tmp_path)


def replaced_run(root: Path) -> None:
    first, _ = make(root)
    first.resume()
    first.save(4, {})
    second, said = make(root, overwrite=True)
    assert second.resume() == 0
    assert second.run_id != first.run_id
    assert (root / "checkpoints.replaced" / "iter_0000004" / "complete.json").exists()
    assert "checkpoints.replaced" in said[-1]
    assert second.save(4, {})
    third, _ = make(root, overwrite=True, resume="auto")
    assert third.resume() == 4
    assert third.run_id == second.run_id
    light, _ = make(root, overwrite=True, resume=str(root), weights_only=True)
    with pytest.raises(CheckpointError, match="weights_only begins a new run, .* choose another trainer.output_dir"):
        light.resume()


def test_a_run_that_replaces_another_one_leaves_its_checkpoints_aside(tmp_path: Path) -> None:
    run_ranks(replaced_run, 1, tmp_path)


def shared(root: Path) -> str:
    check_shared(root / "one")
    dist.barrier()  # rank 0 takes its mark away
    assert not (root / "one" / ".shared").exists()
    with pytest.raises(ConfigError) as caught:
        check_shared(root / f"node{dist.get_rank()}", seconds=0.5)
    return str(caught.value)


def test_an_output_folder_of_each_node_is_refused_at_the_start(tmp_path: Path) -> None:
    for message in run_ranks(shared, 2, tmp_path):
        assert "is another folder for ranks [1] than for rank 0" in message
