"""Mixtures of experts in configurations: what ``config.json`` means, what Megatron is told, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from mrlhf.checkpoint.hf_config import model_config_from_dict, model_config_to_dict, read_model_config
from mrlhf.cli import app
from mrlhf.config import check_run
from mrlhf.errors import CheckpointError, ConfigError
from mrlhf.megatron.fp8 import Fp8, model_problems
from mrlhf.megatron.model import transformer_config
from mrlhf.planner import ParallelSizes
from mrlhf.roles.micro_batches import split_up
from tests.tiny_run import make_config

ROOT = Path(__file__).parents[2]
MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"], "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 97, "max_position_embeddings": 128,
    "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
QWEN3: dict[str, Any] = MIXTRAL | {
    "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 32, "moe_intermediate_size": 48, "norm_topk_prob": True,
}  # fmt: skip


def read(folder: Path, values: dict[str, Any]) -> Any:
    (folder / "config.json").write_text(json.dumps(values))
    return read_model_config(folder)


def test_what_the_files_say(tmp_path: Path) -> None:
    mixtral = read(tmp_path, MIXTRAL)
    assert (mixtral.num_experts, mixtral.num_experts_per_token, mixtral.moe_ffn_hidden_size) == (4, 2, 96)
    assert (mixtral.normalize_topk, mixtral.qk_norm, mixtral.moe_layers, mixtral.rope_theta) == (True, False, 4, 1e6)
    qwen = read(tmp_path, QWEN3 | {"num_local_experts": None, "num_experts": 8, "decoder_sparse_step": 2})
    assert (qwen.num_experts, qwen.moe_ffn_hidden_size, qwen.ffn_hidden_size, qwen.qk_norm) == (8, 48, 96, True)
    assert (qwen.dense_layers, qwen.moe_layers) == ((0, 2), 2)
    assert read(tmp_path, QWEN3 | {"mlp_only_layers": [3]}).dense_layers == (3,)
    assert not read(tmp_path, QWEN3 | {"norm_topk_prob": False}).normalize_topk
    assert model_config_from_dict(json.loads(json.dumps(model_config_to_dict(qwen))), "here") == qwen


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (MIXTRAL | {"router_jitter_noise": 0.1}, "router_jitter_noise is not supported; set it to 0"),
        (MIXTRAL | {"sliding_window": 64}, "sliding_window 64 is shorter than max_position_embeddings 128"),
        (MIXTRAL | {"num_experts_per_tok": 1}, "num_experts_per_tok 1 with normalised probabilities"),
        (MIXTRAL | {"num_experts_per_tok": 5}, "num_experts_per_tok 5 is not a number of the 4 experts"),
        (QWEN3 | {"use_sliding_window": True, "sliding_window": 64}, "sliding_window 64 is shorter"),
        (QWEN3 | {"attention_bias": True}, "attention_bias True and mlp_bias False differ"),
    ],
)
def test_what_is_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, values)


def test_what_megatron_is_told(tmp_path: Path) -> None:
    sizes = ParallelSizes(2, expert_model_parallel_size=2)
    model = read(tmp_path, QWEN3 | {"mlp_only_layers": [1], "norm_topk_prob": False})
    told = transformer_config(model, sizes, dtype=torch.float32, moe_aux_loss_coef=0.01)
    assert (told.num_moe_experts, told.moe_router_topk, told.moe_ffn_hidden_size) == (4, 2, 48)
    assert (told.moe_layer_freq, told.moe_router_pre_softmax, told.moe_router_dtype) == ([1, 0, 1, 1], True, "fp32")
    assert (told.moe_router_load_balancing_type, told.moe_aux_loss_coeff) == ("aux_loss", 0.01)
    assert (told.expert_model_parallel_size, told.expert_tensor_parallel_size, told.qk_layernorm) == (2, 1, True)
    assert told.moe_expert_capacity_factor is None  # no token is dropped
    plain = transformer_config(replace(model, normalize_topk=True), sizes, dtype=torch.float32)
    assert (plain.moe_router_load_balancing_type, plain.moe_router_pre_softmax) == ("none", False)


def test_emulated_fp8_is_refused(tmp_path: Path) -> None:
    fp8 = Fp8(
        format="hybrid", recipe="tensorwise", margin=0, amax_history_len=1, amax_compute_algo="max",
        first_last_layers_bf16=False, emulated=True,
    )  # fmt: skip
    (problem,) = model_problems(fp8, "actor", read(tmp_path, MIXTRAL), ParallelSizes())
    assert "fp8_emulation knows dense layers only" in problem


def test_a_dense_actor_has_no_routers_to_balance(tmp_path: Path) -> None:
    moe = read(tmp_path, MIXTRAL)
    config = make_config(tmp_path, tmp_path / "out", "actor.moe_aux_loss_coef=0.01")
    models = dict.fromkeys(("actor", "critic", "reference", "reward0"), replace(moe, num_experts=None))
    with pytest.raises(
        ConfigError, match=r"actor.moe_aux_loss_coef 0.01 is for mixture-of-experts models.*set it to 0"
    ):
        check_run(config, 1, models)
    check_run(config, 1, models | {"actor": moe, "reference": moe})


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(1, 20))
def test_micro_batches_are_cut_in_halves(sizes: list[int], count: int) -> None:
    numbers = iter(range(100))
    plan = [[next(numbers) for _ in range(size)] for size in sizes]
    found = split_up(plan, count)
    assert [row for rows in found for row in rows] == [row for rows in plan for row in rows]
    assert len(found) == max(len(plan), min(count, sum(sizes)))


def test_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    example = "examples/configs/ppo_qwen3_moe.yaml"
    result = CliRunner().invoke(app, ["dryrun", example, "--world-size", "16"])
    assert result.exit_code != 0
    assert "actor, reference is a mixture of experts" in f"{result.output} {result.exception}"
    told = ["plan", example, "--gpus", "16", "--gpu-memory", "80GB"]
    planned = CliRunner().invoke(app, told)
    assert planned.exit_code == 0, planned.output
    for text in ("DP 8, experts over EP 8", "30,532,122,624 (3,353,032,704", "EP sent", "FITS."):
        assert text in planned.output
    shared = CliRunner().invoke(app, [*told, "parallel.expert_model_parallel_size=2", "--json"])
    answer = json.loads(shared.stdout)
    assert any("parallel.expert_model_parallel_size=8" in mend["change"] for mend in answer["mends"])
    found = CliRunner().invoke(app, [*told, "--search", "--json"])
    best = json.loads(found.stdout)["search"]["layouts"]
    assert all("parallel.expert_model_parallel_size" in " ".join(layout["overrides"]) for layout in best[:1])
