"""The planner's arithmetic against hand numbers and published ones."""

from __future__ import annotations

from dataclasses import astuple, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrlhf.config_sections import FP8_TOKENS
from mrlhf.errors import ConfigError
from mrlhf.model_config import ModelConfig
from mrlhf.planner import ParallelSizes
from mrlhf.planning import activations, flops, fp8
from mrlhf.planning.hardware import (
    Efficiency,
    Hardware,
)
from mrlhf.planning.job import Job, Role, Rollout, Rows
from mrlhf.planning.memory import checkpoint_bytes, kv_cache_bytes, persistent, phases
from mrlhf.planning.parameters import layer_parameters, model_parameters, stage_parameters
from mrlhf.planning.timing import Clock
from mrlhf.planning.traffic import pass_traffic, ring, step_traffic

ROOT = Path(__file__).parents[2]
TINY = ModelConfig(
    family="llama",
    hidden_size=8,
    num_layers=4,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=2,
    ffn_hidden_size=16,
    vocab_size=100,
    max_position_embeddings=64,
)


def llama(hidden: int, layers: int, heads: int, ffn: int) -> ModelConfig:
    return ModelConfig(
        family="llama",
        hidden_size=hidden,
        num_layers=layers,
        num_attention_heads=heads,
        num_query_groups=8,
        head_dim=128,
        ffn_hidden_size=ffn,
        vocab_size=128256,
        max_position_embeddings=8192,
    )


LLAMA_70B, LLAMA_8B = llama(8192, 80, 64, 28672), llama(4096, 32, 32, 14336)


ALONE = ParallelSizes()


def job(
    sizes: ParallelSizes = ALONE,
    model: ModelConfig = TINY,
    *,
    head: str = "lm",
    dtype: str = "bf16",
    distributed: bool = False,
    recompute: bool = False,
    **options: object,
) -> Job:
    role = Role("actor", model, sizes, head, trained=True, recompute=recompute)  # type: ignore[arg-type]
    rows = Rows(2, 10, 4)
    values = {"rows": 8, "minibatch": 8, "epochs": 1, "train": rows, "train_mean": rows, **options}
    return Job("ppo", (role,), dtype, distributed, **values)  # type: ignore[arg-type]


def test_published_parameter_counts() -> None:
    assert model_parameters(LLAMA_70B) == 70_553_706_496
    assert model_parameters(LLAMA_8B) == 8_030_261_248
    # A value head instead of the language model's: 128,256 rows fewer.
    assert model_parameters(LLAMA_8B, "value") == 8_030_261_248 - 128255 * 4096


def test_layer_by_hand() -> None:
    # qkv: 8 x (8 + 2 x 2 x 2), projection 8 x 8; gate, up, down: 3 x 8 x 16; two norms of 8.
    layer = layer_parameters(TINY, 1)
    assert (layer.attention, layer.mlp, layer.vectors) == (8 * 16 + 64, 3 * 8 * 16, 16)
    half = layer_parameters(TINY, 2)
    assert (half.attention, half.mlp, half.vectors) == (96, 192, 16)
    # Biases: qkv 16 and fc1 32 are divided; projection 8 and fc2 8 are on every rank.
    biased = replace(TINY, qkv_bias=True, attention_output_bias=True, mlp_bias=True)
    assert layer_parameters(biased, 1).vectors == 16 + 16 + 8 + 32 + 8
    assert layer_parameters(biased, 2).vectors == 16 + 8 + 8 + 16 + 8
    assert layer_parameters(replace(TINY, qkv_bias=True), 1).vectors == 16 + 16
    plain = replace(TINY, activation="gelu", norm="layernorm")
    assert (layer_parameters(plain, 1).mlp, layer_parameters(plain, 1).vectors) == (2 * 8 * 16, 32)


def test_stages_by_hand() -> None:
    layer = 192 + 384 + 16
    sizes = ParallelSizes(2, pipeline_model_parallel_size=2)
    first, last = stage_parameters(TINY, sizes, "lm")
    # 100 tokens are padded to 128 rows.
    assert (first.total, last.total) == (2 * layer + 1024, 2 * layer + 8 + 1024)
    tied = replace(TINY, tie_word_embeddings=True)
    assert [s.total for s in stage_parameters(tied, sizes, "lm")] == [first.total, last.total]
    assert stage_parameters(tied, ParallelSizes(), "lm")[0].total == 4 * layer + 8 + 1024
    assert stage_parameters(TINY, ParallelSizes(), "lm")[0].total == 4 * layer + 8 + 2048
    value = stage_parameters(tied, sizes, "value", value_bias=True)
    assert [s.total for s in value] == [2 * layer + 1024, 2 * layer + 8 + 8 + 1]
    uneven = replace(sizes, num_layers_in_first_pipeline_stage=1)
    assert [s.layers for s in stage_parameters(TINY, uneven, "lm")] == [1, 3]
    with pytest.raises(ConfigError, match="4 layers"):
        stage_parameters(TINY, ParallelSizes(3, pipeline_model_parallel_size=3), "lm")


