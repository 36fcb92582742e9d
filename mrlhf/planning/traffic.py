"""Bytes that one rank sends to others, by kind of parallelism.

Collectives are counted as rings (Patarasuk and Yuan 2009): an all-reduce of ``V`` bytes over ``k`` ranks sends
``2 (k - 1) / k V``, a reduce-scatter or an all-gather half of it. Tensor parallelism has two all-reduces of ``n h e``
a layer and direction (Shoeybi et al. 2019, arXiv:1909.08053, section 3); sequence parallelism replaces each by a
reduce-scatter and an all-gather of the same volume, and gathers the inputs of the first and third matrix once more
in the backward pass (Korthikanti et al. 2022, section 4.2.2).
"""

from __future__ import annotations

from dataclasses import dataclass

from mrlhf.planning import experts, fp8
from mrlhf.planning.job import Job, Role, Rows
from mrlhf.planning.parameters import StageParameters


@dataclass(frozen=True)
class Traffic:
    """Bytes sent by one rank, and the number of collectives or messages they are in."""

    tensor: float = 0.0
    pipeline: float = 0.0
    data: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    tensor_calls: float = 0.0
    pipeline_calls: float = 0.0
    data_calls: float = 0.0
    context_calls: float = 0.0
    expert_calls: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        """Both together."""
        names = self.__dataclass_fields__
        return Traffic(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def __mul__(self, times: float) -> Traffic:
        """The same ``times`` over."""
        return Traffic(**{name: getattr(self, name) * times for name in self.__dataclass_fields__})


def ring(ranks: int, size: float) -> float:
    """Bytes that a rank sends in an all-gather or a reduce-scatter of ``size`` bytes in all."""
    return (ranks - 1) / ranks * size


def pass_traffic(job: Job, role: Role, index: int, rows: Rows, *, backward: bool) -> Traffic:
    """Of a micro-batch through a pipeline rank: its forward pass, and with ``backward`` the backward pass too."""
    stages, e = role.stages, job.element_bytes
    stage, t, c = stages[index], role.sizes.tensor_model_parallel_size, role.sizes.context_parallel_size
    split, h = role.sequence_split > 1, role.model.hidden_size
    n = rows.tokens / c
    half = ring(t, n * h * e)
    count, calls = 0.0, 0.0
    if t > 1:
        # In all-gathers or reduce-scatters: 4 a layer and direction, and with sequence parallelism 2 more backwards.
        passes = 1 + backward + (backward and role.recompute)
        # Of the feed-forward parts of dense layers alone.
        again = stage.layers - stage.moe_layers if backward and role.again("mlp") and not role.recompute else 0
        # Of a mixture of experts only the attention is shared out so.
        halves = stage.layers - stage.moe_layers / 2
        count = halves * (4.0 * passes + (2 if split and backward else 0)) + 2.0 * again
        calls = halves * ((4.0 if split else 2.0) * passes + (2 if split and backward else 0))
        calls += (2.0 if split else 1.0) * again
        extra = _ends(stage, index, role, split=split, backward=backward)
        count, calls = count + extra[0], calls + extra[1]
    tensor = (count - fp8.gathers_saved(role, index, e, backward=backward)) * half
    calls += _amax_calls(role, index, backward=backward)
    if t > 1 and stage.final_norm and role.head == "lm":
        tensor += ring(t, t * (4 if job.entropy and backward else 3) * 4.0 * rows.count * rows.wanted / c)
        calls += 1
    pipeline, messages = _borders(job, role, index, rows, backward=backward)
    context = context_calls = 0.0
    if c > 1:
        keys = 2 * max(role.model.num_query_groups // t, 1) * role.model.head_dim * rows.tokens * e
        # Transformer Engine's ring passes keys and values around, and backwards once more beside their gradients; our
        # own attention gathers them, and scatters the sums of their gradients.
        passes = 1 + backward * (2 if job.transformer_engine else 1) + (backward and role.again("core_attn"))
        context = stage.layers * ring(c, float(keys)) * passes
        context_calls = stage.layers * passes * (c - 1.0 if job.transformer_engine else 2.0)
    expert, expert_calls = experts.sent(role, n, e, backward=backward)
    return Traffic(
        tensor=tensor,
        tensor_calls=calls,
        expert=stage.moe_layers * expert,
        expert_calls=stage.moe_layers * expert_calls,
        pipeline=pipeline,
        pipeline_calls=messages,
        context=context,
        context_calls=context_calls,
    )


def _amax_calls(role: Role, index: int, *, backward: bool) -> float:
    found = fp8.amax_reductions(role, index)
    return float(found.training if backward else found.forward) if found else 0.0


def _ends(stage: StageParameters, index: int, role: Role, *, split: bool, backward: bool) -> tuple[float, float]:
    """Embedding and output layer: all-gathers or reduce-scatters of the hidden states, and calls."""
    count = calls = 0.0
    if index == 0:
        # The embedding's sum over vocabulary shards; under sequence parallelism its gradient is gathered again.
        count += (1 if split else 2) + (1 if split and backward else 0)
        calls += 1 + (1 if split and backward else 0)
    if stage.final_norm and role.head == "lm":
        # Under sequence parallelism the head gathers its input; backwards the gradient is summed.
        count += (1 if split else 0) + ((1 if split else 2) if backward else 0)
        calls += (1 if split else 0) + (1 if backward else 0)
    return count, calls


def _borders(job: Job, role: Role, index: int, rows: Rows, *, backward: bool) -> tuple[float, float]:
    """Bytes and messages that a pipeline rank sends for a micro-batch."""
    p, v = role.sizes.pipeline_model_parallel_size, role.sizes.virtual_stages
    if p == 1:
        return 0.0, 0.0
    tokens = rows.tokens / role.sizes.context_parallel_size / role.sequence_split
    size = tokens * role.model.hidden_size * job.element_bytes
    # Every virtual stage hands on but the model's last; backwards every one but the model's first.
    forwards = v - (index == p - 1)
    backwards = (v - (index == 0)) if backward else 0
    return size * (forwards + backwards), float(forwards + backwards)


def step_traffic(job: Job, role: Role, index: int) -> Traffic:
    """Of an optimizer step: gradients summed in fp32 over data-parallel ranks, and the weights gathered again.

    Tied embeddings are summed between first and last stage; gradients of norms under sequence parallelism over TP.
    """
    stage = role.stages[index]
    data = calls = 0.0
    for count, d in role.replicas(index):
        if d > 1:
            gradients = ring(d, 4.0 * count)
            data += gradients + (ring(d, float(job.element_bytes * count)) if job.distributed_optimizer else gradients)
            calls += 2.0 if job.distributed_optimizer else 1.0
    tensor = 0.0
    if role.sequence_split > 1:
        tensor = 2 * ring(role.sizes.tensor_model_parallel_size, 4.0 * stage.vectors)
    pipeline = 0.0
    p = role.sizes.pipeline_model_parallel_size
    if p > 1 and role.model.tie_word_embeddings and role.head == "lm" and stage.embedding:
        pipeline = 2 * ring(2, 4.0 * stage.embedding)
    return Traffic(tensor=tensor, data=data, pipeline=pipeline, data_calls=calls, tensor_calls=float(tensor > 0))


def generation_traffic(job: Job, role: Role, index: int, tokens: float, rows: float) -> Traffic:
    """Of a packed pass of ``tokens`` through a pipeline rank that samples for ``rows`` rows."""
    stage, e = role.stages[index], job.element_bytes
    t, p = role.sizes.tensor_model_parallel_size, role.sizes.pipeline_model_parallel_size
    split, h = role.sequence_split > 1, role.model.hidden_size
    half = ring(t, tokens * h * e)
    count = calls = 0.0
    if t > 1:
        extra = _ends(stage, index, role, split=split, backward=False)
        halves = stage.layers - stage.moe_layers / 2
        count = 4.0 * halves + extra[0]
        calls = (4.0 if split else 2.0) * halves + extra[1]
        if stage.final_norm:
            # Maximum, sum and choice of a token: three small collectives of a number a row.
            calls += 3
        count -= fp8.gathers_saved(role, index, e, backward=False)
        calls += _amax_calls(role, index, backward=False)
    messages = float(index < p - 1) + float(p > 1)
    size = (tokens * h * e / role.sequence_split) * (index < p - 1) + (8.0 * rows if p > 1 else 0.0)
    expert, expert_calls = experts.sent(role, tokens, e, backward=False)
    return Traffic(
        tensor=count * half,
        tensor_calls=calls,
        pipeline=size,
        pipeline_calls=messages,
        expert=stage.moe_layers * expert,
        expert_calls=stage.moe_layers * expert_calls,
    )
