"""Ranks layouts that work and fit by their estimated time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mrlhf.errors import ConfigError
from mrlhf.planning.plan import peak
from mrlhf.planning.question import Question


@dataclass(frozen=True)
class Found:
    """A layout that works.

    Attributes:
        values: of the configuration keys that make it.
        data_parallel_size: replicas.
        peak: bytes of the rank and phase that need most.
        seconds: of an iteration.
    """

    values: dict[str, Any]
    data_parallel_size: int
    peak: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **{key.rpartition(".")[2]: value for key, value in self.values.items()},
            "data_parallel_size": self.data_parallel_size,
            "peak": self.peak,
            "iteration_seconds": self.seconds,
            "overrides": [f"{key}={_text(value)}" for key, value in self.values.items()],
        }


def search(question: Question, top: int = 10) -> dict[str, Any]:
    """Try every TP, PP, SP and micro-batch of ``question``'s ranks; tensor ranks stay inside a machine.

    The distributed optimizer is on where there are replicas, else off. Everything else is the configuration's.

    Returns:
        ``tried``, ``valid`` (the layout checks pass), ``fitting``, and ``layouts``: the ``top`` fastest that fit.

    Raises:
        ConfigError: not one layout passes the checks of sizes; the message is that of the configuration's own.
    """
    tried, valid = 0, []
    for values in _candidates(question):
        tried += 1
        changed = question.changed(values)
        job = changed.valid_job()
        if job is not None:
            valid.append(
                Found(values, job.sizes.data_parallel_size, peak(job).bytes, changed.seconds(job))
            )  # fmt: skip
    if not valid:
        question.job()
        raise ConfigError(f"none of {tried} layouts of {question.world_size} GPUs works with these models and batches")
    fitting = sorted((f for f in valid if f.peak <= question.limit), key=lambda f: (f.seconds, f.peak))
    return {
        "tried": tried,
        "valid": len(valid),
        "fitting": len(fitting),
        "smallest_peak": min(f.peak for f in valid),
        "layouts": [f.as_dict() for f in fitting[:top]],
    }


def _candidates(question: Question) -> Iterator[dict[str, Any]]:
    node, context = question.hardware.gpus_per_node, question.config.parallel.context_parallel_size
    world = len(question.config.ranks_of("actor", question.world_size)) // context
    prefix = "ppo" if question.has("ppo") else "train"
    by_tokens = question.get(f"{prefix}.micro_batch_tokens") is not None
    batch = question.get("ppo.minibatch_size") or question.get("train.batch_size")
    for t in _divisors(world, min(world, node)):
        for p in _divisors(world // t, world // t):
            rows = [None] if by_tokens else list(_powers(max(batch // (world // (t * p)), 1)))
            for split in (True, False) if t > 1 else (False,):
                for count in rows:
                    values: dict[str, Any] = {
                        "parallel.tensor_model_parallel_size": t,
                        "parallel.pipeline_model_parallel_size": p,
                        "parallel.sequence_parallel": split,
                    }
                    values |= _of_another_pipeline(question, p)
                    if count is not None:
                        values[f"{prefix}.micro_batch_size"] = count
                    # With one replica it divides nothing, but takes buffers in a save.
                    values["optimizer.distributed"] = world > t * p or context > 1
                    for shared in _expert_layouts(question, world * context // p):
                        yield values | shared


def _expert_layouts(question: Question, stage_ranks: int) -> Iterator[dict[str, Any]]:
    """Every number of ranks that may share whole experts, inside a node; nothing for dense models."""
    experts = max((model.num_experts or 1 for model in question.models.values()), default=1)
    if experts == 1:
        yield {}
        return
    for ep in _divisors(stage_ranks, min(stage_ranks, question.hardware.gpus_per_node)):
        if experts % ep == 0:
            yield {
                "parallel.expert_model_parallel_size": ep,
                "parallel.expert_tensor_parallel_size": 1 if ep > 1 else None,
            }


def _of_another_pipeline(question: Question, p: int) -> dict[str, Any]:
    parallel = question.config.parallel
    if p == parallel.pipeline_model_parallel_size:
        return {}
    keys = (
        "virtual_pipeline_model_parallel_size",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
    )
    return {f"parallel.{key}": None for key in keys if getattr(parallel, key) is not None}


def _divisors(number: int, limit: int) -> list[int]:
    return [d for d in range(1, limit + 1) if number % d == 0]


def _powers(limit: int) -> Iterator[int]:
    value = 1
    while value <= min(limit, 64):
        yield value
        value *= 2


def _text(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
