"""Shared fixtures: recorded data and the rank runner."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import settings

# The first call of a torch function takes longer than any later one, most of all on a busy machine.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder with recorded numbers and tiny checkpoints."""
    return DATA


@pytest.fixture(scope="session")
def ds_chat_functions() -> dict[str, Any]:
    """Recorded outputs of DeepSpeed-Chat's step-3 functions, float64."""
    recorded: dict[str, Any] = json.loads((DATA / "ds_chat_functions.json").read_text())
    return recorded


@pytest.fixture
def run_ranks() -> Callable[..., list[Any]]:
    """See `tests.ranks.run_ranks`."""
    from tests.ranks import run_ranks as runner

    return runner
