"""Where the time goes: the breakdown of a profile by phase and kind of work."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from mrlhf.config_sections import OutputConfig
from mrlhf.progress import open_display
from mrlhf.trainer.profile import OTHER, OUTSIDE, Profiler, kind_of, phase_table, phase_times, unreached
from mrlhf.trainer.report import PhaseTimer


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "matrix products"),
        ("aten::mm", "matrix products"),
        ("aten::mul", OTHER),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("gloo:all_reduce", "collectives"),
        ("nccl:_reduce_scatter_base", "collectives"),
        ("aten::softmax", OTHER),
    ],
)
def test_kinds_of_work(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_the_time_of_a_phase_is_shared_out_by_kind_of_work() -> None:
    x, q = torch.randn(300, 300), torch.randn(1, 4, 200, 32)
    with open_display("off", 1, rank=1) as display, profile(activities=[ProfilerActivity.CPU]) as recorded:
        timer = PhaseTimer(display)
        with timer.phase("products"):
            for _ in range(20):
                x @ x
        with timer.phase("attention"):
            for _ in range(5):
                torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        x.sin()
        with timer.phase("asleep"):
            time.sleep(0.05)
            x.add(1.0)
    products, attention, asleep = phase_times(recorded.events())
    assert [products.phase, attention.phase, asleep.phase] == ["products", "attention", "asleep"]
    assert products.kinds["matrix products"] > 0.5 * products.seconds
    assert products.kinds.get("attention", 0.0) == 0
    assert attention.kinds["attention"] > 0.5 * attention.seconds
    assert asleep.kinds[OUTSIDE] > 0.04
    assert 0 < asleep.kinds[OTHER] < 0.01
    for phase in (products, attention, asleep):
        assert sum(phase.kinds.values()) == pytest.approx(phase.seconds, rel=1e-6)
        assert phase.seconds == pytest.approx(timer.seconds()[phase.phase], rel=0.2, abs=0.02)
    lines = phase_table([products, attention, asleep], "iteration 1").splitlines()
    cells = [cell.strip() for cell in lines[-1].split("|")][1:-1]
    assert cells[:2] == ["asleep", f"{asleep.seconds:.3f}"]
    assert cells[-1] == f"{100 * asleep.kinds[OUTSIDE] / asleep.seconds:.0f}%"


def test_iterations_and_ranks_that_are_not_there_are_named() -> None:
    assert unreached(OutputConfig(profile=(3, 5), profile_ranks=(0, 1)), 2, 5, 2) == []
    assert unreached(OutputConfig(profile_ranks=(7,)), 2, 5, 2) == []
    assert unreached(OutputConfig(profile=(2, 3, 9), profile_ranks=(1, 2, 8)), 2, 5, 2) == [
        "warning: trainer.profile: no iteration 2, 9 here, where iterations 3 to 5 run",
        "warning: trainer.profile_ranks: no rank 2, 8 here, the last one is 1",
    ]


def test_a_profile_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    messages: list[str] = []
    with Profiler(OutputConfig(profile=(1,)), tmp_path / "file", 0, messages.append).iteration(1):
        torch.ones(2) + 1
    assert len(messages) == 1
    assert "the profile could not be written" in messages[0]
    assert "perfetto" not in messages[0]


def test_one_number_is_enough() -> None:
    assert OutputConfig(profile=3).profile == (3,)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="profile"):
        OutputConfig(profile=0)  # type: ignore[arg-type]