@given(st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]), st.booleans(), st.sampled_from(["lm", "value"]))
def test_shards_add_up_to_the_model(tp: int, pp: int, tied: bool, head: str) -> None:
    model = replace(TINY, tie_word_embeddings=tied, qkv_bias=True, attention_output_bias=True, mlp_bias=True)
    sizes = ParallelSizes(tp * pp, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    role = Role("actor", model, sizes, head, trained=True)  # type: ignore[arg-type]
    from mrlhf.planning.memory import distinct_parameters

    padded = replace(model, vocab_size=128 if tp == 1 else 256)
    assert distinct_parameters(role) == model_parameters(padded, head)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "distributed", "dp", "weights", "optimizer"),
    [
        ("fp32", False, 1, 4, 8.0),
        ("bf16", False, 1, 2, 12.0),
        ("bf16", True, 4, 2, 3.0),
        ("fp16", True, 2, 2, 6.0),
        ("fp32", True, 4, 4, 2.0),
    ],
)
def test_bytes_of_a_parameter(dtype: str, distributed: bool, dp: int, weights: int, optimizer: float) -> None:
    made = job(ParallelSizes(dp), dtype=dtype, distributed=distributed)
    count = made.roles[0].stages[0].total
    kept = persistent(made, made.roles[0], 0)
    assert (kept.weights, kept.gradients, kept.average) == (weights * count, 4 * count, 0)
    assert kept.optimizer == pytest.approx(optimizer * count, abs=1)
    frozen = persistent(made, replace(made.roles[0], trained=False), 0)
    assert frozen.total == weights * count


def test_fp8_weights_are_kept_beside_the_others() -> None:
    made = job()
    role = made.roles[0]
    matrices = role.stages[0].layer.matrices
    base = persistent(made, role, 0)
    assert base.fp8 == 0
    # A byte of the matrix and one of its transpose, and an fp32 scale for each of four matrices.
    kept = persistent(made, replace(role, fp8=True), 0)
    assert (kept.weights, kept.fp8, kept.total) == (base.weights, 4 * (2 * matrices + 16), base.total + kept.fp8)
    assert persistent(made, replace(role, fp8=True, bf16_ends=1), 0).fp8 == 2 * (2 * matrices + 16)
    assert persistent(made, replace(role, fp8=True, trained=False), 0).fp8 == 4 * (matrices + 16)
    by_recipe = {name: replace(role, fp8=True, fp8_recipe=name, fp8_history=10) for name in FP8_TOKENS}
    # Delayed: five tensors of each matrix have a scale and 10 largest values. MXFP8: a byte for 32 elements.
    assert persistent(made, by_recipe["delayed"], 0).fp8 == 4 * (2 * matrices + 4 * 5 * 11 * 4)
    assert persistent(made, by_recipe["mxfp8"], 0).fp8 == 4 * 2 * (matrices + 18)
    assert matrices == 576
    # 128 x 128 blocks have an fp32 scale each: an 8B model's layer of 218,103,808 elements has 13,312 of them.
    large = replace(by_recipe["blockwise"], model=LLAMA_8B)
    assert persistent(made, large, 0).fp8 == 32 * 2 * (218_103_808 + 4 * 13_312)


@pytest.mark.parametrize(
    ("recipe", "sizes", "expected"),
    [
        ("tensorwise", {"tensor_model_parallel_size": 2, "sequence_parallel": True}, ("tp", 2, 8, 16, 4)),
        ("tensorwise", {"tensor_model_parallel_size": 2}, None),
        ("delayed", {"tensor_model_parallel_size": 2}, ("tp", 2, 0, 2, 4 * 3 * 4 * 4)),
        ("delayed", {"tensor_model_parallel_size": 2, "context_parallel_size": 2}, ("tp_cp", 4, 0, 2, 4 * 3 * 4 * 4)),
        ("delayed", {}, None),
        ("blockwise", {"tensor_model_parallel_size": 2, "sequence_parallel": True}, None),
        ("mxfp8", {"tensor_model_parallel_size": 2, "sequence_parallel": True}, None),
    ],
)
def test_largest_values_that_ranks_exchange(recipe: str, sizes: dict[str, object], expected: object) -> None:
    """Of 4 layers: 2 gathered inputs each, and backwards 2 gathered gradients."""
    role = Role("actor", TINY, ParallelSizes(8, **sizes), "lm", trained=True, fp8=True)  # type: ignore[arg-type]
    found = fp8.amax_reductions(replace(role, fp8_recipe=recipe), 0)  # type: ignore[arg-type]
    assert (None if found is None else astuple(found)) == expected
    assert fp8.amax_reductions(replace(role, fp8=False), 0) is None


