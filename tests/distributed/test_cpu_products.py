"""Models in bf16 whose products are computed in fp32, under every split, next to fp32 and to torch's own products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mrlhf.errors import ConfigError
from mrlhf.parallel.products import Products, chosen
from mrlhf.trainer import ppo_job
from tests.distributed.megatron_tools import (
    PP2,
    SP,
    TP2,
    Layout,
    Reference,
    accumulate,
    build,
    count,
    gradient_norm,
    make_rows,
    total_loss,
    whole_gradient,
)
from tests.distributed.moe_tools import write_moe
from tests.distributed.test_vocab import CountCollectives
from tests.tiny_run import make_config, make_inputs
from tools.make_tiny_model import make_tiny_model

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="products on a CPU")

LAYOUTS = {"tp2sp": TP2 | SP, "tp2": TP2, "pp2": PP2, "dp2": {}}
FP8 = ("precision.fp8=hybrid", "precision.fp8_emulation=true")
TENSOR = "parallel.tensor_model_parallel_size=2"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("products") / "model", tokenizer=False, seed=4)


@pytest.fixture(scope="module")
def reference(path: Path) -> tuple[float, dict[str, torch.Tensor]]:
    model, rows = Reference(path), make_rows()
    return model.accumulate(rows, count(rows)), model.named(gradients=True)


def step(path: Path, layout: Layout, products: Products, out: Path, frozen: bool = False) -> dict[str, Any]:
    """Loss, gradient, norm, messages and kinds of layers of a training pass in bf16."""
    from mrlhf.megatron.optimizer import AdamSettings, Trainable

    rows = make_rows()
    with chosen(products):
        config, groups, chunks = build(path, layout.sizes, dtype=torch.bfloat16)
        if frozen:
            for chunk in chunks:
                for name, parameter in chunk.named_parameters():
                    parameter.requires_grad_("linear_qkv" not in name and "linear_fc2" not in name)
        trainable = Trainable(chunks, groups, AdamSettings(lr=1e-3, clip_grad=0.0))
        with CountCollectives() as messages:
            part = accumulate(trainable, rows, layout.rows, count(rows))
        gradient = None if frozen else whole_gradient(trainable, config, path, out)
        updated, norm = trainable.step()
    assert updated
    kinds = {type(m).__name__ for chunk in chunks for m in chunk.modules() if "ParallelLinear" in type(m).__name__}
    found = {"loss": total_loss(part, groups), "norm": norm, "gradient": gradient}
    return {**found, "messages": messages.calls, "kinds": kinds}


def steps(path: Path, out: Path) -> dict[str, Any]:
    """All layouts of two ranks."""
    found = {name: step(path, Layout(2, sizes), "fp32", out) for name, sizes in LAYOUTS.items()}
    for name in ("tp2sp", "tp2"):
        found[f"{name} native"] = step(path, Layout(2, LAYOUTS[name]), "native", out)
        for products in ("fp32", "native"):
            found[f"{name} frozen {products}"] = step(path, Layout(2, LAYOUTS[name]), products, out, frozen=True)
    return found


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Length of the difference over that of ``theirs``, all parameters together."""
    return gradient_norm({name: ours[name] - value for name, value in theirs.items()}) / gradient_norm(theirs)


def test_loss_and_gradient_are_those_of_fp32_within_the_accuracy_of_bf16(
    run_ranks: Any, path: Path, reference: Any, tmp_path: Path
) -> None:
    loss, gradient = reference
    ranks = run_ranks(steps, 2, path, tmp_path)
    for name in LAYOUTS:
        for result in (rank[name] for rank in ranks):
            assert result["kinds"] == {"Fp32ColumnParallelLinear", "Fp32RowParallelLinear"}, name
            assert result["loss"] == pytest.approx(loss, rel=2e-3)
            assert result["norm"] == pytest.approx(gradient_norm(gradient), rel=0.01)
        assert distance(ranks[0][name]["gradient"], gradient) < 0.02, name
    for name in ("tp2sp", "tp2"):
        for rank in ranks:
            ours, native = rank[name], rank[f"{name} native"]
            assert native["kinds"] == {"ColumnParallelLinear", "RowParallelLinear"}
            assert ours["messages"] == native["messages"]
            assert len(ours["messages"]) > 4 * 4
            ours, native = (rank[f"{name} frozen {products}"] for products in ("fp32", "native"))
            assert ours["norm"] == pytest.approx(native["norm"], rel=0.01)
            assert ours["loss"] == pytest.approx(native["loss"], rel=2e-3)
        # What rounding does is the same in kind: no further from fp32 than with torch's own products.
        error = {kind: distance(ranks[0][kind]["gradient"], gradient) for kind in (name, f"{name} native")}
        assert error[name] < 1.2 * error[f"{name} native"]


