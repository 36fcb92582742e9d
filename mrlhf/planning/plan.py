"""The whole plan of a job on some hardware, as plain values that JSON can hold."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from mrlhf.planning import flops
from mrlhf.planning.batching import batching
from mrlhf.planning.hardware import Efficiency, Hardware
from mrlhf.planning.job import Job, Role
from mrlhf.planning.memory import checkpoint_bytes, host_bytes, persistent, phases
from mrlhf.planning.offload import host_bytes_of_machine, host_bytes_of_rank
from mrlhf.planning.parameters import active_parameters, model_parameters
from mrlhf.planning.timing import Clock
from mrlhf.planning.traffic import Traffic, generation_traffic, pass_traffic, step_traffic


@dataclass(frozen=True)
class Peak:
    """The rank and phase that need most memory.

    Attributes:
        bytes: what they need.
        phase: its name.
        ranks: first and last of the ranks that are alike.
    """

    bytes: int
    phase: str
    ranks: tuple[int, int]


def peak(job: Job) -> Peak:
    """Where the job needs most memory."""
    found = []
    for ranks, stages in job.rank_classes():
        for name, part in phases(job, stages).items():
            found.append(Peak(part.total, name, (ranks[0], ranks[-1])))
    return max(found, key=lambda each: each.bytes)


def iteration_seconds(job: Job, hardware: Hardware, efficiency: Efficiency) -> float:
    """Seconds of an iteration without its checkpoint."""
    return sum(part.total for name, part in Clock(job, hardware, efficiency).phases().items() if name != "save")


def plan(job: Job, hardware: Hardware, efficiency: Efficiency, reserve: int) -> dict[str, Any]:
    """Every number of the report but the changes that would mend it.

    Args:
        job: what to plan.
        hardware: the GPUs.
        efficiency: assumed shares of their peaks.
        reserve: bytes of each GPU that are not for tensors: CUDA's context, communication buffers, fragmentation.
    """
    top, clock = peak(job), Clock(job, hardware, efficiency)
    limit = int(hardware.memory) - reserve
    seconds = clock.phases()
    iteration = sum(part.total for name, part in seconds.items() if name != "save")
    tokens = job.rows * _mean_tokens(job)
    return {
        "kind": job.kind,
        "layout": {
            **asdict(job.sizes),
            "world_size": job.world_size,
            "data_parallel_size": job.sizes.data_parallel_size,
            "critic_ranks": job.world_size - job.sizes.world_size,
        },
        "precision": job.dtype,
        "fp8": next((role.fp8_recipe for role in job.roles if role.fp8), None),
        "distributed_optimizer": job.distributed_optimizer,
        "recompute": _recompute(job),
        "batches": _batches(job),
        "hardware": asdict(hardware),
        "efficiency": asdict(efficiency),
        "models": [_model(role) for role in job.roles],
        "ranks": [_ranks(job, ranks, stages) for ranks, stages in job.rank_classes()],
        "flops": _flops(job),
        "traffic": _traffic(job),
        "checkpoint_bytes": checkpoint_bytes(job),
        "offload": _offload(job, clock),
        "seconds": {name: part.as_dict() for name, part in seconds.items()},
        "iteration_seconds": iteration,
        "tokens_per_second": tokens / iteration,
        "memory": {
            "gpu": int(hardware.memory),
            "reserve": reserve,
            "limit": limit,
            "peak": top.bytes,
            "peak_phase": top.phase,
            "peak_ranks": list(top.ranks),
            "fits": top.bytes <= limit,
            "short": max(top.bytes - limit, 0),
        },
    }


def _recompute(job: Job) -> str:
    modules = sorted({module for role in job.roles for module in role.recompute_modules})
    return "full" if any(role.recompute for role in job.roles) else ", ".join(modules) or "none"


def _offload(job: Job, clock: Clock) -> dict[str, Any] | None:
    """Host memory for the whole run, and the transfers of an iteration; None where nothing is offloaded."""
    if not any(role.offloaded for role in job.roles):
        return None
    waits = clock.transfers().values()
    return {
        "roles": [role.name for role in job.roles if role.offloaded],
        "rank_bytes": max(host_bytes_of_rank(job, stages) for _, stages in job.rank_classes()),
        "machine_bytes": host_bytes_of_machine(job, clock.hardware.gpus_per_node),
        "link_seconds": max(wait.link for wait in waits),
        "waiting_seconds": max(wait.rollout + wait.inference + wait.train for wait in waits),
    }


def _mean_tokens(job: Job) -> int:
    return job.rollout.mean_prompt + job.rollout.mean_response if job.rollout else job.train_mean.width


def _batches(job: Job) -> dict[str, Any]:
    return {
        "rows": job.rows,
        "minibatch": job.minibatch,
        "epochs": job.epochs,
        "steps": job.steps,
        "train": asdict(job.train),
        "train_mean": asdict(job.train_mean),
        "inference": asdict(job.inference) if job.inference else None,
        "rollout": asdict(job.rollout) if job.rollout else None,
    }


def _model(role: Role) -> dict[str, Any]:
    model = role.model
    return {
        "role": role.name,
        "head": role.head,
        "trained": role.trained,
        "fp8": role.fp8,
        "parameters": model_parameters(model, role.head, value_bias=role.value_bias),
        "active_parameters": active_parameters(model, role.head, value_bias=role.value_bias),
        "expert_model_parallel_size": role.sizes.expert_model_parallel_size,
        "layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "tensor_model_parallel_size": role.sizes.tensor_model_parallel_size,
        "pipeline_model_parallel_size": role.sizes.pipeline_model_parallel_size,
        "data_parallel_size": role.sizes.data_parallel_size,
        "stages": [{"layers": stage.layers, "parameters": stage.total} for stage in role.stages],
    }


def _ranks(job: Job, ranks: range, stages: dict[str, int]) -> dict[str, Any]:
    models = {}
    for role in job.roles:
        if role.name not in stages:
            continue
        index = stages[role.name]
        stage = role.stages[index]
        kept = persistent(job, role, index)
        models[role.name] = {
            "stage": index,
            "layers": stage.layers,
            "parameters": stage.total,
            **asdict(kept),
            "total": kept.total,
        }
    return {
        "first": ranks[0],
        "last": ranks[-1],
        "models": models,
        "persistent": sum(model["total"] for model in models.values()),
        "phases": {name: part.as_dict() for name, part in phases(job, stages).items()},
        "host_bytes_of_a_save": host_bytes(job, stages),
        "host_bytes_of_offload": host_bytes_of_rank(job, stages),
    }


def _flops(job: Job) -> dict[str, dict[str, float]]:
    """By phase: of all ranks together, and of the pipeline rank that has most."""
    found: dict[str, dict[str, float]] = {}
    most: dict[tuple[str, int], float] = {}

    def add(phase: str, role: Role, each: list[float]) -> None:
        """Add a role's work by pipeline rank, of one data-parallel replica."""
        sizes = role.sizes
        ranks = sizes.tensor_model_parallel_size * sizes.context_parallel_size * sizes.data_parallel_size
        part = found.setdefault(phase, {"all_ranks": 0.0, "rank": 0.0})
        part["all_ranks"] += sum(each) * ranks
        # Roles on other ranks do not add to a rank's work.
        most[phase, role.first] = most.get((phase, role.first), 0.0) + max(each)
        part["rank"] = max(work for (name, _), work in most.items() if name == phase)

    for role in job.roles:
        stages, rows = role.stages, job.rows / role.sizes.data_parallel_size
        if job.rollout is not None and role is job.roles[0]:
            prompts = [flops.prefill(role, stage, job.rollout, rows) for stage in stages]
            tokens = [flops.decode(role, stage, job.rollout, rows) for stage in stages]
            add("rollout", role, [a + b for a, b in zip(prompts, tokens, strict=True)])
        if job.inference_mean is not None and role in job.inferred():
            count = rows / job.inference_mean.count
            add("inference", role, [count * flops.forward(role, stage, job.inference_mean) for stage in stages])
        if role.trained:
            count = job.epochs * rows / job.train_mean.count
            add("train", role, [count * flops.training(job, role, stage, job.train_mean) for stage in stages])
        if job.text_micro_batch is not None and role is job.roles[0]:
            count = job.steps * job.text_rows / role.sizes.data_parallel_size / job.text_micro_batch.count
            add("train", role, [count * flops.training(job, role, stage, job.text_micro_batch) for stage in stages])
    return found


