"""Activations: what is kept for the backward pass, and the working memory of a layer.

Per layer and micro-batch of ``n`` tokens, with ``e`` bytes an element, ``s = t`` under sequence parallelism, else 1.
Kept for the backward pass, after Korthikanti et al. 2022 (arXiv:2205.05198, section 4), without the terms that do not
arise here (no score matrix: attention is fused; no dropout masks at dropout 0) and with grouped keys and SwiGLU:

- inputs and outputs of both norms: ``4 n h e / s``; torch's own norms also keep the normalised input, and under bf16
  and fp16 their input in fp32
- queries, keys and values as they come from the first matrix, ``n (a + 2 g) d e / t`` (the values are a view of it),
  and queries and keys after the rotary embedding, ``n (a + g) d e / t``, with its cosines and sines, ``4 S d e`` for
  rows of ``S`` slots
- the attention's output, ``n a d e / t``, and its log-sum-exp, ``4 n a / t``
- where queries and keys have norms, what those norms keep
- gate and up, and their product: ``3 n f e / t`` (``5`` where SwiGLU is not one operation); of a mixture of experts
  what `mrlhf.planning.experts.kept` says

Under full recomputation (Chen et al. 2016, arXiv:1604.06174) a layer keeps its input ``n h e / s`` alone. Selective
recomputation (Korthikanti et al., section 5) leaves out what `kept_again` says.

Under 1F1B, stage ``i`` of ``p`` holds ``min(m, p - i)`` micro-batches at once, and with ``v`` virtual stages
``min(m v, 2 (p - i - 1) + (v - 1) p + 1)`` chunks of ``1 / v`` of its layers (Narayanan et al. 2021,
arXiv:2104.04473, section 2.2, and Megatron's ``get_pp_rank_microbatches``).
"""

from __future__ import annotations

from dataclasses import dataclass

from mrlhf.planning import experts
from mrlhf.planning.job import Job, Role, Rows
from mrlhf.planning.parameters import StageParameters

CUDA_TILE, CPU_TILE = (2048, 4096), (1024, 1024)
"""Tokens and columns of a tile of logits (`mrlhf.parallel.tiled_head`)."""
CPU_KEPT = 12 << 20
"""Logits that a CPU keeps for the backward pass (`mrlhf.parallel.tiled_head`)."""
BLOCK_TOKENS = 4096
"""Tokens whose gradients are summed in fp32 at once (`mrlhf.parallel.tiled_head`)."""


@dataclass(frozen=True)
class TrainingBytes:
    """Bytes of a training pass on one rank.

    Attributes:
        kept: of all micro-batches in flight.
        working: of the layer whose backward pass runs.
        head: of the output layer.
        gradient: the gradient of the largest matrix on its way into the buffer.
    """

    kept: int
    working: int
    head: int
    gradient: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.kept + self.working + self.head + self.gradient


def layers_kept(job: Job, role: Role, stage: StageParameters, rows: Rows) -> int:
    """Bytes that all layers of a rank keep for the backward pass of ``rows``, without FP8 and full recomputation."""
    moe = _left(job, role, rows, moe=True) if stage.moe_layers else 0
    dense = _left(job, role, rows)
    return stage.moe_layers * moe + (stage.layers - stage.moe_layers) * dense


def _left(job: Job, role: Role, rows: Rows, *, fp8: bool = False, moe: bool = False) -> int:
    """Bytes that one layer keeps where parts of it may be computed again."""
    return layer_kept(job, role, rows, fp8=fp8, moe=moe) - kept_again(job, role, rows, fp8=fp8, moe=moe)


