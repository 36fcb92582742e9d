"""Recomputed layers: the same gradients, and nothing kept but their inputs."""

from __future__ import annotations

from pathlib import Path

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
    plain, again = (run_ranks(gradients, layout.world, path, layout, flag, dropout) for flag in (False, True))
    for kept, recomputed in zip(plain, again, strict=True):
        assert kept[0] == recomputed[0]
        assert recomputed[2] == 2 * kept[2] > 0
        assert any(bool(g.abs().max() > 0) for g in kept[1])
        for one, other in zip(kept[1], recomputed[1], strict=True):
            assert torch.equal(one, other)


def test_the_layout_is_that_without() -> None:
    from mrlhf.config_sections import ParallelConfig

    # A run goes on bit for bit from a checkpoint of another choice.
    assert ParallelConfig(recompute=True).sizes(4) == ParallelConfig().sizes(4)
