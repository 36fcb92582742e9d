"""FP8 in the configuration: what is refused and why, what Megatron is told, which models it is for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mrlhf.config_sections import PrecisionConfig
from mrlhf.errors import ConfigError
from mrlhf.megatron import device, spec
from mrlhf.megatron.fp8 import Fp8, environment_problems, model_problems
from mrlhf.megatron.model import transformer_config
from mrlhf.model_config import ModelConfig
from mrlhf.parallel.launch import LaunchEnv
from mrlhf.planner import ParallelSizes, token_multiple
from mrlhf.trainer import precision
from mrlhf.trainer.precision import fp8_of
from mrlhf.types import round_up
from tests import tiny_run

MODEL = ModelConfig(
    family="llama",
    hidden_size=64,
    num_layers=4,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=16,
    ffn_hidden_size=128,
    vocab_size=97,
    max_position_embeddings=64,
)
EMULATED: dict[str, Any] = {"fp8": "hybrid", "fp8_emulation": True}


@pytest.mark.parametrize(
    ("tokens", "tp", "recipe", "padded"),
    [
        (16368, 4, "tensorwise", 16384),
        (24, 8, "delayed", 128),
        (31936, 4, "mxfp8", 32000),
        (16384, 4, "blockwise", 16384),
    ],
)
def test_f3_tokens_are_padded_to_what_a_rank_needs(tokens: int, tp: int, recipe: Any, padded: int) -> None:
    config = PrecisionConfig(dtype="bf16", fp8="e4m3", fp8_recipe=recipe)
    sizes = ParallelSizes(world_size=tp, tensor_model_parallel_size=tp, sequence_parallel=True)
    assert round_up(tokens, token_multiple(sizes, config.token_multiple)) == padded
    context = ParallelSizes(world_size=2 * tp, tensor_model_parallel_size=tp, context_parallel_size=2)
    assert token_multiple(context, config.token_multiple) == 2 * config.token_multiple, "TP alone splits no tokens"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"fp8": "hybrid"}, "fp8 needs dtype bf16 or fp16.*dtype=bf16, or fp8_emulation=true"),
        ({"fp8": "hybrid", "dtype": "bf16", "kernels": "local"}, "kernels=local leaves out.*kernels=auto"),
        ({"fp8_emulation": True}, "fp8_emulation has no meaning without fp8"),
        (
            {**EMULATED, "fp8_recipe": "delayed", "fp8_first_last_layers_bf16": 1},
            "fp8_first_last_layers_bf16 1 cannot go with fp8_recipe delayed.*fp8_recipe=tensorwise",
        ),
        ({**EMULATED, "fp8_amax_history_len": 4}, "fp8_amax_history_len has no meaning with fp8_recipe tensorwise"),
        ({**EMULATED, "fp8_margin": 2}, "fp8_margin has no meaning with fp8_recipe tensorwise"),
        ({**EMULATED, "fp8_recipe": "mxfp8"}, "fp8_emulation knows the recipes tensorwise and delayed, not mxfp8"),
        ({**EMULATED, "kernels": "te"}, "fp8_emulation is in the local layers"),
        ({**EMULATED, "fp8_roles": ()}, "fp8_roles is empty"),
        ({"fp8": "e5m2"}, "hybrid"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        PrecisionConfig(**values)


def test_one_override_turns_fp8_off() -> None:
    assert PrecisionConfig(fp8_recipe="delayed", fp8_roles=("critic",)).token_multiple == 1
    assert fp8_of(PrecisionConfig(fp8_recipe="delayed")) is None


def test_which_models_are_in_fp8() -> None:
    roles = {"actor": True, "critic": True, "reference": False, "reward0": False}

    def inside(**values: Any) -> set[str]:
        config = PrecisionConfig(**EMULATED, **values)
        return {role for role, trained in roles.items() if config.fp8_in(role, trained=trained)}

    assert inside() == set(roles)
    assert inside(fp8_recipe="delayed") == {"actor", "critic"}
    assert inside(fp8_roles=("reference", "reward")) == {"reference", "reward0"}
    assert not PrecisionConfig().fp8_in("actor", trained=True)


def megatron_fields(**values: Any) -> dict[str, Any]:
    fp8 = fp8_of(PrecisionConfig(dtype="bf16", **values))
    config = transformer_config(MODEL, ParallelSizes(), dtype=torch.bfloat16, fp8=fp8)
    names = [name for name in vars(config) if "fp8" in name or "bf16" in name or "amax" in name]
    plain = transformer_config(MODEL, ParallelSizes(), dtype=torch.bfloat16)
    return {name: getattr(config, name) for name in names if getattr(config, name) != getattr(plain, name)}


def test_megatron_is_told_the_recipe() -> None:
    assert megatron_fields() == {}
    assert megatron_fields(fp8="hybrid") == {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
    ends = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 2}
    assert megatron_fields(fp8="e4m3", fp8_recipe="mxfp8", fp8_first_last_layers_bf16=2) == {
        "fp8": "e4m3", "fp8_recipe": "mxfp8", **ends,
    }  # fmt: skip
    # Megatron's defaults are one step of history, its newest value, and the scales of all replicas together.
    assert megatron_fields(fp8="hybrid", fp8_recipe="delayed", fp8_margin=1) == {
        "fp8": "hybrid", "fp8_margin": 1, "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max",
        "tp_only_amax_red": True,
    }  # fmt: skip
    assert megatron_fields(**EMULATED) == {}, "emulated layers know themselves; Megatron must not look for TE"


@pytest.mark.parametrize(
    ("recipe", "machine", "message"),
    [
        ("delayed", (False, None, None), "needs CUDA and Transformer Engine, and there is no CUDA.*fp8_emulation=true"),
        ("delayed", (False, (2, 4), None), "there is no CUDA"),
        ("delayed", (True, None, (9, 0)), "there is no Transformer Engine here"),
        ("tensorwise", (True, (2, 1), (9, 0)), "needs Transformer Engine 2.2 or newer, and 2.1"),
        ("tensorwise", (True, (2, 4), (8, 0)), "compute capability 8.9 or higher, and this one has 8.0"),
        ("mxfp8", (True, (2, 4), (9, 0)), "compute capability 10.0"),
        ("blockwise", (True, (2, 4), (9, 0)), None),
        ("delayed", (True, (2, 4), None), None),
    ],
)
def test_what_a_machine_can_do(recipe: Any, machine: tuple[Any, Any, Any], message: str | None) -> None:
    found = dict(zip(("cuda", "transformer_engine", "capability"), machine, strict=True))
    problems = environment_problems(Fp8("hybrid", recipe=recipe), **found)
    assert len(problems) == (message is not None)
    if message is not None:
        with pytest.raises(AssertionError, match=f"(?s){message}"):
            raise AssertionError(problems[0])
    assert environment_problems(Fp8("hybrid", recipe=recipe, emulated=True), **found) == []


def test_what_a_models_sizes_allow() -> None:
    fp8, tp = Fp8("hybrid"), ParallelSizes(world_size=8, tensor_model_parallel_size=8)
    assert model_problems(fp8, "actor", MODEL, ParallelSizes()) == [], "97 ids are not in FP8, so no padding to 16"
    assert model_problems(fp8, "actor", MODEL, ParallelSizes(world_size=2, tensor_model_parallel_size=2)) == []
    problems = model_problems(fp8, "actor", MODEL, tp)
    assert problems == [
        "actor: attention heads x head_dim / TP is 8, and FP8 products (tensorwise) take multiples of 16; "
        "use a smaller TP, or leave this model out of precision.fp8_roles"
    ]
    assert "key-value heads x head_dim / TP is 16" in "".join(
        model_problems(Fp8("hybrid", recipe="mxfp8"), "x", MODEL, ParallelSizes(2, 2))
    )
    assert model_problems(Fp8("hybrid", emulated=True), "actor", MODEL, tp) == []
    (none,) = model_problems(Fp8("hybrid", first_last_layers_bf16=2, emulated=True), "actor", MODEL, ParallelSizes())
    assert none == "actor: precision.fp8_first_last_layers_bf16 2 leaves none of 4 layers in FP8; lower it"
    pp4 = ParallelSizes(world_size=8, pipeline_model_parallel_size=8)
    deep = MODEL.__class__(**{**vars(MODEL), "num_layers": 16})
    assert "over the 2 layers of a pipeline stage" in model_problems(
        Fp8("hybrid", first_last_layers_bf16=3), "actor", deep, pp4
    )[0]  # fmt: skip


@pytest.fixture
def ppo(tmp_path: Path) -> Any:
    inputs = tiny_run.make_inputs(tmp_path / "ppo")
    return lambda *overrides: tiny_run.make_config(inputs, tmp_path / "out", *overrides)


REFUSED = {
    "no CUDA": ("precision.fp8=hybrid precision.dtype=bf16", "there is no CUDA here; set precision.fp8_emulation=true"),
    "forced": ("precision.kernels=te precision.dtype=bf16", "precision.kernels=te needs CUDA and Transformer Engine"),
    "frozen": (
        "precision.fp8=hybrid precision.fp8_emulation=true precision.fp8_recipe=delayed "
        "precision.fp8_roles=[reference]",
        "names reference, and fp8_recipe delayed takes scales from training passes.*fp8_recipe=tensorwise",
    ),
    "no layers": (
        "precision.fp8=hybrid precision.fp8_emulation=true precision.fp8_first_last_layers_bf16=1",
        "leaves none of 2 layers in FP8",
    ),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA")
@pytest.mark.parametrize("case", REFUSED)
def test_a_run_is_refused_before_any_process_group(ppo: Any, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    from mrlhf.trainer.ppo import build_trainer

    overrides, message = REFUSED[case]
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("a process group was made"))
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        build_trainer(ppo(*overrides.split()))


def test_kernels_and_fp8_are_said_at_the_start(ppo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    roles = ("actor", "critic", "reference", "reward0")
    (line,) = precision.kernel_lines(ppo(), roles, trained=("actor", "critic"))
    if not device.has_cuda():
        assert line == "layers: local, attention: sdpa, norm: torch, optimizer: torch Adam, fp8: off"
    fp8 = ("precision.fp8=hybrid", "precision.fp8_emulation=true", "precision.fp8_recipe=delayed")
    (line,) = precision.kernel_lines(ppo(*fp8), roles, trained=("actor", "critic"))
    assert line.endswith(", fp8: hybrid, delayed, emulated (actor, critic)")
    monkeypatch.setattr(precision, "wrong_apex", lambda: "the installed package apex is not NVIDIA's")
    assert precision.kernel_lines(ppo(), roles, trained=())[1] == "warning: the installed package apex is not NVIDIA's"


def test_real_fp8_on_a_machine_that_has_it(ppo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    monkeypatch.setattr(spec, "has_transformer_engine", lambda: True)
    monkeypatch.setattr(precision, "transformer_engine_version", lambda: (2, 4))
    config = ppo("precision.fp8=hybrid", "precision.dtype=bf16")
    assert precision.precision_problems(config, {"actor": MODEL}, LaunchEnv(), trained=("actor",)) == []
    (line,) = precision.kernel_lines(config, ["actor"], trained=["actor"])
    assert line == (
        "layers: transformer_engine, attention: transformer_engine, norm: transformer_engine, "
        "optimizer: transformer_engine Adam, fp8: hybrid, tensorwise (actor)"
    )
    (masked,) = precision.precision_problems(config, {"actor": MODEL}, LaunchEnv(), trained=("actor",), masked=True)
    assert "gets attention masks and has no Transformer Engine layers" in masked
    (nobody,) = precision.precision_problems(
        ppo("precision.fp8=hybrid", "precision.dtype=bf16", "precision.fp8_roles=[critic]"),
        {"actor": MODEL}, LaunchEnv(), trained=("actor",),
    )  # fmt: skip
    assert "names none of this run's models (actor)" in nobody


def test_norms_are_computed_again_in_fp8_with_a_recent_engine_only(ppo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    monkeypatch.setattr(spec, "has_transformer_engine", lambda: True)

    models = dict.fromkeys(("actor", "critic"), MODEL)

    def problems(version: tuple[int, int], *overrides: str, trained: tuple[str, ...] = tuple(models)) -> list[str]:
        monkeypatch.setattr(precision, "transformer_engine_version", lambda: version)
        config = ppo("precision.fp8=hybrid", "precision.dtype=bf16", *overrides)
        return precision.precision_problems(config, models, LaunchEnv(), trained=trained)

    again = "parallel.recompute=selective"
    assert problems((2, 5), again) == [
        "layernorm of actor, critic is computed again in FP8 with Transformer Engine 2.6 or newer only, and 2.5 is "
        "installed; set parallel.recompute_modules=[mlp,moe], or update it"
    ]
    (own,) = problems((2, 5), f"critic.{again}", "critic.parallel.recompute_modules=[core_attn,layernorm]")
    assert "set critic.parallel.recompute_modules=[core_attn]" in own
    assert problems((2, 6), again) == problems((3, 0), again) == []
    assert problems((2, 5), again, "parallel.recompute_modules=[mlp,moe]") == []
    assert problems((2, 5), f"critic.{again}", "precision.fp8_roles=[actor]") == []
    assert problems((2, 5), again, "precision.fp8_emulation=true") == []
    assert problems((2, 5), again, trained=()) == [], "a model that is not trained computes nothing again"
