"""Checks of the experts' part of a parallel layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mrlhf.model_config import ModelConfig

if TYPE_CHECKING:
    from mrlhf.planner import ParallelSizes


def expert_problems(role: str, model: ModelConfig, sizes: ParallelSizes) -> list[str]:
    """What about a role's experts cannot work under ``sizes``, or that it has none to share; a line each."""
    tp, ep, etp = sizes.tensor_model_parallel_size, sizes.expert_model_parallel_size, sizes.expert_tensor_size
    if model.num_experts is None:
        if ep == 1 and sizes.expert_tensor_parallel_size is None:
            return []
        given = f"EP {ep}" if ep > 1 else f"ETP {etp}"
        return [
            f"{role}: a dense model has no experts to share over {given}; set expert_model_parallel_size to 1 and "
            f"leave expert_tensor_parallel_size out{_own_layout(role)}"
        ]
    problems = []
    if model.num_experts % ep:
        problems.append(
            f"{role}: {model.num_experts} experts cannot be divided over EP {ep}; expert_model_parallel_size must be "
            f"one of {some_divisors(model.num_experts)}"
        )
    if (model.moe_ffn_hidden_size or model.ffn_hidden_size) % etp:
        problems.append(
            f"{role}: {model.moe_ffn_hidden_size} columns of an expert cannot be divided over ETP {etp}; set "
            "expert_tensor_parallel_size to 1"
        )
    if ep == 1 and etp != tp:
        problems.append(
            f"{role}: ETP {etp} other than TP {tp} needs EP of at least 2 (Megatron-Core would not add up the experts' "
            "gradients over the tensor ranks); leave expert_tensor_parallel_size out, or raise "
            "expert_model_parallel_size"
        )
    if tp > 1 and not sizes.sequence_parallel:
        problems.append(
            f"{role}: a mixture of experts under TP {tp} needs sequence parallelism (every tensor rank would send the "
            "same tokens to the experts); set sequence_parallel to true, or tensor_model_parallel_size to 1"
        )
    return problems


def _own_layout(role: str) -> str:
    """The other way out, for roles that can have a layout of their own."""
    if role == "critic":
        key = "critic.parallel"
    elif role.startswith("reward"):
        key = f"reward.sources[{role.removeprefix('reward') or 0}].parallel"
    else:
        return ""
    return f", or give the model a layout of its own without them ({key})"


def some_divisors(value: int, limit: int = 12) -> str:
    """Divisors of ``value``, for messages."""
    divisors = [d for d in range(1, value + 1) if value % d == 0]
    shown = ", ".join(str(d) for d in divisors[:limit])
    return shown if len(divisors) <= limit else f"{shown}, ..."
