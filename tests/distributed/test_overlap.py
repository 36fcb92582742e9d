"""Gradients that are summed over replicas beside the backward pass: the same sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.megatron_tools import PP2, SP, TP2, VPP2, Layout, accumulate, build, count, make_rows
from tests.ranks import run_ranks
from tools.make_tiny_model import make_tiny_model

LAYOUTS = {
    "dp2": Layout(2, rows=1),
    "dp2-distributed": Layout(2, rows=1, distributed=True),
    "dp2-pp2": Layout(4, PP2, rows=1, distributed=True),
    "dp2-pp2-vpp2": Layout(4, PP2 | VPP2, rows=1),
    "dp2-tp2-sp": Layout(4, TP2 | SP, rows=2),
    "dp2-recompute": Layout(2, rows=2),
    "dp2-parts": Layout(2, rows=2),
}
RECOMPUTED: dict[str, dict[str, Any]] = {
    "dp2-recompute": {"recompute": True},
    "dp2-parts": {"recompute_modules": ("layernorm", "mlp")},
}
STEPS = 3


def steps(path: Path, layout: Layout, overlap: bool, bucket: int | None, options: dict[str, Any]) -> dict[str, Any]:
    """Gradients and weights of some steps on this rank, and how many sums had begun when a backward pass ended."""
    from mrlhf.megatron.optimizer import AdamSettings, Trainable

    _, groups, chunks = build(path, layout.sizes, **options)
    trainable = Trainable(
        chunks,
        groups,
        AdamSettings(lr=1e-2),
        distributed_optimizer=layout.distributed,
        overlap_grad_reduce=overlap,
        bucket_size=bucket,
    )
    finalize, begun, gradients = trainable.config.finalize_model_grads_func, [], []
    buckets = [group for chunk in trainable.chunks for group in chunk.bucket_groups]

    def watched(*args: Any, **kwargs: Any) -> Any:
        """Look at the sums on their way before they are waited for."""
        begun.append(sum(group.grad_reduce_handle is not None for group in buckets))
        return finalize(*args, **kwargs)

    trainable.config.finalize_model_grads_func = watched
    rows, norms = make_rows(), []
    for step in range(STEPS):
        trainable.train(True)
        # In the last step one replica has nothing to learn from.
        part = [row if step < STEPS - 1 or i < 4 else nothing(row) for i, row in enumerate(rows)]
        accumulate(trainable, part, layout.rows, count(rows))
        norms.append(trainable.step()[1])
        gradients.append([b.grad_data.clone() for c in trainable.chunks for b in c.buffers])
    weights = {n: p.detach().clone() for m in trainable.modules for n, p in m.named_parameters()}
    return {
        "overlapped": trainable.overlapped,
        "begun": begun,
        "buckets": len(buckets),
        "norms": norms,
        "weights": weights,
        "elements": [float(sum(g.abs().sum() for g in each)) for each in gradients],
    }


def nothing(row: Any) -> Any:
    """The row without a position that is wanted."""
    from dataclasses import replace

    return replace(row, wanted=torch.zeros_like(row.wanted))


def compared(path: Path, layout: Layout, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Without overlap (a CPU's own choice), with it in small buckets, with Megatron's large ones."""
    kinds: list[tuple[bool, int | None]] = [(False, None), (True, 3000), (True, None)]
    return [steps(path, layout, *kind, options) for kind in kinds]


@pytest.mark.parametrize(
    "name",
    ["dp2", "dp2-pp2", *(pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS if n not in ("dp2", "dp2-pp2"))],
)
def test_sums_and_weights_are_the_same(name: str, tmp_path: Path) -> None:
    path, layout = make_tiny_model(tmp_path / "model", tokenizer=False, seed=4), LAYOUTS[name]
    for plain, small, large in run_ranks(compared, layout.world, path, layout, RECOMPUTED.get(name, {})):
        assert not plain["overlapped"]
        assert plain["begun"] == [0] * STEPS
        for found in (small, large):
            assert found["overlapped"]
            # The first step finds out how often each gradient comes; from then on every sum begins by itself.
            assert found["begun"] == [0, *[found["buckets"]] * (STEPS - 1)]
            assert found["norms"] == pytest.approx(plain["norms"], rel=1e-6)
            if not layout.distributed:
                # There the buffers hold whole sums on every replica.
                assert found["elements"] == pytest.approx(plain["elements"], rel=1e-6)
            # Norms of other buckets are summed in another order, and Adam divides by what is small.
            for weight, other in zip(plain["weights"].values(), found["weights"].values(), strict=True):
                torch.testing.assert_close(weight, other, rtol=0, atol=1e-5)
        chunks = 2 if "vpp2" in name else 1
        assert small["buckets"] >= large["buckets"] == chunks


def run(inputs: Path, output: Path, overrides: list[str]) -> list[dict[str, Any]]:
    """The metrics of a PPO run with text, two passes and two micro-batches a step."""
    from tests.tiny_run import make_config, read_lines, steady, train

    config = make_config(inputs, output, f"ptx.path={inputs / 'texts.jsonl'}", "ptx.batch_size=4", *overrides)
    trainer = train(config)
    assert trainer.actor.trainable.overlapped == bool(config.parallel.overlap_grad_reduce)  # type: ignore[union-attr]
    return steady(read_lines(config.metrics_path))


@pytest.mark.slow
def test_a_run_with_text_beside_ppo(tmp_path: Path) -> None:
    from tests.tiny_run import make_inputs

    inputs = make_inputs(tmp_path / "inputs")
    (inputs / "texts.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in ("tea", "rain on a roof", "mud")))
    wanted = ["ppo.micro_batch_size=1", "optimizer.distributed=true"]
    plain, overlapped = (
        run_ranks(run, 2, inputs, tmp_path / str(each), [*wanted, f"parallel.overlap_grad_reduce={each}"])[0]
        for each in ("false", "true")
    )
    assert len(plain) == len(overlapped) == 2
    for one, other in zip(plain, overlapped, strict=True):
        assert one.keys() == other.keys()
        numbers = {key: value for key, value in one.items() if isinstance(value, float)}
        assert {key: other[key] for key in numbers} == pytest.approx(numbers, rel=1e-4, abs=1e-5)
