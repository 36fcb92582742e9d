"""parallel/collectives.py on real gloo ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mrlhf import rl
from mrlhf.parallel import collectives
from mrlhf.types import Metric
from tests.ranks import RankFailure

nan = float("nan")


def _whiten() -> tuple[list[float], float, float, list[float]]:
    rank = dist.get_rank()
    x, mask = [
        (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([True, True, True])),
        (torch.tensor([10.0, nan]), torch.tensor([True, False])),
        (torch.tensor([nan]), torch.tensor([False])),  # an empty rank still joins
    ][rank]
    count, mean, m2 = collectives.all_reduce_moments(*rl.masked_moments(x, mask))
    white = rl.whiten(x, mask, mean, m2 / count)
    unbiased = rl.whiten(x, mask, mean, m2 / (count - 1))
    return white[mask].tolist(), float(mean), float(m2 / count), unbiased[mask].tolist()


def test_a8_whitening_over_all_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    results = run_ranks(_whiten, 3)
    assert all((mean, var) == (4.0, 12.5) for _, mean, var, _ in results)
    assert results[0][0] == pytest.approx([-0.8485, -0.5657, -0.2828], abs=5e-5)
    assert results[1][0] == pytest.approx([1.6971], abs=5e-5)
    assert results[2][0] == []
    assert results[0][3] == pytest.approx([-0.7348, -0.4899, -0.2449], abs=5e-5)
    assert results[1][3] == pytest.approx([1.4697], abs=5e-5)


def _one_value() -> tuple[float, float, float]:
    x = torch.tensor([7.0])
    mask = torch.tensor([dist.get_rank() == 1])
    count, mean, m2 = collectives.all_reduce_moments(*rl.masked_moments(x, mask))
    return float(count), float(m2), float(rl.whiten(x, mask, mean, m2 / count))


def test_a8_a_single_value_over_all_ranks_is_finite(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(_one_value, 2) == [(1.0, 0.0, 0.0)] * 2


def _moments_of_parts() -> tuple[list[float], list[float]]:
    everything = torch.randn(1000, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 1e6
    pieces = [everything[:1], everything[1:400], everything[400:400], everything[400:]]
    mine = pieces[dist.get_rank()]
    got = collectives.all_reduce_moments(*rl.masked_moments(mine, torch.ones_like(mine, dtype=torch.bool)))
    return [float(x) for x in got], [
        1000.0,
        float(everything.mean()),
        float(((everything - everything.mean()) ** 2).sum()),
    ]


def test_moments_equal_those_of_the_whole(run_ranks: Callable[..., list[Any]]) -> None:
    results = run_ranks(_moments_of_parts, 4)
    assert all(got == results[0][0] for got, _ in results)  # bitwise the same on all ranks
    assert results[0][0] == pytest.approx(results[0][1], rel=1e-9)


def _metrics() -> dict[str, tuple[str, float, float]]:
    rank = dist.get_rank()
    metrics = {
        "loss": Metric("mean", torch.tensor(3.0 if rank == 0 else 1.0), torch.tensor(1.0 if rank == 0 else 3.0)),
        "ratio_max": Metric("max", torch.tensor([1.5, -math.inf][rank]), [2, 0][rank]),
        "ratio_min": Metric("min", torch.tensor([0.5, 0.25][rank]), 2),
    }
    if rank == 1:
        metrics["extra"] = Metric("mean", 6.0, 2)
    reduced = collectives.all_reduce_metrics(metrics)
    return {name: (m.reduction, m.result(), float(m.count)) for name, m in reduced.items()}


def test_metrics_are_the_union_of_all_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    first, second = run_ranks(_metrics, 2)
    assert first == second
    assert first == {
        "loss": ("mean", 1.0, 4.0),
        "ratio_max": ("max", 1.5, 2.0),
        "ratio_min": ("min", 0.25, 4.0),
        "extra": ("mean", 3.0, 2.0),
    }


def _conflict() -> str:
    try:
        collectives.all_reduce_metrics({"x": Metric("max" if dist.get_rank() else "mean", 1.0, 1)})
    except ValueError as error:
        return str(error)
    return "no error"


def test_conflicting_reductions_raise_on_every_rank(run_ranks: Callable[..., list[Any]]) -> None:
    for message in run_ranks(_conflict, 2):
        assert "mean" in message
        assert "max" in message


def _broadcast() -> list[Any]:
    # Two pipeline groups: ranks 0, 2 and ranks 1, 3.
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    group = groups[rank % 2]
    last = rank >= 2
    out = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool):
        value = (torch.arange(6).view(2, 3) + rank).to(dtype) if last else None
        if last and dtype.is_floating_point:
            value.requires_grad_()
        got = collectives.broadcast_from_last_stage(value, (2, 3), dtype, group)
        out.append((str(got.dtype), got.tolist(), got.requires_grad))
    return out


def test_broadcast_from_last_stage(run_ranks: Callable[..., list[Any]]) -> None:
    results = run_ranks(_broadcast, 4)
    for rank, result in enumerate(results):
        source = 2 + rank % 2
        for dtype, entry in zip(
            (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool), result, strict=True
        ):
            assert entry == (str(dtype), (torch.arange(6).view(2, 3) + source).to(dtype).tolist(), False)


def _wrong_shape() -> None:
    last = dist.get_rank() == 1
    collectives.broadcast_from_last_stage(torch.zeros(3) if last else None, (2,), torch.float32, dist.group.WORLD)


def test_a_wrong_shape_is_an_error(run_ranks: Callable[..., list[Any]]) -> None:
    with pytest.raises(RankFailure, match=r"torch.float32 \[3\] to broadcast, expected torch.float32 \[2\]"):
        run_ranks(_wrong_shape, 2)


def _gather() -> tuple[list[Any], list[Any]]:
    rank = dist.get_rank()
    rows = collectives.all_gather_rows(torch.full((rank, 2), float(rank)))
    masks = collectives.all_gather_rows(torch.tensor([True, False, True])[: rank + 1])
    assert collectives.all_gather_objects({"rank": rank}) == [{"rank": r} for r in range(3)]
    return [r.tolist() for r in rows], [m.tolist() for m in masks]


def test_gather_of_different_sizes(run_ranks: Callable[..., list[Any]]) -> None:
    for rows, masks in run_ranks(_gather, 3):
        assert rows == [[], [[1.0, 1.0]], [[2.0, 2.0], [2.0, 2.0]]]
        assert masks == [[True], [True, False], [True, False, True]]


def _ds_groups() -> tuple[float, float]:
    """Row weights of a minibatch spread over ranks: the sums of the parts add up to DeepSpeed-Chat's loss."""
    generator = torch.Generator().manual_seed(0)
    losses = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    mask = torch.arange(4) < torch.tensor([1, 3, 2, 4, 4, 2]).unsqueeze(1)
    valid = torch.tensor([False, True, True, True, True, True])
    mine = slice(dist.get_rank() * 3, dist.get_rank() * 3 + 3)
    tokens = torch.cat(collectives.all_gather_rows(mask[mine].sum(1)))
    valid_all = torch.cat(collectives.all_gather_rows(valid[mine]))
    weights = rl.ds_group_row_weights(tokens, 2, valid_all)
    terms = rl.entropy_loss(losses[mine], mask[mine], row_weights=weights[mine])
    total = torch.stack([terms.loss_sum, terms.count])
    dist.all_reduce(total)
    groups = [losses[1][mask[1]], losses[2:4][mask[2:4]], losses[4:6][mask[4:6]]]
    expected = torch.stack([g.mean() for g in groups]).mean()
    return float(total[0] - expected), float(total[1])


def test_ds_row_weights_over_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    for difference, count in run_ranks(_ds_groups, 2):
        assert abs(difference) < 1e-14
        assert count == pytest.approx(1.0, abs=1e-14)
