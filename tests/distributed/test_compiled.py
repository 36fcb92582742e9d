"""Compiled layers: the numbers of the others, and only where that pays."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.megatron_tools import PP2, Layout, accumulate, build, count, make_rows
from tests.ranks import run_ranks
from tools.make_tiny_model import make_tiny_model

COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


def passes(path: Path, layout: Layout, backend: str | None) -> tuple[float, list[torch.Tensor], list[int]]:
    """Loss and gradients of micro-batches of several widths, and graphs made by passes of three kinds."""
    from mrlhf.megatron.compiled import compile_layers
    from mrlhf.megatron.optimizer import AdamSettings, Trainable
    from mrlhf.megatron.schedule import forward_only

    _, groups, chunks = build(path, layout.sizes)
    if backend is not None:
        compile_layers(chunks, backend=backend)
    trainable, rows, graphs = Trainable(chunks, groups, AdamSettings(lr=1e-3)), make_rows(), []
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def note() -> None:
        """Graphs until now."""
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    forward_only(trainable.modules, rows, lambda *_: None, groups=groups, tokens=lambda batch: batch.tokens)
    note()
    trainable.train(True)
    accumulate(trainable, rows, layout.rows, count(rows), lengths=lambda batch: (batch.tokens > 0).sum(1))
    note()
    loss = accumulate(trainable, rows, layout.rows, count(rows))
    note()
    return loss, [p.main_grad.clone() for m in trainable.modules for p in m.parameters()], graphs


def compared(path: Path, layout: Layout, backend: str) -> tuple[float, float, float, list[int], list[int]]:
    """Both losses, how far gradients are from each other, and the graphs."""
    (loss, plain, none), (again, compiled, graphs) = (passes(path, layout, each) for each in (None, backend))
    pairs = [(one, other) for one, other in zip(plain, compiled, strict=True) if one.any()]
    away = max(float((one - other).abs().max() / one.abs().max()) for one, other in pairs)
    return loss, again, away, none, graphs


@pytest.mark.parametrize(
    ("layout", "backend"),
    [
        # The same graphs, computed operation by operation.
        (Layout(), "aot_eager"),
        pytest.param(Layout(), "inductor", marks=[pytest.mark.slow, COMPILER]),
        pytest.param(Layout(2, PP2), "inductor", marks=[pytest.mark.slow, COMPILER]),
    ],
)
def test_loss_and_gradients_are_those_of_the_layer(layout: Layout, backend: str, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model", tokenizer=False, seed=4)
    for loss, again, away, none, graphs in run_ranks(compared, layout.world, path, layout, backend):
        assert again == pytest.approx(loss, rel=1e-5)
        assert away < 1e-5
        assert none == [0, 0, 0]
        # Neither passes without gradient nor packed rows have any; all layers and widths share those of the others.
        assert graphs[:2] == [0, 0]
        assert 1 <= graphs[2] <= 3


def test_what_is_missing_on_the_machine_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from mrlhf.megatron.compiled import compiler_problem

    monkeypatch.setattr("mrlhf.megatron.compiled.device.has_cuda", lambda: False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = compiler_problem()
    assert found is not None
    assert "no C++ compiler (g++, clang++, c++); install one" in found
    monkeypatch.setenv("CXX", "my-compiler")
    assert "CXX names my-compiler" in str(compiler_problem())
    program = tmp_path / "my-compiler"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    assert "Python.h; install Python's headers" in str(compiler_problem())
    (tmp_path / "Python.h").touch()
    assert compiler_problem() is None


LLAMA: dict[str, Any] = {
    "family": "llama", "hidden_size": 64, "num_layers": 2, "num_attention_heads": 4, "num_query_groups": 4,
    "head_dim": 16, "ffn_hidden_size": 128, "vocab_size": 100, "max_position_embeddings": 64,
}  # fmt: skip
TP2_LINE = "actor has tensor_model_parallel_size 2, and with collectives nothing is compiled; use 1"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], []),
        (["parallel.tensor_model_parallel_size=2"], [TP2_LINE, TP2_LINE.replace("actor", "critic")]),
        (["critic.parallel.context_parallel_size=2"], ["critic has context_parallel_size 2"]),
        (["parallel.recompute=selective"], ["set recompute=none", "set recompute=none"]),
        (["actor.dropout=0.1"], ["set actor.dropout=0, or set precision.compile=false"]),
        (["ppo.packing=true"], ["set ppo.packing=false"]),
        (["inference.packing=true"], []),
        (["precision.fp8=e4m3", "precision.fp8_emulation=true", "precision.fp8_roles=[critic]"], ["critic has FP8"]),
    ],
)
def test_what_cannot_be_compiled_is_refused(
    overrides: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mrlhf.config import load_config
    from mrlhf.model_config import ModelConfig
    from mrlhf.trainer.compiling import compile_problems

    monkeypatch.setattr("mrlhf.trainer.compiling.compiler_problem", lambda: None)
    given = ["actor.path=a", "data.prompts=p", "rollout.prompts_per_iteration=4", "rollout.max_response_length=4",
             "ppo.minibatch_size=4", "trainer.iterations=1", "trainer.output_dir=o",
             "reward.sources=[{kind: function, target: 'a:b'}]"]  # fmt: skip
    config = load_config(None, [*given, "precision.compile=true", *overrides])
    models = dict.fromkeys(("actor", "critic", "reference"), ModelConfig(**LLAMA))
    found = compile_problems(config, models, trained=("actor", "critic"))
    assert len(found) == len(expected), found
    for line, part in zip(found, expected, strict=True):
        assert line.startswith("precision.compile: ")
        assert part in line
    # Nothing is compiled without training, or where it is off.
    assert compile_problems(config, models, trained=()) == []
    off = load_config(None, [*given, *overrides])
    assert compile_problems(off, models, trained=("actor", "critic")) == []
    experts = models | {"actor": ModelConfig(**LLAMA | {"num_experts": 4})}
    assert any("mixture of experts" in line for line in compile_problems(config, experts, trained=("actor",)))
