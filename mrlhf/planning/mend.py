"""Which changes make a run fit that does not: each is tried, none is guessed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mrlhf.config_sections import RunConfig
from mrlhf.planning.question import Question


@dataclass(frozen=True)
class Change:
    """New values of configuration keys, and perhaps another number of GPUs."""

    values: dict[str, Any]
    world_size: int | None = None

    def words(self) -> list[str]:
        """As they are given on the command line."""
        given = [f"{key}={_text(value)}" for key, value in self.values.items()]
        return given + ([f"--gpus {self.world_size}"] if self.world_size else [])

    def __or__(self, other: Change) -> Change:
        """Both together; the other's values win."""
        return Change({**self.values, **other.values}, other.world_size or self.world_size)


@dataclass(frozen=True)
class Mend:
    """A change that was tried.

    Attributes:
        change: what.
        peak: bytes of the rank and phase that then need most.
        seconds: of an iteration with it.
    """

    change: Change
    peak: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"change": self.change.words(), "peak": self.peak, "iteration_seconds": self.seconds}


def mends(question: Question) -> list[Mend]:
    """Changes that make ``question`` fit, fastest first: single ones, and a combination if none does on these GPUs.

    Empty when it fits already, and when nothing that is tried helps.
    """
    now = question.peak_bytes()
    if now is None or now <= question.limit:
        return []
    chains = [[_that_compiles(question, change) for change in chain] for chain in _chains(question)]
    single = [mend for chain in chains if (mend := _first_that_fits(question, chain))]
    if all(mend.change.world_size for mend in single):
        same = [chain for chain in chains if not any(change.world_size for change in chain)]
        combined = _combined(question, same, now) or (None if single else _combined(question, chains, now))
        single += [combined] if combined else []
    return sorted(single, key=lambda mend: mend.seconds)


def _first_that_fits(question: Question, chain: list[Change]) -> Mend | None:
    for change in chain:
        mend = _tried(question, change)
        if mend is not None and mend.peak <= question.limit:
            return mend
    return None


def _combined(question: Question, chains: list[list[Change]], now: int) -> Mend | None:
    """Change after change that lowers the peak, in the order in which they cost least, until it fits."""
    total, best = Change({}), now
    for chain in chains:
        # The change of each chain that lowers the peak most, without overdoing it.
        chosen = None
        for change in chain:
            mend = _tried(question, total | change)
            if mend is not None and mend.peak < best:
                chosen, best = mend, mend.peak
            if chosen is not None and chosen.peak <= question.limit:
                return _without_idle(question, chosen)
        if chosen is not None:
            total = chosen.change
    return None


def _without_idle(question: Question, mend: Mend) -> Mend:
    """Leave out every part that the fit does not need."""
    for key in list(mend.change.values):
        fewer = Change({k: v for k, v in mend.change.values.items() if k != key}, mend.change.world_size)
        tried = _tried(question, fewer)
        if tried is not None and tried.peak <= question.limit:
            mend = tried
    return mend


def _tried(question: Question, change: Change) -> Mend | None:
    changed = question.changed(change.values, change.world_size)
    job = changed.valid_job() if _may_compile(changed.config) else None
    peak = changed.peak_bytes()
    return None if job is None or peak is None else Mend(change, peak, changed.seconds(job))


