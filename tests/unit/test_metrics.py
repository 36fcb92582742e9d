"""Metrics add up over parts and ranks, and what is written can be read."""

import io
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mrlhf.errors import ConfigError
from mrlhf.metrics import JsonlWriter, MetricAccumulator, WandbWriter, open_writers
from mrlhf.progress import OffDisplay, PlainDisplay, RichDisplay, open_display
from mrlhf.types import Metric


def test_parts_of_unequal_size_weigh_by_their_count() -> None:
    metrics = MetricAccumulator()
    metrics.mean("loss", torch.tensor(3.0), torch.tensor(1))
    metrics.mean("loss", 1.0, 3)
    metrics.add({"ratio": Metric("max", torch.tensor(1.5), 2)}, prefix="policy/")
    metrics.max("policy/ratio", 1.25)
    metrics.min("low", 0.5)
    metrics.min("low", torch.tensor(0.25))
    assert metrics.results() == {"loss": 1.0, "policy/ratio": 1.5, "low": 0.25}


def test_nan_surfaces_and_empty_is_nan() -> None:
    metrics = MetricAccumulator()
    for value in (1.0, math.nan, 2.0):
        metrics.max("peak", value)
        metrics.min("low", value)
        metrics.mean("mean", value)
    metrics.mean("empty", 0.0, 0)
    assert all(math.isnan(value) for value in metrics.results().values())


def test_another_reduction_under_one_name_is_refused() -> None:
    metrics = MetricAccumulator()
    metrics.mean("a", 1.0)
    with pytest.raises(ValueError, match="mean here and by max there"):
        metrics.max("a", 1.0)


def test_jsonl_is_valid_json_also_for_nan(tmp_path: Path) -> None:
    path = tmp_path / "out" / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.write(1, {"loss": 0.5, "bad": math.nan, "worse": -math.inf, "count": 3})

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    # Readable before the writer is closed.
    rows = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert rows == [
        {"step": 1, "loss": 0.5, "bad": None, "worse": None, "count": 3, "nonfinite": {"bad": "nan", "worse": "-inf"}}
    ]
    writer.close()
    again = JsonlWriter(path, append=True)
    again.write(2, {"loss": 0.25})
    again.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_tensorboard_holds_the_same_numbers(tmp_path: Path) -> None:
    writers = open_writers(tmp_path, tensorboard=True, wandb=False)
    for step in (1, 2):
        writers.write(step, {"reward": step / 2, "note": "text"})
    writers.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward"]
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(1, 0.5), (2, 1.0)]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_wandb_missing_is_said_before_anything_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").write_text("old\n")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'mrlhf\[wandb\]'"):
        open_writers(tmp_path, tensorboard=False, wandb=True)
    assert (tmp_path / "metrics.jsonl").read_text() == "old\n"


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    writer = WandbWriter(tmp_path, run_id="abc123")
    writer.write(1, {"reward": 1.0})
    assert writer.run_id == "abc123"
    writer.close()


def test_display_kinds() -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True)
    log = Console(file=io.StringIO(), force_terminal=False)
    assert isinstance(open_display("auto", 3, console=terminal), RichDisplay)
    assert type(open_display("auto", 3, console=log)) is PlainDisplay
    assert isinstance(open_display("rich", 3, console=log), RichDisplay)
    assert type(open_display("off", 3, console=terminal)) is OffDisplay
    assert type(open_display("rich", 3, rank=1, console=terminal)) is OffDisplay


@pytest.mark.parametrize("mode", ["plain", "rich"])
def test_display_shows_the_numbers(mode: str) -> None:
    out = io.StringIO()
    console = Console(file=out, width=160, force_terminal=mode == "rich")
    with open_display(mode, 4, console=console) as display:
        display.phase("rollout")
        display.iteration(2, {"score_mean": 0.5, "kl_k1": 0.01, "tokens_per_second": 12345.6})
    text = out.getvalue()
    for part in ("2/4", "score 0.500", "KL 0.0100", "tokens/s 12,346", "ETA 0:00:00"):
        assert part in text
    assert ("rollout" in text) == (mode == "rich")
