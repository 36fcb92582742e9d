"""The planner's mixtures of experts: published parameter counts, and hand numbers of a small one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mrlhf.checkpoint.hf_config import read_model_config
from mrlhf.model_config import ModelConfig
from mrlhf.planner import ParallelSizes
from mrlhf.planning import experts, flops
from mrlhf.planning.job import Job, Role, Rows
from mrlhf.planning.memory import distinct_parameters, persistent
from mrlhf.planning.parameters import active_parameters, model_parameters, stage_parameters
from mrlhf.planning.traffic import pass_traffic, step_traffic

MODELS = Path(__file__).parents[2] / "examples" / "configs" / "models"
# 2 layers of E 4 experts, k 2; a layer: attention 8 (4 + 2 2) 2 + 4 2 8 = 192, router 32, an expert 3 8 6 = 144.
SMALL = ModelConfig(
    family="mixtral", hidden_size=8, num_layers=2, num_attention_heads=4, num_query_groups=2, head_dim=2,
    ffn_hidden_size=10, vocab_size=256, max_position_embeddings=64, num_experts=4, num_experts_per_token=2,
    moe_ffn_hidden_size=6,
)  # fmt: skip
ROWS = Rows(1, 16, 15)


def role(world: int, model: ModelConfig = SMALL, **sizes: int) -> Role:
    return Role("actor", model, ParallelSizes(world, sequence_parallel=True, **sizes), "lm", trained=True)


def job(of: Role) -> Job:
    return Job("ppo", (of,), "bf16", True, rows=8, minibatch=8, epochs=1, train=ROWS, train_mean=ROWS)


@pytest.mark.parametrize(
    ("folder", "total", "active"), [("mixtral-8x7b", 46.70e9, 12.88e9), ("qwen3-30b-a3b", 30.53e9, 3.35e9)]
)
def test_published_sizes(folder: str, total: float, active: float) -> None:
    model = read_model_config(MODELS / folder)
    assert model_parameters(model) == pytest.approx(total, rel=1e-3)
    assert active_parameters(model) == pytest.approx(active, rel=1e-3)


def test_parameters_by_hand() -> None:
    layer = stage_parameters(SMALL, ParallelSizes(), "lm")[0].layer
    assert (layer.attention, layer.mlp, layer.experts, layer.vectors) == (192, 32, 4 * 144, 16)
    assert layer.matrices == 192 + 2 * 144 + 32
    (shared,) = stage_parameters(SMALL, ParallelSizes(2, expert_model_parallel_size=2), "lm")
    assert shared.experts == 2 * 2 * 144
    assert shared.layer.matrices == layer.matrices  # as many tokens come from the other rank as go there
    tensor = role(4, tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    assert tensor.stages[0].layer.experts == 2 * 144
    assert tensor.stages[0].layer.matrices == 192 / 2 + (2 * 144 + 32) / 2
    for each in (tensor, role(1), role(2, expert_model_parallel_size=2), role(2, pipeline_model_parallel_size=2)):
        assert distinct_parameters(each) == model_parameters(SMALL)


def test_dense_layers_among_mixtures() -> None:
    mixed = replace(SMALL, dense_layers=(1,))
    first, second = stage_parameters(mixed, ParallelSizes(2, pipeline_model_parallel_size=2), "lm")
    assert (first.moe_layers, second.moe_layers) == (1, 0)
    assert first.layers_total == 192 + 32 + 4 * 144 + 16
    assert second.layers_total == 192 + 3 * 8 * 10 + 16
    assert second.matrices == 192 + 240
    assert model_parameters(SMALL) - model_parameters(mixed) == 32 + 4 * 144 - 240


def test_the_optimizer_of_experts_has_fewer_replicas() -> None:
    four = role(4, expert_model_parallel_size=2)
    dense, shared = four.stages[0].total - 2 * 2 * 144, 2 * 2 * 144
    assert persistent(job(four), four, 0).optimizer == -(-12 * dense // 4) + 12 * shared // 2
    alone = role(2, expert_model_parallel_size=2)
    sent = step_traffic(job(alone), alone, 0)
    # No other rank has the same experts; the rest is reduced (fp32) and gathered (bf16), half of it to the other one.
    assert sent.data == (alone.stages[0].total - shared) * (4 + 2) / 2


def test_tokens_to_experts_and_back() -> None:
    two = role(2, expert_model_parallel_size=2)
    # 16 tokens x 2 experts x 8 elements x 2 bytes, half of them to the other rank; there and back, two layers.
    once = 16 * 2 * 8 * 2 / 2
    assert pass_traffic(job(two), two, 0, ROWS, backward=False).expert == 2 * 2 * once
    assert pass_traffic(job(two), two, 0, ROWS, backward=True).expert == 4 * 2 * once
    again = replace(two, recompute=True)
    assert pass_traffic(job(again), again, 0, ROWS, backward=True).expert == 6 * 2 * once
    assert pass_traffic(job(role(1)), role(1), 0, ROWS, backward=True).expert == 0
    whole = flops.linear(role(1).stages[0], 16)
    assert flops.linear(two.stages[0], 16) == whole
    # One token reads two of four experts: expected 1 - (3/4)^2 of them.
    assert experts.read_share(role(1), 1) == pytest.approx(7 / 16)
