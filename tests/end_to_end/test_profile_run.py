"""`trainer.profile`: files and table of a real iteration, and no number of the run moves."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from tests.end_to_end.test_ppo_run import TP2, Runs, _assert_same_run
from tests.tiny_run import read_lines


def test_a_profiled_run_is_the_same_run(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    plain = runs("plain", 2, TP2)
    profiled = runs("profiled", 2, TP2, "trainer.profile=[2,7]", "trainer.profile_ranks=[0,1]")
    _assert_same_run(profiled, plain, tolerance=0)
    names = {f"iteration-000002-rank{rank}{end}" for rank in (0, 1) for end in (".json", ".trace.json.gz")}
    assert {path.name for path in (profiled / "profile").iterdir()} == names
    assert not (plain / "profile").exists()
    phases = json.loads((profiled / "profile" / "iteration-000002-rank0.json").read_text())["phases"]
    assert [phase["phase"] for phase in phases] == ["rollout", "inference", "train"]
    for phase in phases:
        assert min(phase["kinds"][kind] for kind in ("matrix products", "attention", "collectives")) > 0
        measured = read_lines(profiled / "metrics.jsonl")[1][f"time_{phase['phase']}"]
        # The metric is the slower rank's.
        assert 0 < phase["seconds"] <= measured + 0.1
    with gzip.open(profiled / "profile" / "iteration-000002-rank1.trace.json.gz", "rt") as file:
        events = {event["name"] for event in json.load(file)["traceEvents"]}
    assert {"phase: rollout", "phase: train", "aten::mm"} <= events