def _chains(question: Question) -> Iterator[list[Change]]:
    """Changes of one kind, from the smallest on; kinds that cost least come first."""
    sizes = question.config.sizes_of("actor", question.world_size)
    t, p, world = sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size, question.world_size
    replicas = sizes.world_size // sizes.model_parallel_size
    distributed = "optimizer.distributed"
    if replicas > 1 and question.get(distributed) is False:
        yield [Change({distributed: True})]
    if replicas == 1 and question.get(distributed):
        # It divides nothing then, but a save puts its states together in buffers of their own.
        yield [Change({distributed: False})]
    if t > 1 and not sizes.sequence_parallel:
        yield [Change({"parallel.sequence_parallel": True})]
    for key in (
        "rollout.batch_size",
        "inference.micro_batch_tokens",
        "inference.micro_batch_size",
        "ppo.micro_batch_tokens",
        "ppo.micro_batch_size",
        "train.micro_batch_tokens",
        "train.micro_batch_size",
    ):
        yield [Change({key: value}) for value in _halves(question.get(key))]
    kinds: dict[str, tuple[str, ...]] = {"none": ("selective", "full"), "selective": ("full",)}
    again = [Change({RECOMPUTE: kind}) for kind in kinds.get(question.get(RECOMPUTE), ())]
    yield [change for change in again if not question.changed(change.values).config.recompute_problems()]
    for key in ("offload.reference", "offload.reward", "offload.optimizer"):
        if question.get(key) is False:
            yield [Change({key: True})]
    if question.config.precision.fp8 is not None:
        yield [Change({"precision.fp8": None})]
    if question.config.precision.dtype == "fp32":
        yield [Change({"precision.dtype": "bf16"})]
    yield [Change(_layout(t * k, p, question)) for k in (2, 4, 8) if t * k <= question.hardware.gpus_per_node]
    yield [Change(_layout(t, p * k, question)) for k in (2, 4, 8) if t * p * k <= world]
    yield [
        Change(_layout(t * k, p * j, question))
        for k, j in ((2, 2), (2, 4), (4, 2), (4, 4))
        if t * k <= question.hardware.gpus_per_node and t * k * p * j <= world
    ]
    if any(model.num_experts for model in question.models.values()):
        ep = sizes.expert_model_parallel_size
        yield [Change({EXPERTS: ep * k}) for k in (2, 4, 8, 16) if ep * k <= sizes.stage_ranks]
    if question.get("ppo.ema_decay") is not None:
        yield [Change({"ppo.ema_decay": None})]
    more = {distributed: True} if question.get(distributed) is False else {}
    yield [Change(more, world * k) for k in (2, 4, 8)]
    if any(model.num_experts for model in question.models.values()):
        ep = sizes.expert_model_parallel_size
        yield [Change({EXPERTS: ep * k, **more}, world * k) for k in (2, 4, 8, 16)]
    yield [
        Change({**_layout(t, p * k, question), **more}, world * k)
        for k in (2, 4, 8, 16)
    ]  # fmt: skip


EXPERTS = "parallel.expert_model_parallel_size"
"""Key of the ranks that share the experts."""
RECOMPUTE = "parallel.recompute"
"""Key of what is computed again in backward passes."""
COMPILE = "precision.compile"
"""Key of compiled layers."""


def _that_compiles(question: Question, change: Change) -> Change:
    """``precision.compile`` goes off together with a change that it cannot be beside."""
    fine = _may_compile(question.changed(change.values).config)
    return change if fine else change | Change({COMPILE: False})


def _may_compile(config: RunConfig) -> bool:
    """Whether all layers that are trained can be compiled: whole, once in a pass, without collectives and FP8.

    The run looks at data, models and machine as well (`mrlhf.trainer.compiling`).
    """
    if not config.precision.compile:
        return True
    layouts = [config.parallel_of(role) for role in config.trained_roles]
    return all(
        layout.recompute == "none" and layout.tensor_model_parallel_size == layout.context_parallel_size == 1
        for layout in layouts
    ) and not any(config.precision.fp8_in(role, trained=True) for role in config.trained_roles)


def _layout(t: int, p: int, question: Question) -> dict[str, Any]:
    """Values of the parallel keys that differ from the configuration's; what belongs to the old pipeline goes."""
    parallel = question.config.parallel
    values: dict[str, Any] = {}
    if t != parallel.tensor_model_parallel_size:
        values["parallel.tensor_model_parallel_size"] = t
        if any(model.num_experts for model in question.models.values()) and not parallel.sequence_parallel:
            # Mixtures of experts have no tensor parallelism without it.
            values["parallel.sequence_parallel"] = True
    if p != parallel.pipeline_model_parallel_size:
        values["parallel.pipeline_model_parallel_size"] = p
        for key in (
            "virtual_pipeline_model_parallel_size",
            "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage",
        ):
            if getattr(parallel, key) is not None:
                values[f"parallel.{key}"] = None
    return values


def _halves(value: int | None) -> Iterator[int]:
    while value is not None and value > 1:
        value //= 2
        yield value


def _text(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
