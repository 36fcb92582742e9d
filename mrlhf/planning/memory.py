"""Bytes on one rank: what stays for the whole run, and what each phase needs on top.

The formulas say what this code base allocates, not what an ideal one would:

- Gradients are Megatron's DDP buffer: 4 bytes a parameter in any dtype, on every rank, also with the distributed
  optimizer (``grad_reduce_in_fp32``).
- Adam keeps two fp32 moments, and an fp32 copy of every bf16 or fp16 parameter; with the distributed optimizer these
  12 (fp32: 8) bytes are divided by the data-parallel size (Rajbhandari et al. 2020, arXiv:1910.02054, stage 1).
- All models stay on the GPU for the whole run, but for what ``offload`` moves to the host (`Job.away`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial

from mrlhf.planning import activations, fp8
from mrlhf.planning.job import Job, Role, Rollout
from mrlhf.planning.parameters import StageParameters

PREFILL_TOKENS = 8192
"""Prompt tokens that go through the model at once (`mrlhf.rollout.engine`)."""


@dataclass(frozen=True)
class Persistent:
    """Bytes of one model that are there in every phase; ``fp8`` are the copies of `mrlhf.planning.fp8`."""

    weights: int = 0
    fp8: int = 0
    gradients: int = 0
    optimizer: int = 0
    average: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.fp8 + self.gradients + self.optimizer + self.average


@dataclass(frozen=True)
class PhaseBytes:
    """Bytes of one phase on one rank, of all models together.

    Attributes:
        weights: of all models, in the run's dtype.
        fp8: copies of weights and their scales.
        gradients: fp32 buffers of the trained models.
        optimizer: moments and fp32 copies.
        average: the weight average (``ppo.ema_decay``).
        activations: what is kept for backward passes, and the working memory of a layer.
        head: chunks of logits and what the output layer works with.
        kv_cache: keys and values of the sequences being generated.
        rows: token ids, masks and numbers per token of the rows.
        buffers: communication and other temporary buffers.
    """

    weights: int = 0
    fp8: int = 0
    gradients: int = 0
    optimizer: int = 0
    average: int = 0
    activations: int = 0
    head: int = 0
    kv_cache: int = 0
    rows: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(getattr(self, field.name) for field in fields(self))

    def as_dict(self) -> dict[str, int]:
        """Every part and the total."""
        return {**asdict(self), "total": self.total}


def persistent(job: Job, role: Role, index: int) -> Persistent:
    """What ``role`` holds on pipeline rank ``index`` for the whole run."""
    stage, e = role.stages[index], job.element_bytes
    count = stage.total
    copies = fp8.weight_bytes(role, index)
    if not role.trained:
        return Persistent(weights=count * e, fp8=copies)
    replicas = role.replicas(index)
    states = optimizer_bytes_per_parameter(job)
    return Persistent(
        weights=count * e,
        fp8=copies,
        gradients=4 * count,
        optimizer=sum(-(-states * part // (share if job.distributed_optimizer else 1)) for part, share in replicas),
        average=4 * count if role.average else 0,
    )


def optimizer_bytes_per_parameter(job: Job) -> int:
    """Two fp32 moments, and an fp32 copy where the model itself is not fp32."""
    return 8 if job.dtype == "fp32" else 12


def kv_cache_bytes(job: Job, role: Role, rollout: Rollout, layers: int) -> int:
    """``2 L (slots + 1) length max(g / t, 1) d`` elements of the run's dtype (`mrlhf.rollout.kv_cache`).

    One slot more than rows takes the filling of a sequence-parallel split.
    """
    t = role.sizes.tensor_model_parallel_size
    rows = -(-job.rows // role.sizes.data_parallel_size)
    slots = min(rollout.slots, rows) + 1
    length = max(rollout.longest_prompt + rollout.longest_response, t)
    heads = max(role.model.num_query_groups // t, 1)
    return 2 * layers * slots * length * heads * role.model.head_dim * job.element_bytes


def phases(job: Job, stages: dict[str, int]) -> dict[str, PhaseBytes]:
    """Bytes of each phase on a rank that holds ``stages`` (role -> pipeline rank)."""
    held = [role for role in job.roles if role.name in stages]
    base = partial(_on_device, job, held, stages)
    found: dict[str, PhaseBytes] = {}
    # Where critic and reward models have ranks of their own, these have the rows of all from the beginning.
    share = job.rows if held[0].first else -(-job.rows // job.sizes.data_parallel_size)
    own = share * job.row_slots * job.row_bytes
    if job.rollout is not None and job.roles[0] in held:
        actor = job.roles[0]
        work, head = _generation(job, actor, job.rollout, actor.stages[stages[actor.name]])
        cache = kv_cache_bytes(job, actor, job.rollout, actor.stages[stages[actor.name]].layers)
        found["rollout"] = PhaseBytes(**base("rollout"), activations=work, head=head, kv_cache=cache)
        if job.evaluates and any((r.offloaded and not r.trained) or r.name in job.idle_in_inference for r in held):
            # Frozen models answer and score, and so are there; actor and reference give log-probs in any case.
            parts = max([(work, head, cache), *_log_probs(job, held, stages)], key=sum)
            names = dict(zip(("activations", "head", "kv_cache"), parts, strict=True))
            found["evaluation"] = PhaseBytes(**base("evaluation"), **names)
    if job.inference is not None:
        passing = [role for role in job.inferred() if role in held]
        pairs = [activations.inference(job, role, stages[role.name], job.inference) for role in passing]
        work, head = max(pairs, key=sum, default=(0, 0))
        found["inference"] = PhaseBytes(**base("inference"), activations=work, head=head, rows=own)
    # While it trains, every rank holds the rows of all replicas, so that minibatches do not depend on DP.
    rows = job.rows * job.row_slots * job.row_bytes
    train = [activations.training(job, role, stages[role.name]) for role in job.trained() if role in held]
    if train:
        heaviest = max(train, key=lambda part: part.total)
        found["train"] = PhaseBytes(
            **base("train"),
            activations=heaviest.kept + heaviest.working,
            head=heaviest.head,
            rows=rows,
            buffers=heaviest.gradient,
        )
        found["optimizer"] = PhaseBytes(**base("optimizer"), rows=rows)
        found["save"] = PhaseBytes(**base("save"), buffers=_gather_buffers(job, stages))
    return found


def _log_probs(job: Job, held: Sequence[Role], stages: dict[str, int]) -> list[tuple[int, int, int]]:
    """Bytes of the passes of an evaluation after its generation, whose cache is freed: layers, head, no cache."""
    if job.inference is None:
        return []
    models = [role for role in held if role.name in ("actor", "reference")]
    return [(*activations.inference(job, role, stages[role.name], job.inference), 0) for role in models]


def _on_device(job: Job, held: Sequence[Role], stages: dict[str, int], phase: str) -> dict[str, int]:
    """What all models together have on the device in a phase, by kind."""
    kept = []
    for role in held:
        part = persistent(job, role, stages[role.name])
        if job.away(role, phase):
            part = replace(part, gradients=0, optimizer=0) if role.trained else replace(part, weights=0)
        kept.append(part)
    return {field.name: sum(getattr(part, field.name) for part in kept) for field in fields(Persistent)}


def _gather_buffers(job: Job, stages: dict[str, int]) -> int:
    """A distributed optimizer's states are put together, one kind and one model at a time, on the first DP rank.

    That is this rank's part as one piece, and where there are several the parts of all.
    """
    if not (job.distributed_optimizer and job.save_optimizer):
        return 0
    sizes = []
    for role in job.trained():
        if role.name not in stages:
            continue
        for count, share in role.replicas(stages[role.name]):
            sizes.append(4 * -(-count // share) + (4 * count if share > 1 else 0))
    return max(sizes, default=0)


def _generation(job: Job, role: Role, rollout: Rollout, stage: StageParameters) -> tuple[int, int]:
    """Working memory of a layer, the larger of prefill and decode, and of logits with what sampling makes of them."""
    e = job.element_bytes
    rows = min(rollout.slots, -(-job.rows // role.sizes.data_parallel_size))
    prefill = min(rows * rollout.longest_prompt, max(PREFILL_TOKENS, rollout.longest_prompt))
    work = activations.layer_work(job, role, prefill)
    # A decoding step reads keys and values where they are.
    decode = activations.layer_work(job, role, rows)
    logits = 0
    if stage.output:
        # Logits in the run's dtype, in fp32, the weights of the distribution in fp32 and one more while they are made.
        logits = rows * (stage.output // role.model.hidden_size) * (e + 12)
        if role.sizes.sequence_parallel:
            logits += prefill * role.model.hidden_size * e
    return max(work, decode), logits


def checkpoint_bytes(job: Job) -> int:
    """What one checkpoint takes on disk, all ranks together: weights, optimizer states, averages of trained models.

    The vocabulary is written as padded. Norms, which tensor ranks hold in common, are written once.
    """
    total = 0
    for role in job.trained():
        states = optimizer_bytes_per_parameter(job) if job.save_optimizer else 0
        per_parameter = job.element_bytes + states + (4 if role.average else 0)
        total += per_parameter * distinct_parameters(role)
    return total


def distinct_parameters(role: Role) -> int:
    """Parameters of all shards of a replica, replicated ones counted once, the vocabulary padded."""
    t, h = role.sizes.tensor_model_parallel_size, role.model.hidden_size
    norm = h * (1 if role.model.norm == "rmsnorm" else 2)
    total = 0
    for index, stage in enumerate(role.stages):
        vectors = 2 * norm + (2 * h if role.model.mlp_bias else 0) + (2 * role.model.head_dim * role.model.qk_norm)
        replicated = stage.layers * vectors + stage.moe_layers * stage.layer.router + stage.final_norm
        replicated += stage.head if role.head == "value" else 0
        sharded = stage.total - replicated - stage.experts
        total += stage.experts * role.sizes.expert_block
        if index and stage.embedding:
            # The last stage's copy of a tied embedding is the first stage's tensor.
            sharded -= stage.embedding
        total += sharded * t + replicated
    return total


def host_bytes(job: Job, stages: dict[str, int]) -> int:
    """Memory of the CPU that a save needs on the first data-parallel rank: a copy of what it writes."""
    total = 0
    for role in job.trained():
        if role.name not in stages:
            continue
        count = role.stages[stages[role.name]].total
        states = optimizer_bytes_per_parameter(job) if job.save_optimizer else 0
        total += count * (job.element_bytes + states + (4 if role.average else 0))
    return total