def _traffic(job: Job) -> dict[str, dict[str, float]]:
    """By phase: what the pipeline rank that sends most sends in an iteration."""
    parts: dict[tuple[str, int], Traffic] = {}

    def sent(traffic: Traffic) -> float:
        """Bytes of all kinds."""
        return traffic.tensor + traffic.pipeline + traffic.data + traffic.context + traffic.expert

    def add(phase: str, each: list[Traffic]) -> None:
        """Add a role's traffic by pipeline rank; roles on other ranks have sums of their own."""
        parts[phase, role.first] = parts.get((phase, role.first), Traffic()) + max(each, key=sent)

    for role in job.roles:
        stages, d = range(role.sizes.pipeline_model_parallel_size), role.sizes.data_parallel_size
        if job.rollout is not None and role is job.roles[0]:
            add("rollout", [_generation_traffic(job, role, i) for i in stages])
        if job.inference_mean is not None and role in job.inferred():
            count = math.ceil(math.ceil(job.rows / d) / job.inference_mean.count)
            add("inference", [pass_traffic(job, role, i, job.inference_mean, backward=False) * count for i in stages])
        if role.trained:
            count = math.ceil(math.ceil(job.minibatch / d) / job.train_mean.count)
            each = [pass_traffic(job, role, i, job.train_mean, backward=True) * (count * job.steps) for i in stages]
            add("train", each)
            add("optimizer", [step_traffic(job, role, i) * job.steps for i in stages])
    found = {phase: max((t for (name, _), t in parts.items() if name == phase), key=sent) for phase, _ in parts}
    return {
        name: {"tensor": t.tensor, "pipeline": t.pipeline, "data": t.data, "context": t.context, "expert": t.expert}
        for name, t in found.items()
    }


def _generation_traffic(job: Job, role: Role, index: int) -> Traffic:
    assert job.rollout is not None
    made = batching(job, role, job.rollout)
    prompts = made.rows * job.rollout.mean_prompt
    prefill = generation_traffic(job, role, index, prompts / made.prefills, made.rows / made.prefills) * made.prefills
    if not made.steps:
        return prefill
    active, steps = made.active / made.groups, made.steps * made.groups
    return prefill + generation_traffic(job, role, index, active, active) * steps
