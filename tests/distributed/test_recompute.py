"""Recomputed layers and parts of them: the same gradients, and less that is kept."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.megatron_tools import PP2, SP, TP2, VPP2, Layout, accumulate, build, count, make_rows
from tests.distributed.moe_tools import EP2, write_moe
from tests.ranks import run_ranks
from tools.make_tiny_model import make_tiny_model

LAYOUTS = {
    "one": Layout(),
    "tp2sp": Layout(2, TP2 | SP),
    "pp2": Layout(2, PP2),
    "tp2sp-pp2vpp2": Layout(4, TP2 | SP | PP2 | VPP2, rows=1),
}
PARTS = ("core_attn", "layernorm", "mlp", "moe")
KINDS: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute": True},
    "parts": {"recompute_modules": PARTS},
    **{part: {"recompute_modules": (part,)} for part in PARTS},
}


def gradients(
    path: Path, layout: Layout, dropout: float, packed: bool, options: dict[str, Any]
) -> tuple[float, list[torch.Tensor], dict[str, int]]:
    """Loss and gradients of this rank's weights, and how often layers, norms and feed-forward parts were entered."""
    from mrlhf.megatron import device
    from mrlhf.megatron.optimizer import AdamSettings, Trainable

    _, groups, chunks = build(path, layout.sizes, dropout=dropout, **options)
    device.seed_rng_tracker(5, groups.tp.rank(), pp_rank=groups.pp.rank(), dp_rank=groups.dp.rank())
    trainable = Trainable(chunks, groups, AdamSettings(lr=1e-3))
    trainable.train(True)
    calls: dict[str, int] = {}

    def entered(name: str, *_: Any) -> None:
        """One more."""
        calls[name] = calls.get(name, 0) + 1

    for layer in (layer for chunk in trainable.modules for layer in chunk.decoder.layers):
        # A mixture of experts is entered once; what is in it is computed again.
        feed_forward = {"moe": layer.mlp.router} if hasattr(layer.mlp, "router") else {"mlp": layer.mlp}
        parts = {"layer": layer, "layernorm": layer.input_layernorm, **feed_forward}
        for name, module in (parts | {"core_attn": layer.self_attention.core_attention}).items():
            module.register_forward_pre_hook(partial(entered, name))
    rows = make_rows()
    lengths = (lambda batch: (batch.tokens > 0).sum(1)) if packed else None
    loss = accumulate(trainable, rows, layout.rows, count(rows), lengths=lengths)
    return loss, [p.main_grad.clone() for m in trainable.modules for p in m.parameters()], calls


def compared(path: Path, layout: Layout, dropout: float, packed: bool, kinds: list[str]) -> dict[str, Any]:
    """By kind: the loss, calls, whether there are gradients, and how far they are from those without."""
    found, plain = {}, None
    for kind in ["none", *kinds]:
        loss, grads, calls = gradients(path, layout, dropout, packed, KINDS[kind])
        plain = plain or grads
        pairs = [(one - other, one.abs().max()) for one, other in zip(plain, grads, strict=True)]
        away = max(float(difference.abs().max() / largest) for difference, largest in pairs if largest > 0)
        idle = any(bool(difference.any()) for difference, largest in pairs if largest == 0)
        found[kind] = (loss, calls, not idle and any(bool(g.any()) for g in grads), away)
    return found


def check(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        loss, once, _, _ = found["none"]
        for kind, (again, calls, any_gradient, away) in found.items():
            assert (again, any_gradient) == (loss, True), kind
            parts = KINDS[kind].get("recompute_modules", ())
            # Where torch's norm reads its input twice, the three terms of its gradient are summed in another order.
            assert away <= (1e-6 if "layernorm" in parts else 0.0), kind
            twice = calls if kind == "full" else parts
            assert calls == {name: number * (1 + (name in twice)) for name, number in once.items()}, kind
            assert all(calls.values())


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "dropout", "packed", "kinds"),
    [
        ("tp2sp-pp2vpp2", 0.1, False, ["full", "parts"]),
        ("tp2sp", 0.1, True, ["parts"]),
        pytest.param("tp2sp", 0.1, False, ["layernorm", "mlp", "core_attn"], marks=slow),
        pytest.param("tp2sp-pp2vpp2", 0.0, True, ["full", "parts"], marks=slow),
        pytest.param("pp2", 0.1, False, ["full", "parts", "layernorm", "mlp", "core_attn"], marks=slow),
        pytest.param("pp2", 0.1, True, ["full", "parts"], marks=slow),
        pytest.param("one", 0.1, False, ["full", "parts"], marks=slow),
    ],
)
def test_gradients_are_the_same(name: str, dropout: float, packed: bool, kinds: list[str], tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model", tokenizer=False, seed=4)
    check(run_ranks(compared, LAYOUTS[name].world, path, LAYOUTS[name], dropout, packed, kinds))


def test_mixtures_of_experts_too(tmp_path: Path) -> None:
    path = write_moe(tmp_path / "moe", "qwen3_moe")
    found = run_ranks(compared, 2, path, Layout(2, EP2), 0.1, False, ["parts"])
    check([{"none": each["none"], "parts": each["parts"]} for each in found])


def test_the_layout_is_that_without() -> None:
    from mrlhf.config_parallel import ParallelConfig

    # A run goes on bit for bit from a checkpoint of another choice.
    for recompute in ("full", "selective"):
        assert ParallelConfig(recompute=recompute).sizes(4) == ParallelConfig().sizes(4)
