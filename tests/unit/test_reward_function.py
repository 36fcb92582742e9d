"""Reward functions that users write: every way in which they can be wrong is named."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mrlhf.errors import ConfigError, MrlhfError
from mrlhf.roles.reward import RewardFunction

SOURCE = """
import torch

seen = {}

def lengths(prompts, responses, **meta):
    seen.update(prompts=prompts, responses=responses, meta=meta)
    return [len(r) for r in responses]

def tensor(prompts, responses): return torch.tensor([0.5] * len(responses))
def lazy(prompts, responses): return (1.0 / len(r) for r in responses)
def raises(prompts, responses): raise KeyError("gold")
def leaves(prompts, responses): raise SystemExit(0)
def short(prompts, responses): return [1.0]
def nan(prompts, responses): return [0.0, float("nan")]
def infinite(prompts, responses): return [0.0, float("-inf")]
def over_fp32(prompts, responses): return [0.0, -1e300]
def words(prompts, responses): return ["good", "bad"]
def digits(prompts, responses): return "12"
def numerals(prompts, responses): return ["1", "2"]
def table(prompts, responses): return {0: 1.0, 1: 2.0}
def none(prompts, responses): return [None, 1.0]
def huge(prompts, responses): return [10**400, 1.0]
def one(prompts, responses): return 3.0
def no_meta(prompts, responses, gold): return gold

calls = []
def third_time(prompts, responses):
    calls.append(len(responses))
    if len(calls) == 1: raise ConnectionError("busy")
    return [1.0, 2.0] if len(calls) == 3 else [None, None]

class Judge:
    def __call__(self, prompts, responses): return [2.0] * len(responses)
    class inner:
        @staticmethod
        def score(prompts, responses): return [7.0] * len(responses)

judge = Judge()
number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module in the current directory, which is not on the path beforehand."""
    (tmp_path / "user_rewards.py").write_text(SOURCE)
    (tmp_path / "broken_rewards.py").write_text("value = 1 +\n")
    (tmp_path / "failing_rewards.py").write_text("raise RuntimeError('no key file')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "user_rewards"
    for name in ("user_rewards", "broken_rewards", "failing_rewards"):
        sys.modules.pop(name, None)


def _scores(name: str, meta: dict[str, Any] | None = None) -> list[float]:
    return RewardFunction(f"user_rewards:{name}").scores(["p", "q"], ["ab", "c"], meta or {})


def test_scores_and_what_the_function_sees(module: str) -> None:
    assert _scores("lengths", {"gold": ("x", None), "level": (1, 2)}) == [2.0, 1.0]
    assert sys.modules[module].seen == {
        "prompts": ["p", "q"],
        "responses": ["ab", "c"],
        "meta": {"gold": ["x", None], "level": [1, 2]},
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [("tensor", [0.5, 0.5]), ("lazy", [0.5, 1.0]), ("judge", [2.0, 2.0]), ("Judge.inner.score", [7.0, 7.0])],
)
def test_other_good_answers_and_targets(module: str, name: str, expected: list[float]) -> None:
    scores = _scores(name)
    assert scores == expected
    assert all(type(score) is float for score in scores)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("user_rewards:missing", "no attribute 'missing'"),
        ("user_rewards:Judge.missing", "no attribute 'missing'"),
        ("user_rewards:number", "number is a int, not callable"),
        ("broken_rewards:f", "SyntaxError"),
        ("failing_rewards:f", "RuntimeError: no key file"),
    ],
)
def test_wrong_targets(module: str, target: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        RewardFunction(target)
    assert target in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", "raised KeyError: 'gold'"),
        ("leaves", "raised SystemExit: 0"),
        ("short", "returned 1 scores for 2 responses"),
        ("nan", "returned nan for the response 'c'"),
        ("infinite", "returned -inf for the response 'c'"),
        ("over_fp32", r"returned -1e\+300 for the response 'c'"),
        ("words", "must return a list of numbers"),
        ("digits", "must return a list of numbers, got str"),
        ("numerals", "must return a list of numbers"),
        ("table", "must return a list of numbers, got dict"),
        ("none", "must return a list of numbers"),
        ("huge", "must return a list of numbers"),
        ("one", "must return a list of numbers, got float"),
        ("no_meta", "raised TypeError: .*gold"),
    ],
)
def test_wrong_answers(module: str, name: str, words: str) -> None:
    with pytest.raises(MrlhfError, match=words) as caught:
        _scores(name)
    assert f"user_rewards:{name}" in str(caught.value)


def test_a_field_named_like_an_argument(module: str) -> None:
    with pytest.raises(MrlhfError, match="user_rewards:lengths raised TypeError: .*responses"):
        _scores("lengths", {"responses": ["x", "y"]})


def test_no_responses(module: str) -> None:
    assert RewardFunction("user_rewards:lengths").scores([], [], {}) == []
    assert torch.tensor(_scores("lengths")).tolist() == [2.0, 1.0]


def test_an_error_shows_the_line_of_the_function(module: str) -> None:
    with pytest.raises(MrlhfError, match=r"user_rewards.*line \d+, in raises") as caught:
        _scores("raises")
    assert "roles/reward.py" not in str(caught.value)


def test_fields_that_a_function_cannot_take_are_refused_before_it_is_called(module: str) -> None:
    with pytest.raises(ConfigError, match=r"user_rewards:raises.*\(answer, id\).*accept \*\*meta"):
        RewardFunction("user_rewards:raises").check_fields({"id", "answer"})
    with pytest.raises(ConfigError, match=r"no_meta.*\(none\).*gold"):
        RewardFunction("user_rewards:no_meta").check_fields(set())
    RewardFunction("user_rewards:no_meta").check_fields({"gold"})
    RewardFunction("user_rewards:lengths").check_fields({"anything"})


def test_retries(module: str) -> None:
    function = RewardFunction("user_rewards:third_time", retries=2, backoff_seconds=0.01)
    assert function.scores(["p", "q"], ["ab", "c"], {}) == [1.0, 2.0]
    calls = sys.modules[module].calls
    assert calls == [2, 2, 2]
    calls.clear()
    function = RewardFunction("user_rewards:third_time", retries=1, backoff_seconds=0.01)
    with pytest.raises(MrlhfError, match=r"must return a list of numbers(.|\n)*the last of 2 calls"):
        function.scores(["p", "q"], ["ab", "c"], {})
    assert calls == [2, 2]
    calls.clear()
    with pytest.raises(MrlhfError, match="third_time raised ConnectionError: busy"):
        _scores("third_time")
    assert calls == [2], "no second call unless asked for"