def test_fp8_speeds_up_the_linear_layers_alone_and_halves_what_is_gathered() -> None:
    ideal = Efficiency(flops=1.0, bandwidth=1.0, link=1.0, link_seconds=0.0, network_seconds=0.0, layer_seconds=0.0)
    fast = Hardware("x", 1e9, {"bf16": 1e6, "fp8": 4e6}, bandwidth=1e30, link=1e30, network=1e30)
    made = job(rows=8, minibatch=8)
    role, rows = made.roles[0], made.train_mean
    half = replace(made, roles=(replace(role, fp8=True, bf16_ends=1),))
    everything = flops.training(made, role, role.stages[0], rows)
    # Two of four layers are in FP8; attention and the head are not.
    linear = 3 * 2 * 2 * 576 * rows.tokens
    seconds = Clock(half, fast, ideal).phases()["train"].compute
    assert seconds == pytest.approx(4 * (everything - linear + linear / 4) / 1e6)
    split = job(ParallelSizes(2, tensor_model_parallel_size=2, sequence_parallel=True))
    plain = split.roles[0]
    size = ring(2, rows.tokens * 8 * 2)
    for backward, gathers in ((False, 2), (True, 6)):
        sent, fewer = (
            pass_traffic(split, each, 0, rows, backward=backward).tensor for each in (plain, replace(plain, fp8=True))
        )
        assert sent - fewer == 4 * gathers * size / 2


def test_keys_and_values_over_context_parallel_ranks() -> None:
    rows = Rows(2, 12, 4)
    shared = job(ParallelSizes(2, context_parallel_size=2))
    # 24 tokens of 2 x 2 heads x 2 numbers in bf16, of which a rank sends half, in each of 4 layers.
    once = 4 * 24 * 8 * 2 / 2
    for made, backward, times in ((shared, False, 1), (shared, True, 3), (replace(shared, cuda=False), True, 2)):
        assert pass_traffic(made, made.roles[0], 0, rows, backward=backward).context == times * once
    ideal = Efficiency(flops=1.0, bandwidth=1.0, link=1.0, link_seconds=0.0, network_seconds=0.0, layer_seconds=0.0)
    near = Hardware("x", 1e9, {"bf16": 1e30}, bandwidth=1e30, link=1e3, network=1e30)
    seconds = Clock(replace(shared, train_mean=rows), near, ideal).phases()["train"]
    assert seconds.context == pytest.approx(4 * 3 * once / 1e3)


def test_kv_cache_by_hand() -> None:
    rollout = Rollout(3, 10, 6, 10, 6)
    # 2 (keys and values) x 4 layers x (3 + 1) slots x 16 tokens x 2 heads x 2 numbers x 2 bytes.
    assert kv_cache_bytes(job(), job().roles[0], rollout, 4) == 2 * 4 * 4 * 16 * 2 * 2 * 2
    shared = job(ParallelSizes(4, tensor_model_parallel_size=2))
    # One head of each rank; 8 rows over DP 2 are 4, more than 3 slots.
    assert kv_cache_bytes(shared, shared.roles[0], rollout, 4) == 2 * 4 * 4 * 16 * 1 * 2 * 2
    few = job(rows=2)
    assert kv_cache_bytes(few, few.roles[0], rollout, 4) == 2 * 4 * 3 * 16 * 2 * 2 * 2


def test_kept_activations_of_a_layer_by_hand() -> None:
    rows = Rows(2, 10, 4)
    n, e, h, f, query, keys = 20, 2, 8, 16, 8, 4
    norms = 4 * n * h * e + 2 * n * 4
    attention = n * (query + 2 * keys) * e + n * (query + keys) * e + n * query * e + 4 * n * 4 + 4 * 10 * 2 * e
    mlp = 3 * n * f * e
    assert activations.layer_kept(job(), job().roles[0], rows) == norms + attention + mlp
    split = job(ParallelSizes(2, tensor_model_parallel_size=2, sequence_parallel=True))
    # All but the rotary table is halved.
    table = 4 * 10 * 2 * e
    assert activations.layer_kept(split, split.roles[0], rows) == (norms + attention + mlp - table) // 2 + table
    whole = job(ParallelSizes(2, tensor_model_parallel_size=2))
    assert activations.layer_kept(whole, whole.roles[0], rows) == norms + (attention + mlp - table) // 2 + table


