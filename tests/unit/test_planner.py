"""Layout arithmetic against hand numbers; every refusal names its numbers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrlhf.errors import ConfigError
from mrlhf.model_config import ModelConfig
from mrlhf.planner import ParallelSizes, check_sizes, layer_counts, padded_vocab_size, size_problems, token_multiple

TINY = ModelConfig(
    family="llama",
    hidden_size=64,
    num_layers=4,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=16,
    ffn_hidden_size=128,
    vocab_size=97,
    max_position_embeddings=256,
)


def only_problem(sizes: ParallelSizes, models: dict[str, ModelConfig] | None = None, **batch: int) -> str:
    problems = size_problems(sizes, {"actor": TINY} if models is None else models, **batch)
    assert len(problems) == 1, problems
    return problems[0]


def test_b2_padded_vocabulary() -> None:
    assert padded_vocab_size(50257, 1) == 50304
    assert padded_vocab_size(50257, 2) == 50432
    assert padded_vocab_size(128, 1) == 128
    assert padded_vocab_size(5, 2, divisor=2) == 8


@given(st.integers(1, 300_000), st.integers(1, 64), st.integers(1, 256))
def test_padding_is_the_least_that_divides(vocab: int, tp: int, divisor: int) -> None:
    padded = padded_vocab_size(vocab, tp, divisor)
    assert padded % (tp * divisor) == 0
    assert 0 <= padded - vocab < tp * divisor


def test_sizes() -> None:
    sizes = ParallelSizes(16, tensor_model_parallel_size=2, pipeline_model_parallel_size=4)
    assert (sizes.model_parallel_size, sizes.data_parallel_size, sizes.virtual_stages) == (8, 2, 1)
    assert sizes.describe() == "world 16 = TP 2 x PP 4 x DP 2"
    assert ParallelSizes(2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=1) == ParallelSizes(
        2, pipeline_model_parallel_size=2
    )
    assert not ParallelSizes(sequence_parallel=True).sequence_parallel
    assert ParallelSizes(2, tensor_model_parallel_size=2, sequence_parallel=True).sequence_parallel
    with pytest.raises(ConfigError, match="tensor_model_parallel_size is 0"):
        ParallelSizes(tensor_model_parallel_size=0)


def test_layer_counts() -> None:
    assert layer_counts(8, 2) == [[4], [4]]
    assert layer_counts(8, 2, 2) == [[2, 2], [2, 2]]
    assert layer_counts(8, 2, first=5) == [[5], [3]]
    assert layer_counts(10, 4, first=1, last=3) == [[1], [3], [3], [3]]
    for bad in ({"first": 8}, {"first": 3, "last": 4}, {"first": 9}):
        with pytest.raises(ConfigError, match="8 layers"):
            layer_counts(8, 2, **bad)
    with pytest.raises(ConfigError, match=r"6 layers .* PP 4 "):
        layer_counts(6, 4)


def test_f1_world_is_not_a_multiple() -> None:
    sizes = ParallelSizes(6, tensor_model_parallel_size=4)
    message = only_problem(sizes, {}, minibatch_size=3, rows_per_iteration=3)
    for part in ("world size 6", "TP 4 x PP 1 x CP 1 = 4", "start 4 or 8 ranks", "1, 2, 3, 6"):
        assert part in message
    with pytest.raises(ConfigError, match="world size 6"):
        _ = sizes.data_parallel_size
    assert "start 16 ranks" in only_problem(
        ParallelSizes(6, tensor_model_parallel_size=4, pipeline_model_parallel_size=4), {}
    )


@pytest.mark.parametrize(("kv", "heads", "tp"), [(2, 4, 4), (3, 6, 2)])
def test_b7_kv_heads_name_both_numbers(kv: int, heads: int, tp: int) -> None:
    model = replace(TINY, num_query_groups=kv, num_attention_heads=heads)
    message = only_problem(ParallelSizes(tp, tensor_model_parallel_size=tp), {"reward": model})
    assert message.startswith("reward: ")
    assert f"{kv} key-value heads" in message
    assert f"TP {tp}" in message


def test_attention_heads() -> None:
    model = replace(TINY, num_attention_heads=9, num_query_groups=3, ffn_hidden_size=129)
    message = only_problem(ParallelSizes(2, tensor_model_parallel_size=2), {"actor": model})
    assert "9 attention heads" in message
    assert "3 key-value heads" in message
    assert "129 feed-forward" in message
    assert "one of 1, 3" in message


def test_layers_by_stages() -> None:
    message = only_problem(ParallelSizes(3, pipeline_model_parallel_size=3))
    assert "actor: 4 layers" in message
    assert "PP 3" in message
    virtual = ParallelSizes(2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=4)
    assert "PP 2 x VPP 4 = 8" in only_problem(virtual)


def test_virtual_stages_need_a_pipeline_and_full_rounds() -> None:
    assert "VPP 2 needs PP of at least 2" in only_problem(ParallelSizes(virtual_pipeline_model_parallel_size=2))
    sizes = ParallelSizes(2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    assert size_problems(sizes, {"actor": TINY}, minibatch_size=4, micro_batch_size=2) == []
    assert "makes 1;" in only_problem(sizes, minibatch_size=4, micro_batch_size=4)
    assert "makes 3;" in only_problem(sizes, minibatch_size=6, micro_batch_size=2)
    plain = replace(sizes, virtual_pipeline_model_parallel_size=None)
    assert size_problems(plain, {"actor": TINY}, minibatch_size=6, micro_batch_size=2) == []


def test_context_parallel_widths() -> None:
    assert size_problems(ParallelSizes(2, context_parallel_size=2), {}) == []
    assert token_multiple(ParallelSizes(2, context_parallel_size=2)) == 4
    assert token_multiple(ParallelSizes(6, 2, context_parallel_size=3, sequence_parallel=True)) == 12
    assert token_multiple(ParallelSizes(2, context_parallel_size=2), 16) == 32


def test_batches() -> None:
    sizes = ParallelSizes(4, tensor_model_parallel_size=2)
    message = only_problem(sizes, minibatch_size=6, micro_batch_size=2)
    assert "minibatch_size 6" in message
    assert "DP 2 x micro_batch_size 2 = 4" in message
    assert "use 4 or 8" in message
    assert "prompts_per_iteration 5" in only_problem(sizes, prompts_per_iteration=5)
    assert "12 rows per iteration" in only_problem(sizes, rows_per_iteration=12, minibatch_size=8)
    # A token budget decides instead of the micro-batch size.
    assert size_problems(sizes, {}, minibatch_size=6, micro_batch_size=4, micro_batch_tokens=64) == []


def test_d11_prompt_and_response_over_the_length() -> None:
    assert size_problems(ParallelSizes(), {"actor": TINY}, max_prompt_length=200, max_response_length=56) == []
    message = only_problem(ParallelSizes(), max_prompt_length=200, max_response_length=57)
    for part in ("200 prompt", "57 response", "= 257", "256", "by 1"):
        assert part in message
    batch = {"max_prompt_length": 200, "max_response_length": 56}
    assert "= 257" in only_problem(ParallelSizes(), **batch, extra_slots=1)
    assert "micro_batch_tokens to at least 256" in only_problem(ParallelSizes(), **batch, micro_batch_tokens=255)


def test_vocabulary_mismatch_names_roles_and_sizes() -> None:
    message = only_problem(ParallelSizes(), {"actor": TINY, "reward": replace(TINY, vocab_size=96)})
    assert "actor 97, reward 96" in message


def test_all_problems_come_in_one_message() -> None:
    sizes = ParallelSizes(6, tensor_model_parallel_size=4)
    models = {"actor": TINY, "reward": replace(TINY, vocab_size=96, num_attention_heads=6)}
    with pytest.raises(ConfigError) as caught:
        check_sizes(sizes, models, max_prompt_length=300, max_response_length=1)
    text = str(caught.value)
    for part in ("world size 6", "actor: 2 key-value heads", "reward: 6 attention heads", "reward 96", "301"):
        assert part in text
    check_sizes(ParallelSizes(), {"actor": TINY})
