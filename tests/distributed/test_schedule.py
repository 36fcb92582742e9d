"""Loss and gradient under every split and layout, against the unsharded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.megatron_tools import (
    PP2,
    PP4,
    SP,
    TP2,
    VPP2,
    Batch,
    Layout,
    Reference,
    accumulate,
    assert_gradients_close,
    build,
    count,
    gradient_norm,
    make_rows,
    micro_batches,
    request,
    total_loss,
    weighted_nll,
    whole_gradient,
)
from tools.make_tiny_model import make_tiny_model

LAYOUTS = {
    "micro1": Layout(rows=1),
    "micro2": Layout(rows=2),
    "micro4": Layout(rows=4),
    "dp2": Layout(2, rows=1),
    "tp2": Layout(2, TP2),
    "tp2sp": Layout(2, TP2 | SP),
    "pp2-micro1": Layout(2, PP2, rows=1),
    "pp2-micro4": Layout(2, PP2, rows=4),
    "pp4": Layout(4, PP4),
    "pp2vpp2": Layout(2, PP2 | VPP2),
    "tp2sp-pp2vpp2": Layout(4, TP2 | SP | PP2 | VPP2, rows=1),
    "dp2-pp2": Layout(4, PP2),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("schedule")
    return {
        name: make_tiny_model(root / name, tied=name == "tied", tokenizer=False, seed=4) for name in ("untied", "tied")
    }


@pytest.fixture(scope="module")
def references(paths: dict[str, Path]) -> dict[str, tuple[float, dict[str, torch.Tensor]]]:
    result = {}
    for name, path in paths.items():
        reference, rows = Reference(path), make_rows()
        loss = reference.accumulate(rows, count(rows))
        result[name] = (loss, reference.named(gradients=True))
    return result


def _gradients(path: Path, layout: Layout, out: Path) -> tuple[float, float, Any]:
    from mrlhf.megatron.optimizer import AdamSettings, Trainable

    config, groups, chunks = build(path, layout.sizes)
    trainable = Trainable(chunks, groups, AdamSettings(lr=1e-3, clip_grad=0.0))
    rows = make_rows()
    loss = total_loss(accumulate(trainable, rows, layout.rows, count(rows)), groups)
    gradients = whole_gradient(trainable, config, path, out)
    updated, norm = trainable.step()
    assert updated
    return loss, norm, gradients


@pytest.mark.parametrize(
    ("name", "layout"),
    [("untied", layout) for layout in LAYOUTS]
    + [("tied", layout) for layout in ("tp2sp", "pp2-micro1", "pp4", "pp2vpp2")],
)
def test_loss_and_gradient_are_those_of_the_unsharded_model(
    run_ranks: Any, paths: Any, references: Any, tmp_path: Path, name: str, layout: str
) -> None:
    expected_loss, expected = references[name]
    results = run_ranks(_gradients, LAYOUTS[layout].world, paths[name], LAYOUTS[layout], tmp_path / "out")
    assert_gradients_close(results[0][2], expected, rtol=2e-5)
    for loss, norm, _ in results:
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert norm == pytest.approx(gradient_norm(expected), rel=1e-5)


def _logprobs(path: Path, sizes: dict[str, Any], lengths: list[int]) -> list[torch.Tensor]:
    from mrlhf.megatron.schedule import forward_only

    _, groups, chunks = build(path, sizes, trainable=False)
    return forward_only(
        chunks,
        micro_batches(make_rows(lengths), 1, groups.tp.size()),
        lambda batch, out: torch.where(batch.wanted, out, torch.nan),
        groups=groups,
        tokens=lambda batch: batch.tokens,
        request=request,
    )


# One and three micro-batches do not fill the groups of two in which the interleaved schedule works.
@pytest.mark.parametrize(
    ("sizes", "lengths"),
    [
        (PP2, [7, 12]),
        (PP4, [7, 12]),
        (PP2 | VPP2, [12]),
        (PP2 | VPP2, [7, 12]),
        (PP2 | VPP2, [16, 5, 9]),
        (TP2 | SP | PP2, [7, 12]),
    ],
    ids=["pp2", "pp4", "pp2vpp2-one", "pp2vpp2-two", "pp2vpp2-three", "tp2sp-pp2"],
)
def test_b8_widths_that_differ(
    run_ranks: Any, paths: dict[str, Path], sizes: dict[str, int], lengths: list[int]
) -> None:
    world = 4 if sizes in (PP4, TP2 | SP | PP2) else 2
    reference = Reference(paths["untied"])
    results = run_ranks(_logprobs, world, paths["untied"], sizes, lengths)
    last = [r for r in results if r]
    assert len(last) == (2 if "tensor_model_parallel_size" in sizes else 1)
    assert results[0] == []
    for outputs in last:
        assert len(outputs) == len(lengths)
        for row, ours in zip(make_rows(lengths), outputs, strict=True):
            with torch.no_grad():
                expected = torch.where(row.wanted, reference.logprobs(row), torch.nan)
            torch.testing.assert_close(ours[:, : row.tokens.size(1)], expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def _train_widths(path: Path, sizes: dict[str, Any], out: Path) -> Any:
    from mrlhf.megatron.optimizer import AdamSettings, Trainable

    config, groups, chunks = build(path, sizes)
    trainable = Trainable(chunks, groups, AdamSettings(lr=1e-3))
    rows = make_rows([7, 12])
    accumulate(trainable, rows, 1, count(rows))
    return whole_gradient(trainable, config, path, out)


@pytest.mark.parametrize(("world", "sizes"), [(2, PP2), (4, PP4), (2, PP2 | VPP2)], ids=["pp2", "pp4", "pp2vpp2"])
def test_b8_widths_that_differ_backward(
    run_ranks: Any, paths: dict[str, Path], tmp_path: Path, world: int, sizes: dict[str, int]
) -> None:
    reference, rows = Reference(paths["untied"]), make_rows([7, 12])
    reference.accumulate(rows, count(rows))
    ours = run_ranks(_train_widths, world, paths["untied"], sizes, tmp_path / "out")[0]
    assert_gradients_close(ours, reference.named(gradients=True), rtol=2e-5)


def _details(path: Path, sizes: dict[str, Any]) -> dict[str, Any]:
    from mrlhf.megatron.optimizer import AdamSettings, Trainable
    from mrlhf.megatron.schedule import forward_backward, forward_only

    _, groups, chunks = build(path, sizes)
    trainable = Trainable(chunks, groups, AdamSettings(lr=1e-3))
    rows = make_rows()
    common: dict[str, Any] = {"groups": groups, "tokens": lambda batch: batch.tokens, "request": request}
    plain: list[float] = []

    def loss(batch: Batch, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value, _ = weighted_nll(batch, out)
        plain.append(float(value))
        return value, value

    metrics = forward_backward(trainable.chunks, micro_batches(rows, 2), loss, 7.0, **common)

    def largest() -> float:
        return max(float(p.main_grad.abs().max()) for m in trainable.modules for p in m.parameters())

    before = largest()
    trainable.zero_grad()
    empty = [Batch(b.tokens, b.targets, torch.zeros_like(b.wanted), b.weights) for b in micro_batches(rows, 2)]
    nothing = forward_backward(trainable.chunks, empty, weighted_nll, 0.0, **common)
    after = largest()
    updated, norm = trainable.step()
    message = ""
    if len(chunks) > 1:
        with pytest.raises(ValueError, match="micro-batches") as caught:
            forward_backward(trainable.chunks, micro_batches(rows[:3], 1), weighted_nll, 1.0, **common)
        message = str(caught.value)
    return {
        "metrics": [float(m) for m in metrics],
        "plain": plain,
        "gradient": (before, after),
        "nothing": [float(n) for n in nothing],
        "step": (updated, norm),
        "finite": all(bool(p.isfinite().all()) for m in trainable.modules for p in m.parameters()),
        "message": message,
        "empty": forward_only(chunks, [], lambda _, out: out, **common),
    }


@pytest.mark.parametrize(("world", "sizes"), [(1, {}), (2, PP2), (2, PP2 | VPP2)], ids=["pp1", "pp2", "pp2vpp2"])
def test_metrics_empty_minibatches_and_refusals(
    run_ranks: Any, paths: dict[str, Path], world: int, sizes: dict[str, int]
) -> None:
    results = run_ranks(_details, world, paths["untied"], sizes)
    last = results[-1]
    assert len(last["metrics"]) == 4
    assert last["metrics"] == last["plain"]  # Megatron scales what it is given, in place
    assert last["nothing"] == [0.0] * 4
    for result in results[:-1]:
        assert result["metrics"] == result["plain"] == []
    for result in results:
        assert result["gradient"][0] > 0.1
        assert result["gradient"][1] == 0.0
        assert result["step"] == (True, 0.0)
        assert result["finite"]
        assert result["empty"] == []
        if VPP2.items() <= sizes.items():
            assert result["message"] == (
                "3 micro-batches; with virtual pipeline stages they must be a multiple of "
                "pipeline_model_parallel_size 2"
            )