def test_context_parallel_ranks_keep_their_part_and_all_keys() -> None:
    alone, shared = job(), job(ParallelSizes(2, context_parallel_size=2))
    rows = Rows(2, 12, 4)
    one = activations.layer_kept(alone, alone.roles[0], rows)
    assert activations.layer_kept(shared, shared.roles[0], rows) * 2 == one
    one = activations.layer_kept(replace(alone, cuda=False), alone.roles[0], rows)
    gathered = 24 * 2 * 4 * 2
    assert activations.layer_kept(replace(shared, cuda=False), shared.roles[0], rows) == one // 2 + gathered
    assert flops.forward(shared.roles[0], shared.roles[0].stages[0], rows) * 2 == flops.forward(
        alone.roles[0], alone.roles[0].stages[0], rows
    )


@pytest.mark.parametrize(
    ("pp", "vpp", "stage", "count", "expected"),
    [
        (1, None, 0, 8, 1),
        (4, None, 0, 8, 4),
        (4, None, 3, 8, 1),
        (4, None, 0, 2, 2),
        (2, 2, 0, 8, 2 * 1 + 2 + 1),
        (2, 2, 1, 8, 2 + 1),
        (2, 2, 0, 2, 4),
    ],
)
def test_micro_batches_in_flight(pp: int, vpp: int | None, stage: int, count: int, expected: int) -> None:
    sizes = ParallelSizes(pp, pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vpp)
    role = Role("actor", TINY, sizes, "lm", trained=True)
    assert activations.in_flight(role, stage, count)[0] == expected


def test_tiles_are_those_of_the_head() -> None:
    from mrlhf.parallel import tiled_head
    from mrlhf.planning import memory
    from mrlhf.rollout import engine

    assert (activations.CPU_TILE, activations.CUDA_TILE) == (tiled_head._CPU_TILE, tiled_head._CUDA_TILE)
    assert (tiled_head._BLOCK_TOKENS, tiled_head._CPU_KEPT) == (activations.BLOCK_TOKENS, activations.CPU_KEPT)
    assert engine.PREFILL_TOKENS == memory.PREFILL_TOKENS


def test_recomputation_keeps_inputs_alone() -> None:
    sizes = ParallelSizes(4, pipeline_model_parallel_size=4)
    kept, again = (
        activations.training(made, made.roles[0], 0)
        for made in (job(sizes, rows=64, minibatch=64), job(sizes, rows=64, minibatch=64, recompute=True))
    )
    one = activations.layer_kept(job(), job().roles[0], Rows(2, 10, 4))
    assert (kept.kept, again.kept) == (4 * one, 4 * 20 * 8 * 2)
    assert again.working - kept.working == one


def test_flops_by_hand() -> None:
    role, rows = Role("actor", TINY, ParallelSizes(), "lm", trained=True), Rows(2, 10, 4)
    stage = role.stages[0]
    layers = 2 * 4 * (192 + 384) * 20 + 2 * 4 * 8 * 10**2 * 2
    head = 2 * 8 * 100 * 2 * 4
    assert flops.forward(role, stage, rows) == layers + head
    assert flops.training(job(), role, stage, rows) == 3 * layers + 4 * head
    assert flops.training(job(), replace(role, recompute=True), stage, rows) == 4 * layers + 4 * head
    value = replace(role, head="value")
    assert flops.forward(value, value.stages[0], rows) == layers + 2 * 8 * 20


def test_generation_costs_what_its_tokens_cost_one_by_one() -> None:
    role, rollout = Role("actor", TINY, ParallelSizes(), "lm"), Rollout(2, 5, 4, 5, 4)
    stage = role.stages[0]
    # Prefill of 5 tokens, then 3 tokens; attention of a token over the c before it costs 4 a d c a layer.
    one_by_one = sum(4 * 4 * 8 * (c + 0.5) for c in range(5, 8)) + 3 * 2 * (4 * 576 + 1024)
    assert flops.decode(role, stage, rollout, 1.0) == pytest.approx(one_by_one)
    assert flops.prefill(role, stage, rollout, 1.0) == 2 * 4 * 576 * 5 + 2 * 4 * 8 * 25 + 2 * 1024


