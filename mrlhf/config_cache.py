"""Whether the memory for keys and values that a run allows holds the rows that generation needs at least."""

from __future__ import annotations

from collections.abc import Mapping

from mrlhf.config_schema import PPOConfig
from mrlhf.model_config import ModelConfig
from mrlhf.planner import ParallelSizes, layer_counts


def bytes_per_row(model: ModelConfig, sizes: ParallelSizes, *, tokens: int, element_bytes: int) -> int:
    """Keys and values of a row of ``tokens`` on the rank with the most layers."""
    counts = layer_counts(
        model.num_layers,
        sizes.pipeline_model_parallel_size,
        sizes.virtual_pipeline_model_parallel_size,
        first=sizes.num_layers_in_first_pipeline_stage,
        last=sizes.num_layers_in_last_pipeline_stage,
    )
    layers = max(map(sum, counts))
    heads = max(model.num_query_groups // sizes.tensor_model_parallel_size, 1)
    return 2 * layers * tokens * heads * model.head_dim * element_bytes


def cache_problems(
    config: PPOConfig,
    world_size: int,
    models: Mapping[str, ModelConfig],
    max_response_length: int,
    *,
    element_bytes: int,
    longest_prompt: int | None = None,
) -> list[str]:
    """What is wrong with ``rollout.kv_cache_memory``: a row of each pipeline stage and one more must fit.

    Args:
        config: of a run whose layout has been checked.
        world_size: number of ranks.
        models: architectures by role.
        max_response_length: of the longest response.
        element_bytes: of a key or value; those of the run's dtype, or 4 where generation computes in fp32.
        longest_prompt: in tokens; None before the prompts are read, for what ``data.max_prompt_length`` says.
    """
    limit, model, sizes = config.rollout.kv_cache_memory, models.get("actor"), config.sizes_of("actor", world_size)
    if limit is None or model is None:
        return []
    tokens = (longest_prompt or config.data.max_prompt_length or 1) + max_response_length
    each = bytes_per_row(model, sizes, tokens=tokens, element_bytes=element_bytes)
    rows = sizes.pipeline_model_parallel_size + 1
    if each * rows <= limit * 2**30:
        return []
    # Three digits, rounded up.
    advice = f"{1.005 * each * rows / 2**30:.3g}"
    return [
        f"rollout.kv_cache_memory {limit:g} GiB does not hold {rows} rows (one for each pipeline stage and one for "
        f"filling) of {tokens} tokens, {each / 2**30:.3g} GiB each; set it to {advice} or more, or "
        "lower data.max_prompt_length or rollout.max_response_length"
    ]


def rows_at_once(config: PPOConfig, model: ModelConfig, sizes: ParallelSizes, tokens: int, element_bytes: int) -> int:
    """``rollout.batch_size``, or fewer where ``rollout.kv_cache_memory`` does not hold as many rows of ``tokens``.

    ``element_bytes`` are those of a key or value.
    """
    rollout = config.rollout
    if rollout.kv_cache_bytes is None:
        return rollout.batch_size
    each = bytes_per_row(model, sizes, tokens=tokens, element_bytes=element_bytes)
    return max(min(rollout.batch_size, rollout.kv_cache_bytes // each - 1), 1)
