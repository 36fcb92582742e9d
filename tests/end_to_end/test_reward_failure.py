"""A reward source that fails for good ends the run, and nothing that was learned is lost."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mrlhf.checkpoint.saved import list_checkpoints
from mrlhf.errors import RewardError
from tests import tiny_run
from tests.end_to_end.test_resume import final, rows
from tests.ranks import run_ranks

TARGET = f"{__name__}:fails_at_a_call"
BASE = (
    f"reward.sources=[{{kind: function, target: '{TARGET}'}}]",
    "reward.normalize=true",
    "trainer.iterations=3",
    "trainer.overwrite=false",
    "rollout.prompts_per_iteration=4",
    "ppo.epochs=1",
    "optimizer.distributed=true",
)
_calls = 0


def fails_at_a_call(prompts: list[str], responses: list[str], **meta: Any) -> list[float]:
    """As `tiny_run.letters`, but on rank 1 the call of the number in ``$FAILS`` raises."""
    global _calls
    _calls += 1
    if os.environ["RANK"] == "1" and os.environ.get("FAILS") == str(_calls):
        raise ConnectionError("the judge has gone home")
    return tiny_run.letters(prompts, responses, **meta)


def failing(inputs: Path, root: Path, overrides: tuple[str, ...], call: int) -> list[int]:
    """The whole run, one whose reward fails, and its rest; the iterations of the checkpoints after the failure."""
    global _calls
    whole = tiny_run.train(tiny_run.make_config(inputs, root / "whole", *BASE, *overrides))
    parts, _calls = (inputs, root / "parts", *BASE, *overrides), 0
    os.environ["FAILS"] = str(call)
    with pytest.raises(RewardError, match="raised ConnectionError: the judge has gone home"):
        tiny_run.train(tiny_run.make_config(*parts))
    del os.environ["FAILS"]
    saved = [checkpoint.iteration for checkpoint in list_checkpoints(root / "parts" / "checkpoints")]
    resume = ("trainer.overwrite=true",) if not saved else ("trainer.resume=auto",)
    resumed = tiny_run.train(tiny_run.make_config(*parts, *resume))
    assert resumed.checkpoints.first == (saved[-1] if saved else 0)
    assert final(resumed) == final(whole)
    return saved


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.make_inputs(tmp_path_factory.mktemp("failing"))


@pytest.mark.parametrize(("call", "saved"), [(3, [2]), (1, [])])
def test_what_was_learned_is_saved_first(inputs: Path, tmp_path: Path, call: int, saved: list[int]) -> None:
    """Rank 1 of two replicas fails in one iteration; both save the one before, though no interval is set."""
    assert run_ranks(failing, 2, inputs, tmp_path, (), call) == [saved, saved]
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")


def test_the_rank_of_the_critic_fails(inputs: Path, tmp_path: Path) -> None:
    """Reward functions are called there under ``placement: split``; the actor's rank hears of it, and both save."""
    split = ("placement=split",)
    assert run_ranks(failing, 2, inputs, tmp_path, split, 3) == [[2], [2]]
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")


@pytest.mark.parametrize("placement", ["colocated", pytest.param("split", marks=pytest.mark.slow)])
def test_a_failure_in_an_evaluation(inputs: Path, tmp_path: Path, placement: str) -> None:
    """The iteration before it counts: its metrics are written, and the run goes on with the next one."""
    overrides = ("trainer.eval_interval=2", f"evaluation.prompts={inputs / 'prompts.jsonl'}", f"placement={placement}")
    assert run_ranks(failing, 2, inputs, tmp_path, overrides, 4) == [[2], [2]]
    ours, theirs = (rows(tmp_path / name)["metrics.jsonl"] for name in ("parts", "whole"))
    assert [row["step"] for row in ours] == [0, 1, 2]
    assert ours[0] == theirs[0]
    assert ours[1] == {name: value for name, value in theirs[1].items() if not name.startswith("eval/")}
    assert ours[2] == theirs[2]
