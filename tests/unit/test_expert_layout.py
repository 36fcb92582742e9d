"""Expert parallel layouts: checks of sizes, and rank groups against Megatron-Core's own."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from mrlhf.dryrun.world import fake_world
from mrlhf.model_config import ModelConfig
from mrlhf.parallel.layout import RankGrid
from mrlhf.planner import ParallelSizes, size_problems

DENSE = ModelConfig(
    family="mixtral", hidden_size=64, num_layers=4, num_attention_heads=4, num_query_groups=2, head_dim=16,
    ffn_hidden_size=130, vocab_size=97, max_position_embeddings=256,
)  # fmt: skip
MOE = replace(DENSE, num_experts=8, moe_ffn_hidden_size=66)
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def sizes(world: int, ep: int, **others: Any) -> ParallelSizes:
    return ParallelSizes(world, expert_model_parallel_size=ep, **others)


@pytest.mark.parametrize(
    ("layout", "model", "messages"),
    [
        (sizes(2, 2), MOE, []),
        (sizes(8, 8), MOE, []),
        (sizes(4, 2, **SP), MOE, []),
        (sizes(4, 4, expert_tensor_parallel_size=1, **SP), MOE, []),
        (sizes(4, 2, context_parallel_size=2), MOE, []),
        (sizes(2, 2), DENSE, ["actor: a dense model has no experts to share over EP 2; set expert_model_parallel"]),
        (sizes(1, 1, expert_tensor_parallel_size=2), DENSE, ["no experts to share over ETP 2"]),
        (sizes(3, 3), MOE, ["8 experts cannot be divided over EP 3; .* one of 1, 2, 4, 8"]),
        (sizes(2, 4), MOE, ["EP 4 x ETP 1 = 4 does not divide the 2 ranks of a stage .* one of 1, 2"]),
        (sizes(4, 4, **SP), MOE, ["EP 4 x ETP 2 = 8 does not divide the 4 ranks"]),
        (sizes(4, 4, pipeline_model_parallel_size=2), MOE, ["EP 4 x ETP 1 = 4 does not divide the 2 ranks"]),
        (sizes(8, 2, expert_tensor_parallel_size=4), MOE, ["66 columns of an expert .* ETP 4; set expert_tensor"]),
        (sizes(2, 1, expert_tensor_parallel_size=1, **SP), MOE, ["ETP 1 other than TP 2 needs EP of at least 2"]),
        (sizes(2, 1, tensor_model_parallel_size=2), MOE, ["under TP 2 needs sequence parallelism.*sequence_parallel"]),
        # Width 130 of the dense layers, which this model has none of, does not count; 8 heads would.
        (sizes(4, 1, tensor_model_parallel_size=4, sequence_parallel=True), replace(MOE, num_query_groups=4),
         ["66 columns of an expert cannot be divided over ETP 4"]),
    ],
)  # fmt: skip
def test_sizes(layout: ParallelSizes, model: ModelConfig, messages: list[str]) -> None:
    problems = size_problems(layout, {"actor": model})
    assert len(problems) == len(messages), problems
    for problem, message in zip(problems, messages, strict=True):
        assert re.search(message, problem), problem


def test_a_dense_role_is_told_where_its_own_layout_is_set() -> None:
    (problem,) = size_problems(sizes(2, 2), {"actor": MOE, "critic": DENSE})
    assert "critic: a dense model" in problem
    assert "(critic.parallel)" in problem
    (problem,) = size_problems(sizes(2, 2), {"actor": MOE, "reference": DENSE})
    assert "reference: a dense model" in problem
    assert "layout of its own" not in problem  # it shares the actor's
    (problem,) = size_problems(sizes(2, 2), {"actor": MOE, "reward1": DENSE})
    assert "reward1: a dense model" in problem
    assert "(reward.sources[1].parallel)" in problem


def test_described() -> None:
    assert sizes(4, 2).describe() == "world 4 = TP 1 x PP 1 x DP 4, experts over EP 2"
    assert "experts over EP 2 x ETP 2, sequence parallel" in sizes(4, 2, **SP).describe()


@pytest.mark.parametrize(
    ("layout", "joined"),
    [
        (sizes(4, 1), [[0], [1], [2], [3]]),
        (sizes(4, 2), [[0, 1], [2, 3]]),
        (sizes(4, 2, expert_tensor_parallel_size=1, **SP), [[0], [1], [2], [3]]),
        (sizes(4, 4, expert_tensor_parallel_size=1, **SP), [[0, 2], [1, 3]]),
        (sizes(4, 2, pipeline_model_parallel_size=2), [[0, 1], [2, 3]]),
    ],
)
def test_replicas_that_share_experts_go_together(layout: ParallelSizes, joined: list[list[int]]) -> None:
    assert sorted(RankGrid(layout).joined_replicas()) == joined


@pytest.mark.parametrize(
    "layout",
    [
        sizes(4, 2),
        sizes(8, 4, pipeline_model_parallel_size=2),
        sizes(8, 2, **SP),
        sizes(8, 4, expert_tensor_parallel_size=1, **SP),
        sizes(16, 2, expert_tensor_parallel_size=1, pipeline_model_parallel_size=2, context_parallel_size=2, **SP),
    ],
)
def test_groups_are_those_of_megatron(layout: ParallelSizes) -> None:
    """On every rank of a world that transports nothing."""
    from megatron.core import parallel_state as mpu

    grid = RankGrid(layout)

    def own(groups: list[list[int]], rank: int) -> list[int]:
        (mine,) = [group for group in groups if rank in group]
        return mine

    for rank in range(0, layout.world_size, 3):
        with fake_world(rank, layout.world_size):
            mpu.initialize_model_parallel(
                layout.tensor_model_parallel_size,
                layout.pipeline_model_parallel_size,
                context_parallel_size=layout.context_parallel_size,
                expert_model_parallel_size=layout.expert_model_parallel_size,
                expert_tensor_parallel_size=layout.expert_tensor_size,
                create_gloo_process_groups=False,
            )
            try:
                theirs = {
                    "ep": mpu.get_expert_model_parallel_group(),
                    "expt_tp": mpu.get_expert_tensor_parallel_group(),
                    "expt_dp": mpu.get_expert_data_parallel_group(),
                    "tp_ep": mpu.get_expert_tensor_and_model_parallel_group(),
                    "tp_ep_pp": mpu.get_expert_tensor_model_pipeline_parallel_group(),
                }
                found = {kind: dist.get_process_group_ranks(group) for kind, group in theirs.items()}
                dense = dist.get_process_group_ranks(mpu.get_data_parallel_group())
            finally:
                mpu.destroy_model_parallel()
        assert found == {kind: own(grid.expert_groups(kind), rank) for kind in found}  # type: ignore[arg-type]
        assert dense == own(grid.groups("dp"), rank)
