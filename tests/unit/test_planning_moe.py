"""The planner's mixtures of experts: published parameter counts, and hand numbers of a small one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mrlhf.checkpoint.hf_config import read_model_config
from mrlhf.config import load_config
from mrlhf.model_config import ModelConfig
from mrlhf.planner import ParallelSizes
from mrlhf.planning import activations, experts, flops, fp8
from mrlhf.planning.hardware import HARDWARE, Efficiency, Hardware
from mrlhf.planning.job import Job, Role, Rollout, Rows
from mrlhf.planning.memory import distinct_parameters, persistent
from mrlhf.planning.mend import mends
from mrlhf.planning.parameters import active_parameters, model_parameters, stage_parameters
from mrlhf.planning.question import Question
from mrlhf.planning.timing import Clock
from mrlhf.planning.traffic import pass_traffic, step_traffic

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
MODELS = CONFIGS / "models"
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


def test_the_larger_kind_of_layer_is_computed_again() -> None:
    wide = replace(role(1, replace(SMALL, dense_layers=(1,), ffn_hidden_size=1000)), recompute=True)
    narrow = replace(role(1, replace(SMALL, dense_layers=(1,), ffn_hidden_size=1)), recompute=True)
    dense, mixture = (activations.layer_kept(job(wide), wide, ROWS, moe=moe) for moe in (False, True))
    assert dense > mixture > activations.layer_kept(job(narrow), narrow, ROWS)
    for each, kept in ((wide, dense), (narrow, mixture)):
        plain = activations.training(job(each), replace(each, recompute=False), 0)
        assert activations.training(job(each), each, 0).working == plain.working + kept


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
    # One token reads two of four experts, a second one leaves out each of the others once in two.
    assert [experts.read_share(role(1), tokens) for tokens in (0, 1, 2)] == pytest.approx([0, 1 / 2, 3 / 4])
    assert experts.read_share(two, 1) == pytest.approx(3 / 4)


def test_matrices_in_fp8_are_those_of_the_experts_of_the_rank() -> None:
    """Attention 192 and two of four experts of 144 in one layer, 192 and 240 in the dense one."""
    mixed = replace(role(2, replace(SMALL, dense_layers=(1,)), expert_model_parallel_size=2), fp8=True)
    assert fp8.elements(mixed, 0) == 192 + 2 * 144 + 192 + 240
    assert fp8.elements(mixed, 0, read=0.5) == 192 + 144 + 192 + 240
    # Copies in both orders; an fp32 scale for 2 + 2 x 2 matrices of the one layer, 4 of the other.
    assert persistent(job(mixed), mixed, 0).fp8 == 2 * 912 + 4 * (6 + 4)
    tensor = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    for dense, gathered in (((), 2), ((1,), 3), ((0, 1), 4)):
        split = replace(role(2, replace(SMALL, dense_layers=dense), **tensor), fp8=True)
        # Experts get their tokens from other ranks, so that only the attention's input is gathered.
        reductions = fp8.amax_reductions(split, 0)
        assert reductions is not None
        assert (reductions.forward, reductions.training) == (gathered, 2 * gathered)
        assert fp8.gathers_saved(split, 0, 2, backward=True) == 3 * gathered / 2
        delayed = fp8.amax_reductions(replace(split, fp8_recipe="delayed"), 0)
        assert delayed is not None
        assert delayed.bytes == 4 * 3 * sum(4 if layer in dense else 6 for layer in range(2))


def test_a_decoding_step_reads_the_experts_that_tokens_go_to() -> None:
    """With many experts most are idle, in FP8 too, where a weight is read as one byte."""
    many = replace(SMALL, num_experts=64)
    slow = Hardware("x", 1e9, {"bf16": 1e30, "fp8": 1e30}, bandwidth=1e3, link=1e30, network=1e30)
    ideal = Efficiency(flops=1.0, bandwidth=1.0, link=1.0, link_seconds=0.0, network_seconds=0.0, layer_seconds=0.0)
    rollout = Rollout(slots=1, longest_prompt=1, longest_response=2, mean_prompt=1, mean_response=2)
    seconds = {}
    for in_fp8 in (False, True):
        one = replace(role(1, many), fp8=in_fp8)
        made = replace(job(one), rows=1, rollout=rollout)
        seconds[in_fp8] = Clock(made, slow, ideal).phases()["rollout"].compute
    # A token goes to 2 of 64 experts. The router, norms, the output layer and the cache are not in FP8.
    assert seconds[False] - seconds[True] == pytest.approx(2 * (192 + 2 * 144) / 1e3)
    rest = 2 * 2 * (64 * 8 + 16) + 2 * 256 * 8 + 2 * 2 * 2 * 2 * 2 * 1.5
    assert seconds[True] == pytest.approx((2 * (192 + 2 * 144) + rest) / 1e3)


def test_an_optimizer_step_of_experts_is_shared_by_fewer_replicas() -> None:
    slow = Hardware("x", 1e9, {"bf16": 1e30}, bandwidth=1e3, link=1e30, network=1e30)
    ideal = Efficiency(flops=1.0, bandwidth=1.0, link=1.0, link_seconds=0.0, network_seconds=0.0, layer_seconds=0.0)
    four = role(4, expert_model_parallel_size=4)
    dense, shared = four.stages[0].total - 2 * 144, 2 * 144
    expected = (dense * (8 + 30 / 4) + shared * (8 + 30)) / 1e3
    assert Clock(job(four), slow, ideal).phases()["optimizer"].other == pytest.approx(expected)


def test_what_fp8_asks_of_a_mixture_of_experts() -> None:
    """Columns of experts count, and those of dense layers where there are any; emulation knows neither."""
    wide = replace(SMALL, hidden_size=64, num_attention_heads=4, head_dim=32, ffn_hidden_size=90)
    settings = {"recipe": "tensorwise", "bf16_ends": 0}
    for model, named in (
        (replace(wide, moe_ffn_hidden_size=24), ["columns of an expert / ETP is 24"]),
        (replace(wide, moe_ffn_hidden_size=32), []),
        (replace(wide, moe_ffn_hidden_size=32, dense_layers=(0,)), ["ffn_hidden_size / TP is 90"]),
        (replace(wide, num_experts=None), ["ffn_hidden_size / TP is 90"]),
    ):
        found = fp8.layer_problems("actor", model, ParallelSizes(), emulated=False, **settings)  # type: ignore[arg-type]
        assert len(found) == len(named), found
        assert all(text in problem for text, problem in zip(named, found, strict=True))
    (problem,) = fp8.layer_problems("actor", wide, ParallelSizes(), emulated=True, **settings)  # type: ignore[arg-type]
    assert "fp8_emulation knows dense layers only" in problem


@pytest.mark.parametrize(
    ("overrides", "world", "memory", "wanted"),
    [
        # A mixture of experts has no tensor parallelism without sequence parallelism.
        (("expert_model_parallel_size=4",), 16, 60e9, "tensor_model_parallel_size=2 parallel.sequence_parallel=true"),
        (("pipeline_model_parallel_size=1", "expert_model_parallel_size=2"), 2, 80e9, "expert_model_parallel_size=16 "
         "--gpus 16"),
    ],
)  # fmt: skip
def test_mends_of_a_mixture_of_experts(overrides: tuple[str, ...], world: int, memory: float, wanted: str) -> None:
    config = load_config(CONFIGS / "ppo_qwen3_moe.yaml", [f"parallel.{override}" for override in overrides])
    models = dict.fromkeys(("actor", "reference"), read_model_config(MODELS / "qwen3-30b-a3b"))
    asked = Question(config, models, world, replace(HARDWARE["h100"], memory=memory), reserve=2**31)
    found = mends(asked)
    words = [" ".join(mend.change.words()) for mend in found]
    assert any(wanted in each for each in words), words
    for mend in found:
        assert asked.changed(mend.change.values, mend.change.world_size).peak_bytes() == mend.peak <= asked.limit
