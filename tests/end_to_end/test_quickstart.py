"""The quickstart as a user runs it: from a corpus to a policy that is measurably better on held-out prompts."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.jobs import ROOT
from tests.tiny_run import read_lines


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_the_three_steps_learn(tmp_path: Path, seed: int) -> None:
    environment = {**os.environ, "SEED": str(seed), "RUN_DIR": str(tmp_path), "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", "examples/quickstart.sh", "trainer.progress=plain"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    sft = read_lines(tmp_path / "sft" / "metrics.jsonl")
    # From nothing: the first loss is that of equal chances over 400 ids.
    assert sft[0]["loss"] == pytest.approx(math.log(400), abs=0.3)
    assert sft[-1]["validation/perplexity"] < 1.7
    assert read_lines(tmp_path / "reward" / "metrics.jsonl")[-1]["validation/accuracy"] > 0.8
    after = json.loads((tmp_path / "eval" / "eval.json").read_text())
    assert after["prompts"] == 64
    assert after["difference"] > 2 * after["difference_stderr"], after
    assert after["win_rate"] > 0.6
    # A policy that answers friendly only is log 2 = 0.69 away. It goes further, since the reward model likes some of
    # those answers better than others, but not on and on.
    ppo = read_lines(tmp_path / "ppo" / "metrics.jsonl")
    assert 0.05 < after["kl_sequence"] < 6
    assert after["kl_sequence"] < 2 * ppo[9]["eval/kl_sequence"]
    # The training's own last evaluation is the same measurement of the same model.
    assert ppo[-1]["eval/score_mean"] == pytest.approx(after["score_mean"], rel=1e-4, abs=1e-4)
    assert "before (reference)" in done.stderr
    assert "standard errors" in done.stdout
