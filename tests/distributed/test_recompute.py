"""Recomputed layers: the same gradients, and nothing kept but their inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.megatron_tools import PP2, SP, TP2, VPP2, Layout, accumulate, build, count, make_rows
from tests.ranks import run_ranks
from tools.make_tiny_model import make_tiny_model

LAYOUTS = {"one": Layout(), "tp2sp-pp2vpp2": Layout(4, TP2 | SP | PP2 | VPP2, rows=1)}


def gradients(path: Path, layout: Layout, recompute: bool, dropout: float) -> tuple[float, list[torch.Tensor], int]:
    """Loss and gradients of this rank's weights, and how often the layers were entered."""
    from mrlhf.megatron import device
    from mrlhf.megatron.optimizer import AdamSettings, Trainable

    _, groups, chunks = build(path, layout.sizes, recompute=recompute, dropout=dropout)
    device.seed_rng_tracker(5, groups.tp.rank(), pp_rank=groups.pp.rank(), dp_rank=groups.dp.rank())
    trainable = Trainable(chunks, groups, AdamSettings(lr=1e-3))
    trainable.train(True)
    calls: list[int] = []
    for chunk in trainable.modules:
        for layer in chunk.decoder.layers:
            layer.register_forward_pre_hook(lambda *_: calls.append(1))
    rows = make_rows()
    loss = accumulate(trainable, rows, layout.rows, count(rows))
    return loss, [p.main_grad.clone() for m in trainable.modules for p in m.parameters()], len(calls)


def compared(path: Path, layout: Layout, dropout: float) -> list[Any]:
    """Both choices on this rank: losses, calls of layers, whether there are gradients and they are the same bits."""
    (loss, plain, calls), (again, recomputed, twice) = (
        gradients(path, layout, flag, dropout) for flag in (False, True)
    )
    same = [torch.equal(one, other) for one, other in zip(plain, recomputed, strict=True)]
    return [loss, again, calls, twice, any(bool(g.abs().max() > 0) for g in plain), all(same)]


@pytest.mark.parametrize(
    ("name", "dropout"),
    [
        ("tp2sp-pp2vpp2", 0.1),
        pytest.param("tp2sp-pp2vpp2", 0.0, marks=pytest.mark.slow),
        pytest.param("one", 0.1, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_the_same_bits(name: str, dropout: float, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model", tokenizer=False, seed=4)
    layout = LAYOUTS[name]
    for loss, again, calls, twice, any_gradient, same in run_ranks(compared, layout.world, path, layout, dropout):
        assert loss == again
        assert twice == 2 * calls > 0
        assert any_gradient
        assert same


def test_the_layout_is_that_without() -> None:
    from mrlhf.config_sections import ParallelConfig

    # A run goes on bit for bit from a checkpoint of another choice.
    assert ParallelConfig(recompute=True).sizes(4) == ParallelConfig().sizes(4)
