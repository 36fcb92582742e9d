"""Marks, requests, dropout and process groups of the built stages."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.megatron_tools import (
    PP2,
    PP4,
    SP,
    TP2,
    Reference,
    accumulate,
    build,
    count,
    make_rows,
    micro_batches,
    request,
)
from tools.make_tiny_model import make_tiny_model

SHARDED = {
    "embedding.word_embeddings.weight": 0,
    "self_attention.linear_qkv.weight": 0,
    "self_attention.linear_qkv.bias": 0,
    "self_attention.linear_proj.weight": 1,
    "mlp.linear_fc1.weight": 0,
    "mlp.linear_fc1.bias": 0,
    "mlp.linear_fc2.weight": 1,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model") / "actor"
    # What a checkpoint says about dropout is for its own pre-training.
    return make_tiny_model(root, attention_bias=True, mlp_bias=True, attention_dropout=0.1, tokenizer=False, seed=8)


def _marks(path: Path, head: str, sequence_parallel: bool) -> dict[str, tuple[bool, int, bool]]:
    from mrlhf.checkpoint.hf_config import read_model_config
    from mrlhf.megatron.groups import build_groups
    from mrlhf.megatron.model import build_model
    from mrlhf.planner import ParallelSizes

    sizes = ParallelSizes(world_size=2, sequence_parallel=sequence_parallel, **TP2)
    chunks = build_model(read_model_config(path), sizes, build_groups(sizes), head=head, value_bias=True)
    return {
        name: (
            bool(getattr(p, "tensor_model_parallel", False)),
            getattr(p, "partition_dim", -1),
            bool(getattr(p, "sequence_parallel", False)),
        )
        for name, p in chunks[0].named_parameters()
    }


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("head", ["lm", "value"])
def test_every_shard_is_marked_and_nothing_else(run_ranks: Any, path: Path, head: str, sequence_parallel: bool) -> None:
    for marks in run_ranks(_marks, 2, path, head, sequence_parallel):
        assert len(marks) == 4 * 10 + 2 + (1 if head == "lm" else 2)
        for name, (sharded, dim, summed) in marks.items():
            short = name.split(".", 3)[3] if name.startswith("decoder.layers") else name
            expected = SHARDED | ({"output_layer.weight": 0} if head == "lm" else {})
            assert sharded == (short in expected), name
            if sharded:
                assert dim == expected[short], name
            # Replicated parameters that see a part of the sequence.
            partial = not sharded
            assert summed == (sequence_parallel and partial), name


def _dropout(path: Path, dropout: float, training: bool) -> tuple[float, float]:
    """Largest |ratio - 1| of two passes over two micro-batches, and the largest difference between seeds."""
    from mrlhf.megatron.schedule import forward_only

    _, groups, chunks = build(path, {}, dropout=dropout)
    for chunk in chunks:
        chunk.train(training)

    def run() -> torch.Tensor:
        outputs = forward_only(
            chunks, micro_batches(make_rows(), 4), lambda batch, out: out[batch.wanted], groups=groups,
            tokens=lambda batch: batch.tokens, request=request,
        )  # fmt: skip
        return torch.cat(outputs)

    first, second = run(), run()
    return float(((first - second).exp() - 1).abs().max()), float(first.std())


def test_a11_dropout_of_the_checkpoint_is_ignored(run_ranks: Any, path: Path) -> None:
    assert '"attention_dropout": 0.1' in (path / "config.json").read_text()
    ratio, spread = run_ranks(_dropout, 1, path, 0.0, True)[0]
    assert ratio < 1e-6
    assert spread > 0.1
    assert run_ranks(_dropout, 1, path, 0.1, False)[0][0] < 1e-6
    assert run_ranks(_dropout, 1, path, 0.1, True)[0][0] > 1e-3


def _requests(path: Path, sizes: dict[str, Any]) -> Any:
    from mrlhf.megatron.model import LogprobRequest
    from mrlhf.megatron.schedule import forward_only

    _, groups, chunks = build(path, sizes, trainable=False)
    batch = micro_batches(make_rows([7, 12]), 2, 2)[0]
    made = []
    for wanted, temperature, entropy in ((batch.wanted, 1.0, False), (None, 0.7, True)):
        made += forward_only(
            chunks, [batch], lambda _, out: out, groups=groups, tokens=lambda b: b.tokens,
            request=lambda b, w=wanted, t=temperature, e=entropy: LogprobRequest(b.targets, w, t, e),
        )  # fmt: skip
    return made


@pytest.mark.parametrize(("world", "sizes"), [(1, {}), (2, TP2 | SP)], ids=["tp1", "tp2sp"])
def test_requests(run_ranks: Any, path: Path, world: int, sizes: dict[str, Any]) -> None:
    batch = micro_batches(make_rows([7, 12]), 2, 2)[0]
    with torch.no_grad():
        logits = Reference(path).model(batch.tokens).logits
    for plain, both in run_ranks(_requests, world, path, sizes):
        table = logits.log_softmax(-1).gather(2, batch.targets[..., None])[..., 0]
        torch.testing.assert_close(plain, torch.where(batch.wanted, table, 0.0), rtol=1e-5, atol=1e-5)
        assert bool((plain[~batch.wanted] == 0).all())
        tempered = (logits / 0.7).log_softmax(-1)
        torch.testing.assert_close(both[0], tempered.gather(2, batch.targets[..., None])[..., 0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(both[1], -(tempered.exp() * tempered).sum(-1), rtol=1e-5, atol=1e-5)


def _main_grad(path: Path, sizes: dict[str, Any]) -> Any:
    from mrlhf.megatron.optimizer import AdamSettings, Trainable

    _, groups, chunks = build(path, sizes)
    trainable = Trainable(chunks, groups, AdamSettings(lr=1e-3))
    rows = make_rows()
    for _ in range(2):  # the second accumulation must not add to the first
        accumulate(trainable, rows, 2, count(rows))
    weight = trainable.modules[-1].output_layer.weight
    assert weight.grad is None
    return weight.main_grad.clone(), weight.main_grad.dtype


@pytest.mark.parametrize(("world", "sizes"), [(2, TP2), (4, TP2 | SP)], ids=["tp2", "tp2sp-dp2"])
def test_gradient_of_the_fused_head_reaches_ddps_buffer(
    run_ranks: Any, path: Path, world: int, sizes: dict[str, Any]
) -> None:
    reference, rows = Reference(path), make_rows()
    reference.accumulate(rows, count(rows))
    expected = reference.named(gradients=True)["lm_head.weight"]
    results = run_ranks(_main_grad, world, path, sizes)
    for replica in range(world // 2):
        shards = [results[2 * replica + i][0] for i in range(2)]
        whole = torch.cat(shards)
        torch.testing.assert_close(whole[:97], expected, rtol=1e-4, atol=1e-6)
        assert float(whole[97:].abs().max()) == 0.0  # padding
    assert {dtype for _, dtype in results} == {torch.float32}


def _timeouts(sizes: dict[str, Any], minutes: int) -> dict[str, float]:
    from mrlhf.megatron.groups import build_groups
    from mrlhf.planner import ParallelSizes

    groups = build_groups(ParallelSizes(world_size=dist.get_world_size(), **sizes), timedelta(minutes=minutes))
    result = {}
    for name in ("tp", "cp", "dp", "pp", "mp", "tp_cp", "dp_cp", "embd", "tp_dp_cp", "intra_dist_opt", "ep", "expt_dp"):
        group = getattr(groups, name)
        if group is not None:
            options = group._get_backend(torch.device("cpu")).options
            result[name] = options._timeout.total_seconds()
    return result


@pytest.mark.parametrize("sizes", [TP2, PP2, PP4], ids=["tp2dp2", "pp2dp2", "pp4"])
def test_f8_every_group_has_the_timeout_that_was_asked_for(run_ranks: Any, sizes: dict[str, int]) -> None:
    for rank, timeouts in enumerate(run_ranks(_timeouts, 4, sizes, 77)):
        inner = sizes is PP4 and rank in (1, 2)
        assert len(timeouts) == (11 if inner else 12)
        assert set(timeouts.values()) == {77 * 60.0}


def _log_and_save(path: Path, out: Path) -> tuple[float, float]:
    """What the trainer does between iterations: all ranks reduce and export, the first one writes."""
    from mrlhf.checkpoint.hf import export_hf
    from mrlhf.metrics import JsonlWriter
    from mrlhf.parallel.collectives import all_reduce_metrics
    from mrlhf.types import Metric

    config, groups, chunks = build(path, {})
    start = time.monotonic()
    one = torch.tensor(float(dist.get_rank() + 1))
    merged = all_reduce_metrics({"x": Metric("mean", one, torch.tensor(1.0))} if dist.get_rank() == 1 else {})
    if dist.get_rank() == 0:
        writer = JsonlWriter(out / "metrics.jsonl", append=False)
        writer.write(1, {"x": merged["x"].result()})
        writer.close()
    export_hf(chunks, config, out / "export", source_folder=path, groups=groups)
    return time.monotonic() - start, merged["x"].result()


def test_b13_logging_and_saving_do_not_wait_for_each_other(run_ranks: Any, path: Path, tmp_path: Path) -> None:
    for seconds, value in run_ranks(_log_and_save, 2, path, tmp_path, timeout=100.0):
        assert seconds < 60
        assert value == 2.0
    assert (tmp_path / "export" / "model.safetensors").exists()
    assert '"x": 2.0' in (tmp_path / "metrics.jsonl").read_text()