def layer_kept(job: Job, role: Role, rows: Rows, *, fp8: bool = False, moe: bool = False) -> int:
    """Bytes that one layer keeps for the backward pass of ``rows``; an FP8 layer keeps products' inputs as bytes."""
    model, e, t, s = role.model, job.element_bytes, role.sizes.tensor_model_parallel_size, role.sequence_split
    n = _local(role, rows.tokens)
    query, both = model.num_attention_heads * model.head_dim, 2 * model.num_query_groups * model.head_dim
    linear = 1 if fp8 else e
    norms = 2 * n * (model.hidden_size * norm_kept(job, linear) + 4) // s
    attention = n * (2 * query + both + both // 2) * e // t
    attention += n * query * linear // t + _scores_kept(job, role, rows)
    attention += 4 * _local(role, rows.width) * model.head_dim * e
    if model.qk_norm:
        attention += _qk_norms_kept(job, n * query // t, n * both // 2 // t)
    if moe:
        return norms + attention + experts.kept(job, role, n)
    return norms + attention + _mlp_kept(job, role, n, linear)


def _mlp_kept(job: Job, role: Role, n: int, linear: int) -> int:
    """Bytes that the feed-forward part of a dense layer keeps, its input not counted."""
    e, f, gated = job.element_bytes, role.model.ffn_hidden_size, role.model.activation == "swiglu"
    t = role.sizes.tensor_model_parallel_size
    inner = n * f * (2 if gated else 1) * e // t + n * f * linear // t
    return inner + (2 * n * f * e // t if gated and not job.cuda else 0)


def kept_again(job: Job, role: Role, rows: Rows, *, fp8: bool = False, moe: bool = False) -> int:
    """Bytes of `layer_kept` that are computed again under selective recomputation.

    - ``mlp`` and ``moe``: all but the norm's output before them; Transformer Engine's dense layers have the norm inside
    - ``layernorm``: all but their inputs; Transformer Engine's dense layers have no norm of their own
    - ``core_attn``: the log-sum-exp, and under context parallelism gathered keys and values
    """
    n, e, s = _local(role, rows.tokens), job.element_bytes, role.sequence_split
    h, linear = role.model.hidden_size, 1 if fp8 else e
    norm = n * (h * norm_kept(job, linear) + 4) // s - n * h * e // s
    again = 0
    if role.again("moe" if moe else "mlp"):
        again += experts.kept(job, role, n) if moe else _mlp_kept(job, role, n, linear)
        again += norm if job.transformer_engine and not moe else 0
    if role.again("layernorm"):
        # The norm before a mixture of experts is one of its own everywhere, the others are not with Transformer Engine.
        again += norm * (int(moe) if job.transformer_engine else 2)
    if role.again("core_attn"):
        again += _scores_kept(job, role, rows)
    return again


def _scores_kept(job: Job, role: Role, rows: Rows) -> int:
    """Bytes that the attention keeps beside queries, keys, values and output."""
    t = role.sizes.tensor_model_parallel_size
    kept = 4 * _local(role, rows.tokens) * role.model.num_attention_heads // t
    if role.sizes.context_parallel_size > 1 and not job.transformer_engine:
        # Keys and values of whole rows, gathered; Transformer Engine passes them around instead.
        kept += rows.tokens * 2 * role.model.num_query_groups * role.model.head_dim * job.element_bytes // t
    return kept


def norm_kept(job: Job, output: int) -> int:
    """Bytes an element that a norm and the product after it keep; ``output`` are those of the norm's output."""
    if job.transformer_engine:
        return job.element_bytes + output
    # `mrlhf.megatron.norms.TorchNorm`: the input (in fp32), and what is multiplied by the weight.
    return 4 + 2 * job.element_bytes


def _qk_norms_kept(job: Job, queries: int, keys: int) -> int:
    """Bytes that the norms of queries and keys keep; their output is not needed again."""
    if job.transformer_engine:
        return queries * job.element_bytes
    # As `norm_kept`; in fp32 the keys are still where the first matrix has put them.
    return (4 + job.element_bytes) * (queries + keys) - (4 * keys if job.element_bytes == 4 else 0)


def layer_work(job: Job, role: Role, tokens: int) -> int:
    """Bytes that a layer works with in a pass without gradient of ``tokens``, its input and output included."""
    model, e, t, s = role.model, job.element_bytes, role.sizes.tensor_model_parallel_size, role.sequence_split
    n = _local(role, tokens)
    query = model.num_attention_heads * model.head_dim // t
    qkv = query + 2 * model.num_query_groups * model.head_dim // t
    ffn, h = model.ffn_hidden_size // t, model.hidden_size
    gathered = h if s > 1 else 0
    residual = 2 * h // s
    attention = residual + gathered + 2 * qkv + query
    inner = (3 if job.cuda else 4) if model.activation == "swiglu" else 2
    mlp = residual + gathered + inner * ffn
    # The output before it is reduced (and, under sequence parallelism, scattered).
    dense = n * e * (max(attention, mlp if model.moe_layers < model.num_layers else 0) + h)
    return max(dense, experts.work(job, role, n)) if model.num_experts else dense


def backward_work(job: Job, role: Role, tokens: int) -> int:
    """Bytes that the backward pass of a layer works with: gradients of the MLP's tensors and gathered inputs."""
    model, e, t, s = role.model, job.element_bytes, role.sizes.tensor_model_parallel_size, role.sequence_split
    n, h, ffn = _local(role, tokens), model.hidden_size, model.ffn_hidden_size // t
    inner = (3 if job.cuda else 4) if model.activation == "swiglu" else 2
    full = 3 if s > 1 else 2
    dense = n * e * (full * h + h // s + (inner * ffn if model.moe_layers < model.num_layers else 0))
    return max(dense, experts.work(job, role, n)) if model.num_experts else dense


def in_flight(role: Role, stage: int, micro_batches: int) -> tuple[int, int]:
    """Chunks of layers whose activations are held at once on a pipeline rank, and virtual stages a rank has."""
    p, v = role.sizes.pipeline_model_parallel_size, role.sizes.virtual_stages
    if v == 1:
        return min(micro_batches, p - stage), 1
    return min(micro_batches * v, 2 * (p - stage - 1) + (v - 1) * p + 1), v


def micro_batches(job: Job, role: Role) -> int:
    """Micro-batches of an optimizer step on one rank."""
    rows = -(-job.minibatch // role.sizes.data_parallel_size)
    return max(-(-rows // job.train.count), 1)


def training(job: Job, role: Role, stage_index: int) -> TrainingBytes:
    """Bytes of the largest training pass of ``role`` on a pipeline rank."""
    stage = role.stages[stage_index]
    sizes = [_training(job, role, stage, stage_index, job.train, micro_batches(job, role))]
    if job.text_micro_batch is not None and role is job.roles[0]:
        count = max(-(-job.text_rows // role.sizes.data_parallel_size // job.text_micro_batch.count), 1)
        sizes.append(_training(job, role, stage, stage_index, job.text_micro_batch, count))
    return max(sizes, key=lambda part: part.total)


def _training(
    job: Job, role: Role, stage: StageParameters, index: int, rows: Rows, micro_batch_count: int
) -> TrainingBytes:
    e, h, s = job.element_bytes, role.model.hidden_size, role.sequence_split
    n = _local(role, rows.tokens)
    chunks, virtual = in_flight(role, index, micro_batch_count)
    residual = n * h * e // s
    whole = layers_kept(job, role, stage, rows)
    if not stage.moe_layers:
        whole -= role.fp8_layers(index) * (_left(job, role, rows) - _left(job, role, rows, fp8=True))
    kept = chunks * (stage.layers * residual if role.recompute else whole) // virtual
    working = backward_work(job, role, rows.tokens)
    # What is computed again of a layer, of the larger kind where there are two.
    kinds = {stage.moe_layers > 0, stage.moe_layers == stage.layers} if stage.layers else set()
    again = layer_kept if role.recompute else kept_again
    working += max((again(job, role, rows, moe=moe) for moe in kinds), default=0)
    if role.sizes.pipeline_model_parallel_size > 1:
        working += 2 * residual
    head = 0
    if stage.final_norm:
        kept += n * h * norm_kept(job, e) // s
        head = head_bytes(job, role, rows, backward=True)
    return TrainingBytes(kept, working, head, stage.largest * e)


def inference(job: Job, role: Role, stage_index: int, rows: Rows) -> tuple[int, int]:
    """Bytes of a pass without gradient on a pipeline rank: layers, head."""
    stage = role.stages[stage_index]
    work = layer_work(job, role, rows.tokens)
    if role.sizes.pipeline_model_parallel_size > 1:
        work += 2 * _local(role, rows.tokens) * role.model.hidden_size * job.element_bytes // role.sequence_split
    return work, head_bytes(job, role, rows, backward=False) if stage.final_norm else 0


def head_bytes(job: Job, role: Role, rows: Rows, *, backward: bool) -> int:
    """Bytes of the output layer: tiles of logits, hidden states as it reads them, statistics of each position.

    A value head converts its share of the hidden states to fp32. The log-prob head (`mrlhf.parallel.tiled_head`) has a
    tile of tokens x columns in the run's dtype and one in fp32 (two for 16 bits), the hidden states
    gathered over tensor ranks under sequence parallelism, and 3 or 4 numbers of each wanted position from every tensor
    rank. Its backward pass adds the gradients of hidden states and weight and the sums of one block in fp32.
    """
    model, e, t, s = role.model, job.element_bytes, role.sizes.tensor_model_parallel_size, role.sequence_split
    n, h = _local(role, rows.tokens), model.hidden_size
    if role.head == "value":
        return n * h * 4 // s * (2 if backward else 1) + 4 * n
    wanted = min(rows.count * rows.wanted, n)
    columns, tile = -(-model.vocab_size // t), CUDA_TILE if job.cuda else CPU_TILE
    tokens, width = min(tile[0], max(wanted, 1)), min(tile[1], columns)
    entropy = job.entropy and backward and role is job.roles[0]
    half = e < 4
    # A scratch tile for the softmax, and one more where the product is in 16 bits.
    total = tokens * width * (e + 4 * (1 + int(half))) + tokens * h * e
    # Each tile's logsumexp.
    total += 4 * wanted * -(-columns // width)
    if backward and not job.cuda:
        total += 4 * min(wanted * columns, CPU_KEPT)
    total += wanted * 4 * (4 if entropy else 3) * (1 + t)
    if s > 1:
        total += n * h * e
    if not backward:
        return total
    block = min(wanted, BLOCK_TOKENS)
    total += n * h * e + block * h * (e + 4)
    total += max(tokens, width) * h * e + (width * h * 4 if half else 0)
    return total


def _local(role: Role, tokens: int) -> int:
    """Tokens on one of the ranks that share a sequence."""
    return -(-tokens // role.sizes.context_parallel_size)
