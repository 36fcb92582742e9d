"""The recorded PPO trajectories, replayed whole under every parallel layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mrlhf.trainer.parity import replay
from mrlhf.trainer.recording import read_recording

DATA = Path(__file__).parents[1] / "data"
TP2, PP2 = "tensor_model_parallel_size=2", "pipeline_model_parallel_size=2"
VPP2, SP = "virtual_pipeline_model_parallel_size=2", "sequence_parallel=true"
CP2 = "context_parallel_size=2"
DISTRIBUTED = "optimizer.distributed=true"


def _own(override: str) -> str:
    return override.replace("=", ": ")


def _reward(layout: str) -> str:
    return f"reward.sources=[{{kind: model, path: FOLDER/reward, parallel: {{{_own(layout)}}}}}]"


LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "tp1": (1, ["ppo.micro_batch_size=2"]),
    "tp1-micro1": (1, ["ppo.micro_batch_size=1", "inference.micro_batch_size=1"]),
    "tp1-micro4": (1, ["ppo.micro_batch_size=4", "inference.micro_batch_size=3"]),
    "tp1-packed": (1, ["ppo.packing=true", "ppo.micro_batch_tokens=40", "inference.packing=true"]),
    "tp1-tokens": (1, ["ppo.micro_batch_tokens=45", "inference.micro_batch_tokens=50"]),
    "tp2": (2, [TP2]),
    "pp2": (2, [PP2]),
    "pp2-micro2": (2, [PP2, "ppo.micro_batch_size=2"]),
    "pp4": (4, ["pipeline_model_parallel_size=4"]),
    "dp2": (2, []),
    "dp2-micro2": (2, ["ppo.micro_batch_size=2"]),
    "dp4": (4, []),
    "tp2-pp2": (4, [TP2, PP2]),
    "dp2-tp2": (4, [TP2]),
    "dp2-pp2": (4, [PP2]),
    "pp2-vpp2": (2, [PP2, VPP2]),
    "pp2-vpp2-micro2": (2, [PP2, VPP2, "ppo.micro_batch_size=2"]),
    "tp2-sp": (2, [TP2, SP]),
    "tp2-sp-pp2": (4, [TP2, SP, PP2]),
    "tp2-pp2-vpp2": (4, [TP2, PP2, VPP2]),
    "dp2-distributed": (2, [DISTRIBUTED]),
    "dp2-tp2-sp-distributed": (4, [TP2, SP, DISTRIBUTED]),
    "pp2-distributed": (2, [PP2, DISTRIBUTED]),
    "dp2-pp2-vpp2-distributed": (4, [PP2, VPP2, DISTRIBUTED]),
    # The critic, or both it and the reward model, on the same ranks in layouts of their own.
    "tp2-critic-dp2": (2, [TP2, "critic.parallel={}", DISTRIBUTED]),
    "dp2-critic-tp2-reward-pp2": (2, [f"critic.parallel={{{_own(TP2)}, {_own(SP)}}}", _reward(PP2)]),
    "tp2-pp2-critic-pp4-reward-dp4": (4, [TP2, PP2, "critic.parallel={pipeline_model_parallel_size: 4}", _reward("")]),
    # Critic and reward model on ranks of their own.
    "split-1-1": (2, ["placement=split"]),
    "split-tp2-pp2": (4, [TP2, "placement=split", f"critic.parallel={{{_own(PP2)}}}", _reward(PP2)]),
    "split-dp2-dp2": (4, ["placement=split", "critic_ranks=2", DISTRIBUTED]),
    "split-pp2-tp2-reward-dp2": (
        4,
        [PP2, "placement=split", f"critic.parallel={{{_own(TP2)}, {_own(SP)}}}", _reward("")],
    ),
    "split-dp2-1": (3, ["placement=split"]),
    "cp2": (2, [CP2]),
    "cp2-tp2-sp": (4, [CP2, TP2, SP]),
    "cp2-pp2-distributed": (4, [CP2, PP2, DISTRIBUTED]),
    "cp2-dp2-distributed": (4, [CP2, DISTRIBUTED]),
    "pp2-uneven": (2, [PP2, "num_layers_in_first_pipeline_stage=3"]),
}


def _replay(folder: Path, overrides: list[str]) -> dict[str, tuple[float, float, int]]:
    report, _ = replay(read_recording(folder), [override.replace("FOLDER", str(folder)) for override in overrides])
    return {name: (row.deviation, row.tolerance, row.count) for name, row in report.rows.items()}


# One layout of each kind for both recordings; the rest for one of them, or with the slow tests.
QUICK = ("tp1", "tp1-packed", "tp2", "dp2", "tp2-pp2", "dp2-tp2", "pp2-vpp2", "tp2-sp", "dp2-critic-tp2-reward-pp2")
LONGER = ("tp1-micro1", "pp2-micro2", "dp2-micro2", "dp4", "pp2-vpp2-micro2", "pp2-distributed", "pp4", "dp2-pp2")
LONGER += ("tp2-sp-pp2", "split-1-1", "split-dp2-dp2", "split-pp2-tp2-reward-dp2", "split-dp2-1")
LONGER += ("cp2-tp2-sp", "cp2-pp2-distributed", "cp2-dp2-distributed", "tp2-pp2-critic-pp4-reward-dp4")
LONGER += ("dp2-tp2-sp-distributed", "tp2-pp2-vpp2")
CASES = [
    pytest.param(name, layout, marks=[] if layout in quick else pytest.mark.slow)
    for name, quick in (("standard_trajectory", LAYOUTS.keys() - LONGER), ("ds_chat_trajectory", QUICK))
    for layout in LAYOUTS
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_every_recorded_number(run_ranks: Any, name: str, layout: str) -> None:
    world, overrides = LAYOUTS[layout]
    for rows in run_ranks(_replay, world, DATA / name, overrides):
        # Two of the rows below would be empty if a comparison were lost.
        assert len(rows) == 29
        wrong = {key: row for key, row in rows.items() if not (row[0] <= row[1] and row[2] > 0)}
        assert not wrong


def _legal(layout: str, micro: int) -> bool:
    """Minibatches have four rows; virtual stages need at least PP (2) micro-batches, in multiples of it."""
    world, overrides = LAYOUTS[layout]
    model = 1
    for size in (TP2, PP2):
        model *= 2 if size in overrides else 1
    rows, rest = divmod(4, world // model * micro)
    return not rest and rows > 0 and (VPP2 not in overrides or rows % 2 == 0)


CROSSED = [
    (layout, micro)
    for layout in ("tp2", "pp2", "dp2", "tp2-pp2", "dp2-tp2", "pp2-vpp2", "tp2-sp", "dp2-distributed", "tp2-pp2-vpp2")
    for micro in (1, 2, 4)
    if _legal(layout, micro)
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "micro"), CROSSED)
@pytest.mark.parametrize("name", ["standard_trajectory", "ds_chat_trajectory"])
def test_every_recorded_number_with_every_micro_batch(run_ranks: Any, name: str, layout: str, micro: int) -> None:
    world, overrides = LAYOUTS[layout]
    given = [*overrides, f"ppo.micro_batch_size={micro}", f"inference.micro_batch_size={micro}"]
    for rows in run_ranks(_replay, world, DATA / name, given):
        assert len(rows) == 29
        assert not {key: row for key, row in rows.items() if not (row[0] <= row[1] and row[2] > 0)}
