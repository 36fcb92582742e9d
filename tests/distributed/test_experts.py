"""Mixture-of-experts models under expert parallelism, against transformers' unsharded ones in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mrlhf.megatron.optimizer import AdamSettings
from tests.distributed.megatron_tools import (
    PP2,
    VPP2,
    Layout,
    Reference,
    accumulate,
    assert_gradients_close,
    build,
    count,
    gradient_norm,
    make_rows,
    total_loss,
    whole,
    whole_gradient,
)
from tests.distributed.moe_tools import EP2, EP4, ETP1, FAMILIES, TP2SP, by_expert, write_moe

STEPS = 2
SETTINGS = AdamSettings(lr=1e-2, total_steps=4, weight_decay=0.1, beta1=0.8, beta2=0.9, eps=1e-3, clip_grad=0.5)
LAYOUTS = {
    "ep1-dp2": Layout(2),
    "ep2": Layout(2, EP2),
    "ep2-distributed": Layout(2, EP2, distributed=True),
    "tp2sp": Layout(2, TP2SP),
    "tp2sp-ep2etp1": Layout(2, TP2SP | EP2 | ETP1, distributed=True),
    "ep2-pp2": Layout(4, EP2 | PP2),
    "ep2-pp2vpp2-distributed": Layout(4, EP2 | PP2 | VPP2, distributed=True),
    "ep2-dp4-distributed": Layout(4, EP2, distributed=True),
    "tp2sp-ep4etp1": Layout(4, TP2SP | EP4 | ETP1),
    "tp2sp-ep2etp2": Layout(4, TP2SP | EP2),
    "cp2-ep2": Layout(4, EP2 | {"context_parallel_size": 2}),
}
QUICK = {"mixtral": ("ep2", "tp2sp-ep2etp1", "ep2-pp2"), "qwen3_moe": ("ep2-distributed", "tp2sp-ep4etp1")}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("experts")
    return {family: write_moe(root / family, family, seed=3) for family in FAMILIES}


def reference_run(path: Path, family: str) -> dict[str, Any]:
    """Losses, gradient norms before clipping, the first gradient, and the weights after the steps."""
    reference, rows = Reference(path), make_rows()
    parameters = list(reference.model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": SETTINGS.weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=SETTINGS.lr, betas=(SETTINGS.beta1, SETTINGS.beta2), eps=SETTINGS.eps)
    result: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(STEPS):
        result["losses"].append(reference.accumulate(rows, count(rows)))
        if step == 0:
            result["gradient"] = by_expert(reference.named(gradients=True), family)
        result["norms"].append(float(torch.nn.utils.clip_grad_norm_(parameters, SETTINGS.clip_grad)))
        optimizer.step()
    return result | {"weights": by_expert(reference.named(), family)}


@pytest.fixture(scope="module")
def references(paths: dict[str, Path]) -> dict[str, Any]:
    return {family: reference_run(path, family) for family, path in paths.items()}


def train(path: Path, layout: Layout, out: Path) -> dict[str, Any]:
    from mrlhf.megatron.optimizer import Trainable

    config, groups, chunks = build(path, layout.sizes)
    trainable = Trainable(chunks, groups, SETTINGS, distributed_optimizer=layout.distributed)
    rows = make_rows()
    result: dict[str, Any] = {"losses": [], "norms": []}
    trainable.train()
    for step in range(STEPS):
        part = accumulate(trainable, rows, layout.rows, count(rows))
        result["losses"].append(total_loss(part if groups.cp.rank() == 0 else 0.0, groups))
        if step == 0 and not layout.distributed:
            result["gradient"] = whole_gradient(trainable, config, path, out)
        result["norms"].append(trainable.step()[1])
    result["weights"] = whole(trainable.modules, config, path, groups, out)
    return result


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(family, layout, marks=() if layout in QUICK[family] else pytest.mark.slow)
        for family in FAMILIES
        for layout in LAYOUTS
    ],
)
def test_steps_are_those_of_one_process(
    run_ranks: Any, paths: Any, references: Any, tmp_path: Path, family: str, layout: str
) -> None:
    expected, chosen = references[family], LAYOUTS[layout]
    assert min(expected["norms"]) > 2 * SETTINGS.clip_grad  # clipping has work to do
    results = run_ranks(train, chosen.world, paths[family], chosen, tmp_path / "out")
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    if not chosen.distributed:
        assert_gradients_close(results[0]["gradient"], expected["gradient"], rtol=2e-5)
        assert gradient_norm(results[0]["gradient"]) == pytest.approx(expected["norms"][0], rel=1e-5)
    for name, value in expected["weights"].items():
        torch.testing.assert_close(results[0]["weights"][name], value, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("distributed", [False, True])
def test_a_stage_without_experts(run_ranks: Any, tmp_path: Path, distributed: bool) -> None:
    """Its optimizer of experts has nothing to do, and its ranks must follow the others all the same."""
    path = write_moe(tmp_path / "model", "qwen3_moe", seed=3, mlp_only_layers=[0, 1])
    expected = reference_run(path, "qwen3_moe")
    layout = Layout(4, EP2 | PP2, distributed=distributed)
    results = run_ranks(train, layout.world, path, layout, tmp_path / "out")
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    for name, value in expected["weights"].items():
        torch.testing.assert_close(results[0]["weights"][name], value, rtol=1e-5, atol=1e-5, msg=name)


def half(path: Path, layout: Layout, dtype: torch.dtype) -> dict[str, Any]:
    """The first step that is not skipped for its loss scale: loss, norm, skipped ones, kinds of numbers."""
    from mrlhf.megatron.optimizer import Trainable

    _, groups, chunks = build(path, layout.sizes, dtype=dtype)
    trainable = Trainable(chunks, groups, SETTINGS, distributed_optimizer=layout.distributed)
    rows = make_rows()
    trainable.train()
    skipped = -1
    updated = False
    while not updated and skipped < 10:
        skipped += 1
        loss = total_loss(accumulate(trainable, rows, layout.rows, count(rows)), groups)
        updated, norm = trainable.step()
    kinds = {p.dtype for chunk in trainable.modules for p in chunk.parameters()}
    scales = [o.get_loss_scale().item() for o in trainable.optimizer.chained_optimizers if dtype is torch.float16]
    return {"loss": loss, "norm": norm, "skipped": skipped, "updated": updated, "kinds": kinds, "scales": set(scales)}


@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=pytest.mark.slow), torch.float16])
def test_half_precision_is_near(run_ranks: Any, paths: Any, references: Any, dtype: torch.dtype) -> None:
    """Near one rank in the same format, and fp32: where rounding changes a token's expert, its gradient is another."""
    exact = references["mixtral"]
    layout = Layout(2, EP2, distributed=dtype is torch.bfloat16)
    (alone,) = run_ranks(half, 1, paths["mixtral"], Layout(), dtype)
    assert alone["loss"] == pytest.approx(exact["losses"][0], rel=0.02)
    assert alone["norm"] == pytest.approx(exact["norms"][0], rel=0.15)
    for result in run_ranks(half, layout.world, paths["mixtral"], layout, dtype):
        assert result["updated"]
        assert result["kinds"] == {dtype}
        # The optimizers of dense parameters and experts have overflows of their own, but one loss scale.
        assert len(result["scales"]) == (dtype is torch.float16)
        assert result["loss"] == pytest.approx(alone["loss"], rel=0.01)
        assert result["norm"] == pytest.approx(alone["norm"], rel=0.05)
