"""Errors that a user can act on: each carries one complete message and is shown without a traceback."""

from __future__ import annotations

from collections.abc import Sequence


class MrlhfError(Exception):
    """Base of every error whose message alone tells the user what to change; the command line exits with 2."""


class ConfigError(MrlhfError):
    """The configuration, the launch environment or the sizes do not fit together."""


class DataError(MrlhfError):
    """A data file or a tokenizer is missing or malformed; the message names the file and the physical line."""


class CheckpointError(MrlhfError):
    """A checkpoint is missing, incomplete or does not match the model; the message names the tensor or the file."""


class RewardError(MrlhfError):
    """A reward function or server failed, on some rank and for good; every rank raises this together."""


def join_problems(headline: str, problems: Sequence[str]) -> str:
    """One message for several problems: the headline, then one indented line each."""
    return "\n".join([headline, *(f"  - {problem}" for problem in problems)])
