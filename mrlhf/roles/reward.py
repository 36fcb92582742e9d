"""Where scores come from: reward models and Python functions."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, Protocol

import tenacity
import torch

from mrlhf.errors import ConfigError, MrlhfError
from mrlhf.roles.micro_batches import Cut
from mrlhf.roles.model import RoleModel
from mrlhf.types import RolloutBatch, gather_rows

LONGEST_WAIT = 30.0
"""Seconds between two tries."""


class RewardModel(RoleModel):
    """A frozen one-label classifier, read at the last response token."""

    def scores(self, batch: RolloutBatch, cut: Cut) -> torch.Tensor:
        """``[B]`` fp32: the model's number after the last response token (of the prompt, where there is none)."""
        return gather_rows(self.inferred(batch, cut), batch.lengths - 1)


class ScoreSource(Protocol):
    """Scores from text: a Python function or a server."""

    name: str
    """What its metrics are called."""

    def check_fields(self, fields: Set[str]) -> None:
        """Refuse, before anything is sampled, prompts with other fields than the source can take."""
        ...

    def scores(
        self, prompts: Sequence[str], responses: Sequence[str], meta: Mapping[str, Sequence[Any]]
    ) -> list[float]:
        """One finite number for each response; raises `MrlhfError`."""
        ...


class RewardFunction:
    """A Python function ``target(prompts, responses, **meta) -> list[float]``.

    ``prompts`` and ``responses`` are lists of strings; ``meta`` has one list for each other field of the prompt file
    (None where a line lacks it).
    """

    def __init__(self, target: str, *, retries: int = 0, backoff_seconds: float = 0.5) -> None:
        """Import the function.

        Args:
            target: ``package.module:callable``; modules of the current directory can be named.
            retries: further calls after one that raised, or answered anything but finite numbers.
            backoff_seconds: wait before the second call; it doubles up to half a minute.

        Raises:
            ConfigError: no such module or attribute, or it cannot be called.
        """
        self.target, self.retries, self.backoff_seconds = target, retries, backoff_seconds
        self.name = target.rpartition(":")[2]
        module_name, _, attribute = target.partition(":")
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            found: Any = importlib.import_module(module_name)
            for part in attribute.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"reward function {target}: {error}") from error
        except Exception as error:
            raise ConfigError(
                f"reward function {target}: importing {module_name} raised {type(error).__name__}: {error}"
            ) from error
        if not callable(found):
            raise ConfigError(f"reward function {target}: {attribute} is a {type(found).__name__}, not callable")
        self.function: Callable[..., Any] = found

    def check_fields(self, fields: Set[str]) -> None:
        """Refuse a function that cannot take the fields of the prompt file, before anything is sampled.

        Raises:
            ConfigError: the message names the fields.
        """
        try:
            inspect.signature(self.function).bind([], [], **dict.fromkeys(fields, []))
        except TypeError as error:
            listed = ", ".join(sorted(fields)) or "none"
            raise ConfigError(
                f"reward function {self.target}: it is called as (prompts, responses, **meta), with the other fields "
                f"of the prompt file ({listed}), and does not take them: {error}; accept **meta"
            ) from error
        except ValueError:
            # Some built-in callables have no signature to look at.
            return

    def scores(
        self, prompts: Sequence[str], responses: Sequence[str], meta: Mapping[str, Sequence[Any]]
    ) -> list[float]:
        """One finite number for each response.

        Raises:
            MrlhfError: the function raised, or answered anything else, in all its calls; the message names it and the
                response of the last one.
        """
        tries = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self.retries + 1),
            wait=tenacity.wait_exponential(multiplier=self.backoff_seconds, max=LONGEST_WAIT),
            retry=tenacity.retry_if_exception_type(MrlhfError),
            reraise=True,
        )
        try:
            return tries(self._call, prompts, responses, meta)
        except MrlhfError as error:
            count = tries.statistics.get("attempt_number", 1)
            if count == 1:
                raise
            raise MrlhfError(f"{error}\nThis was the last of {count} calls.") from error

    def _call(self, prompts: Sequence[str], responses: Sequence[str], meta: Mapping[str, Sequence[Any]]) -> list[float]:
        try:
            answer = self.function(list(prompts), list(responses), **{k: list(v) for k, v in meta.items()})
            # A generator runs, and may raise, only now.
            answer = list(answer) if isinstance(answer, Iterator) else answer
        except (Exception, SystemExit) as error:
            # sys.exit() in a user's function would end the run with its status, perhaps 0, and without a word.
            where = "".join(traceback.format_tb(error.__traceback__)[1:]).rstrip()
            raise MrlhfError(
                f"reward function {self.target} raised {type(error).__name__}: {error}"
                + (f"\n{where}" if where else "")
            ) from error
        return checked_scores(answer, responses, f"reward function {self.target}")


def checked_scores(answer: Any, responses: Sequence[str], source: str) -> list[float]:
    """The answer of a reward source as one finite number for each response.

    Args:
        answer: whatever it answered.
        responses: what it was asked about.
        source: its name, for messages.

    Raises:
        MrlhfError: the answer is anything else.
    """
    try:
        # float() would read numbers from text, and a table or a set has no order of responses.
        if isinstance(answer, (str, bytes, Mapping, Set)) or any(isinstance(s, (str, bytes)) for s in answer):
            raise TypeError("these are not numbers in the order of the responses")
        scores = [float(score) for score in answer]
    except (TypeError, ValueError, OverflowError) as error:
        raise MrlhfError(f"{source} must return a list of numbers, got {type(answer).__name__}: {error}") from error
    if len(scores) != len(responses):
        raise MrlhfError(f"{source} returned {len(scores)} scores for {len(responses)} responses")
    for score, response in zip(scores, responses, strict=True):
        # Scores are kept in fp32, where a larger number is infinite.
        if not abs(score) <= torch.finfo(torch.float32).max:
            raise MrlhfError(f"{source} returned {score} for the response {response[:200]!r}")
    return scores