CACHES: dict[str, tuple[Products, tuple[str, ...], int]] = {
    "tp2": ("fp32", (TENSOR,), 4),
    "tp2sp": ("fp32", (TENSOR, "parallel.sequence_parallel=true"), 2),
    "pp2": ("fp32", ("parallel.pipeline_model_parallel_size=2",), 4),
    "fp8": ("fp32", (*FP8, "precision.fp8_roles=[actor]"), 2),
    "native": ("native", (), 2),
}
"""Products, layout and what the actor then has for a key or a value."""


def caches(configs: dict[str, tuple[Products, Any]]) -> dict[str, tuple[int, int]]:
    """Bytes of a key or value in the cache of the actor's stages, and those that a run is checked with."""
    from mrlhf.megatron.decode import Pipeline
    from mrlhf.trainer.precision import cache_element_bytes

    found = {}
    for name, (products, config) in configs.items():
        with chosen(products):
            models = ppo_job.read_models(config)
            policy = ppo_job.build_policy(ppo_job.start_job(config, models))
            counted = cache_element_bytes(config, models, trained=ppo_job.TRAINED)
            found[name] = (Pipeline(policy.chunks, policy.groups).cache_dtype.itemsize, counted)
    return found


def test_the_cache_is_checked_with_what_generation_keeps(run_ranks: Any, tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path / "inputs")

    def config(*overrides: str) -> Any:
        return make_config(inputs, tmp_path / "out", "precision.dtype=bf16", *overrides)

    configs = {name: (products, config(*overrides)) for name, (products, overrides, _) in CACHES.items()}
    for found in run_ranks(caches, 2, configs):
        assert found == {name: (size, size) for name, (_, _, size) in CACHES.items()}

    # Two rows of 32 + 6 tokens in bf16: keys and values of 2 heads of 8 in 2 layers.
    limit = 2 * (32 + 6) * 2 * 2 * 2 * 8 * 2 / 2**30
    narrow, wide = (config(f"rollout.kv_cache_memory={each}") for each in (limit, 2 * limit))
    models = ppo_job.read_models(narrow)
    with chosen("native"):
        ppo_job.check_job(narrow, models)
    with chosen("fp32"):
        with pytest.raises(ConfigError, match="rollout.kv_cache_memory .* does not hold 2 rows"):
            ppo_job.check_job(narrow, models)
        ppo_job.check_job(wide, models)
        with pytest.raises(ConfigError, match="rollout.kv_cache_memory"):
            ppo_job.check_inference(narrow, models, max_response_length=6)
        # The reference alone is not in FP8, and generates in evaluations.
        fp8 = (*FP8, "precision.fp8_roles=[actor]", f"rollout.kv_cache_memory={limit}")
        ppo_job.check_job(config(*fp8), models)
        evaluated = config(*fp8, "trainer.eval_interval=1", f"evaluation.prompts={inputs / 'prompts.jsonl'}")
        with pytest.raises(ConfigError, match="rollout.kv_cache_memory"):
            ppo_job.check_job(evaluated, models)


def experts(path: Path, out: Path) -> dict[str, Any]:
    """A mixture of experts, alone; and which of its layers are which in other formats."""
    found: dict[str, Any] = {kind: step(path, Layout(), kind, out) for kind in ("fp32", "native")}
    with chosen("fp32"):
        _, _, chunks = build(path, {})
        found["in fp32"] = {type(m).__name__ for c in chunks for m in c.modules() if "ParallelLinear" in str(type(m))}
        _, _, chunks = build(path, {}, dtype=torch.bfloat16)
        names = [name for name, m in chunks[0].named_modules() if type(m).__name__.startswith("Fp32")]
    found["layers"] = names
    dist.barrier()
    return found


def test_experts_have_such_products_too(run_ranks: Any, tmp_path: Path) -> None:
    path = write_moe(tmp_path / "model", "qwen3_moe", seed=3)
    (found,) = run_ranks(experts, 1, path, tmp_path / "out")
    ours, native = found["fp32"], found["native"]
    assert ours["loss"] == pytest.approx(native["loss"], rel=5e-3)
    # Where rounding changes a token's expert, its gradient is another.
    assert distance(ours["gradient"], native["gradient"]) < 0.15
    assert not any(kind.startswith("Fp32") for kind in found["in fp32"])
    # Four layers of attention, one dense MLP, three times four experts.
    assert len(found["layers"]) == 2 * (4 + 1 + 3 * 4)
    assert sum(".experts." in name for name in found["layers"]) == 2 * 3 * 4
