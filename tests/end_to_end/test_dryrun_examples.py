"""The large examples, rank by rank, without GPUs: every rank of 70B, some of 405B."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LLAMA_70B, LLAMA_405B, REWARD_8B = 70_553_706_496, 405_853_388_800, 7_504_928_768
"""By the hand arithmetic of ``tests/unit/test_dryrun.py``."""


def dry_run(*args: str, cpu_seconds: float) -> dict[str, Any]:
    """What the command prints as JSON; it takes at most so many seconds of one core, however busy the machine is."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mrlhf", "dryrun", *args, "--json"],
        cwd=ROOT,
        env=environment,
        timeout=6 * cpu_seconds,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < cpu_seconds
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def messages(group: dict[str, Any], phase: str, kind: str) -> list[dict[str, Any]]:
    """Those of tensors; shapes go ahead of them as whole numbers."""
    found = group["phases"][phase]["messages"]
    return [m for m in found if m["kind"] == kind and m["dtype"] != "int64"]


@pytest.mark.slow
def test_every_rank_of_70b() -> None:
    answer = dry_run("examples/configs/ppo_70b.yaml", "--world-size", "32", "--rank", "all", cpu_seconds=600)
    counted = {role: model["parameters_of_all_ranks"] for role, model in answer["models"].items()}
    assert counted == {"actor": LLAMA_70B, "reference": LLAMA_70B, "critic": REWARD_8B, "reward0": REWARD_8B}
    assert sorted(rank for group in answer["ranks"] for rank in group["ranks"]) == list(range(32))
    assert len({group["passes_of"] for group in answer["ranks"]}) == 5
    for group in answer["ranks"]:
        stage = group["walked"] // 8
        assert group["models"]["actor"]["layers"] == 20
        train = group["phases"]["train/actor"]
        assert (train["times"], train["micro_batches"]) == (2, 128)
        # 2,047 tokens of a row and the slot after them are 8 x 256; 128 micro-batches pass each border both ways.
        for kind in ("send", "recv"):
            passed = messages(group, "train/actor", kind)
            assert sum(m["count"] for m in passed) == 128 * ((stage > 0) + (stage < 3))
            assert all(m["shape"] == [256, 1, 8192] and m["dtype"] == "bfloat16" for m in passed)
            assert {m["peer"] // 8 for m in passed} <= {stage - 1, stage + 1}
        # Under sequence parallelism a layer has two all-gathers and two reduce-scatters of its input in a forward pass.
        gathered = [m for m in messages(group, "inference/actor", "all_gather") if m["shape"] == [2048, 1, 8192]]
        assert sum(m["count"] for m in gathered) == 256 * (2 * 20 + (stage == 3))
        # A decoding step fills 128 rows up to nothing: they are 8 x 16 tokens.
        assert all(m["shape"] == [16, 1, 8192] for m in messages(group, "rollout/decode", "send"))
        # By formula: two bytes of each matrix, an fp32 scale each; the largest values of gathered inputs and gradients.
        matrices = (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672) // 8
        actor = group["models"]["actor"]["fp8"]
        assert (actor["layers"], actor["weights"]) == (20, 20 * (2 * matrices + 16))
        reductions = {"group": "tp", "ranks": 8, "forward": 40, "training": 80, "bytes": 4}
        assert actor["amax_all_reduces_of_a_micro_batch"] == reductions
        assert group["models"]["reference"]["fp8"]["weights"] == 20 * (matrices + 16)
    # bf16 weights and 12 bytes of fp32 a parameter, each written once, the vocabulary padded from 128,256 to 129,024.
    padding = 768 * (2 * 8192 + 4096)
    written = sum(group["checkpoint"]["written"] * len(group["ranks"]) for group in answer["ranks"])
    assert written == 14 * (LLAMA_70B + REWARD_8B + padding)


@pytest.mark.slow
def test_some_ranks_of_405b_on_1024() -> None:
    answer = dry_run("examples/configs/ppo_405b.yaml", "--world-size", "1024", "--rank", "0,1023", cpu_seconds=300)
    first, last = answer["ranks"]
    h, columns = 16384, 129_024 // 8
    layer = 2 * h * h // 8 + 2 * h * 128 + 3 * h * 53248 // 8 + 2 * h
    assert first["models"]["actor"]["parameters"] == 7 * layer + columns * h == 3_053_682_688
    assert last["models"]["actor"]["parameters"] == 7 * layer + columns * h + h
    assert first["models"]["critic"]["layers"] == 8
    for group, peers in ((first, {64}), (last, {959})):
        assert {m["peer"] for m in messages(group, "train/actor", "send")} == peers
        train = group["phases"]["train/actor"]
        assert (train["times"], train["micro_batches"]) == (2, 64)
        assert [m["ranks"] for m in messages(group, "train/actor", "reduce_scatter") if m["group"] == "dp"]