def test_traffic_by_hand() -> None:
    rows = Rows(2, 10, 4)
    assert ring(4, 100.0) == 75
    plain = job(ParallelSizes(2, tensor_model_parallel_size=2))
    size = 20 * 8 * 2
    sent = pass_traffic(plain, plain.roles[0], 0, rows, backward=False)
    # Two all-reduces in each of 4 layers and one of the embedding, of which a rank sends 2 (t - 1) / t; then 3 fp32
    # numbers of each of 8 wanted tokens.
    assert sent.tensor == (2 * 4 + 1) * size + 3 * 4 * 8
    assert pass_traffic(plain, plain.roles[0], 0, rows, backward=True).tensor == (4 * 4 + 2) * size + 3 * 4 * 8
    split = job(ParallelSizes(2, tensor_model_parallel_size=2, sequence_parallel=True))
    # The same volume as halves; 2 more gathers a layer backwards; embedding and head have one half in each direction.
    assert pass_traffic(split, split.roles[0], 0, rows, backward=True).tensor == (10 * 4 + 4) * size / 2 + 3 * 4 * 8
    stages = job(ParallelSizes(2, pipeline_model_parallel_size=2))
    assert [pass_traffic(stages, stages.roles[0], i, rows, backward=True).pipeline for i in (0, 1)] == [size, size]
    assert pass_traffic(stages, stages.roles[0], 1, rows, backward=False).pipeline == 0
    count = job().roles[0].stages[0].total
    replicas = job(ParallelSizes(2))
    assert step_traffic(replicas, replicas.roles[0], 0).data == 4 * count
    divided = job(ParallelSizes(2), distributed=True)
    assert step_traffic(divided, divided.roles[0], 0).data == (4 + 2) * count / 2


def test_time_of_a_pipeline() -> None:
    """Compute alone: m micro-batches over p equal stages take m + p - 1 of them."""
    ideal = Efficiency(flops=1.0, bandwidth=1.0, link=1.0, link_seconds=0.0, network_seconds=0.0, layer_seconds=0.0)
    fast = Hardware("x", 1e9, {"bf16": 1e6, "fp32": 1e6}, bandwidth=1e30, link=1e30, network=1e30)
    model = replace(TINY, vocab_size=1, tie_word_embeddings=True)
    made = job(ParallelSizes(4, pipeline_model_parallel_size=4), model, head="value", rows=16, minibatch=16)
    seconds = Clock(made, fast, ideal).phases()["train"]
    role = made.roles[0]
    slowest = max(flops.training(made, role, stage, made.train_mean) for stage in role.stages) / 1e6
    assert seconds.total == pytest.approx((8 + 3) * slowest, rel=1e-6)
    assert seconds.bubble == pytest.approx(3 * slowest, rel=1e-6)


def test_a_decoding_step_reads_weights_and_cache() -> None:
    ideal = Efficiency(flops=1.0, bandwidth=1.0, link=1.0, link_seconds=0.0, network_seconds=0.0, layer_seconds=0.0)
    slow = Hardware("x", 1e9, {"bf16": 1e30}, bandwidth=1e3, link=1e30, network=1e30)
    rollout = Rollout(2, 5, 4, 5, 4)
    made = job(rows=2, rollout=rollout)
    seconds = Clock(made, slow, ideal).phases()["rollout"]
    stage = made.roles[0].stages[0]
    weights = (4 * stage.layer.total + stage.output) * 2
    cache = 2 * 4 * 2 * 2 * 2 * 2 * (5 + 1.5)
    assert seconds.compute == pytest.approx(3 * (weights + cache) / 1e3, rel=1e-9)


@pytest.mark.parametrize(("dp", "distributed", "expected"), [(1, False, 0), (1, True, 4.0), (4, True, 5.0)])
def test_buffers_of_a_save(dp: int, distributed: bool, expected: float) -> None:
    made = job(ParallelSizes(dp), distributed=distributed)
    count = made.roles[0].stages[0].total
    assert phases(made, {"actor": 0})["save"].buffers == pytest.approx(expected * count, abs=4)
    assert phases(replace(made, save_optimizer=False), {"actor": 0})["save"].buffers == 0


def test_checkpoint_bytes_by_hand() -> None:
    made = job()
    assert checkpoint_bytes(made) == 14 * made.roles[0].stages[0].total
    assert checkpoint_bytes(replace(made, save_optimizer=False)) == 2 * made.roles[0].stages[0].total
