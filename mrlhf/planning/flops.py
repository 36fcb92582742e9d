"""Floating-point operations of one pipeline rank (each of its tensor ranks), 2 for a multiplication and an addition.

A forward pass of a row of ``S`` slots through ``L`` layers with ``N`` matrix parameters: ``2 N S + 2 L a d S^2 / t``,
the causal half of the scores counted (Narayanan et al. 2021, arXiv:2104.04473, section 5.1, counts all of them). The
log-prob head multiplies wanted positions with real columns, ``2 h V / t`` each. A backward pass is twice the forward;
the head's is three times, as it computes its tiles again.
"""

from __future__ import annotations

from mrlhf.planning.job import Job, Role, Rollout, Rows
from mrlhf.planning.parameters import StageParameters


def linear(stage: StageParameters, tokens: float) -> float:
    """Of ``tokens`` through the linear layers of a rank, the part that FP8 can compute; ``k`` experts a token."""
    return 2.0 * stage.matrices * tokens


def layers_forward(role: Role, stage: StageParameters, rows: Rows) -> float:
    """Of a micro-batch through the layers of a rank."""
    c = role.sizes.context_parallel_size
    return linear(stage, rows.tokens / c) + rows.count * _attention(role, stage, float(rows.width) ** 2) / c


def head_forward(role: Role, stage: StageParameters, rows: Rows) -> float:
    """Of a micro-batch through the output layer of a rank; 0 before the last stage."""
    if not stage.final_norm:
        return 0.0
    h, c = role.model.hidden_size, role.sizes.context_parallel_size
    if role.head == "value":
        return 2.0 * h * rows.tokens / (role.sequence_split * c)
    columns = role.model.vocab_size / role.sizes.tensor_model_parallel_size
    return 2.0 * h * columns * rows.count * rows.wanted / c


def forward(role: Role, stage: StageParameters, rows: Rows) -> float:
    """Of a pass without gradient of a micro-batch."""
    return layers_forward(role, stage, rows) + head_forward(role, stage, rows)


def training(job: Job, role: Role, stage: StageParameters, rows: Rows) -> float:
    """Of forward and backward pass of a micro-batch."""
    layers = layers_forward(role, stage, rows) * 3 + recomputed(role, stage, rows)
    head = head_forward(role, stage, rows)
    return layers + head * (4 if role.head == "lm" else 3)


def recomputed(role: Role, stage: StageParameters, rows: Rows) -> float:
    """Of what the backward pass of a micro-batch computes again: all layers, or the chosen parts of them."""
    c = role.sizes.context_parallel_size
    again = linear_again(role, stage, rows.tokens / c)
    return again + (rows.count * _attention(role, stage, float(rows.width) ** 2) / c if role.again("core_attn") else 0)


def linear_again(role: Role, stage: StageParameters, tokens: float) -> float:
    """The part of `recomputed` that FP8 can compute, of ``tokens``."""
    if role.recompute:
        return linear(stage, tokens)
    dense = stage.dense_layer if stage.dense_layer is not None else stage.layer
    again = (stage.layers - stage.moe_layers) * dense.mlp if role.again("mlp") else 0
    if role.again("moe") and stage.layer.active is not None:
        again += stage.moe_layers * stage.layer.active
    return 2.0 * again * tokens


def prefill(role: Role, stage: StageParameters, rollout: Rollout, rows: float) -> float:
    """Of the prompts of ``rows`` rows, without their padding; logits of the last token alone."""
    prompt = rollout.mean_prompt
    return rows * (linear(stage, prompt) + _attention(role, stage, float(prompt) ** 2) + 2.0 * stage.output)


def decode(role: Role, stage: StageParameters, rollout: Rollout, rows: float) -> float:
    """Of all further tokens of ``rows`` rows: ``2 N T_r + 2 L a d (2 T_p T_r + T_r^2) / t + 2 h V_pad T_r / t``."""
    prompt, response = rollout.mean_prompt, max(rollout.mean_response - 1, 0)
    matrices = linear(stage, response) + 2.0 * stage.output * response
    return rows * (matrices + _attention(role, stage, 2.0 * prompt * response + float(response) ** 2))


def _attention(role: Role, stage: StageParameters, squares: float) -> float:
    model, t = role.model, role.sizes.tensor_model_parallel_size
    return 2.0 * stage.layers * model.num_attention_heads * model.head_dim / t * squares
