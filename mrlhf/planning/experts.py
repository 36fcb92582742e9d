"""Mixture-of-experts layers: tokens, memory and traffic of a rank, with the experts evenly loaded.

A rank has ``n / s`` of the ``n`` tokens of a micro-batch (``s = t`` under sequence parallelism), of which each goes to
``k`` experts. EP x ETP ranks hold all experts once, so that a rank multiplies ``m = k n / s x ETP`` tokens with its
``1 / ETP`` of an expert each (Lepikhin et al. 2020, arXiv:2006.16668, section 3.2, for EP; Singh et al. 2023,
arXiv:2303.06318, for ETP). Routers do not load experts evenly; what the busiest rank needs beyond that is not counted.
"""

from __future__ import annotations

from mrlhf.planning.job import Job, Role


def routed(role: Role, tokens: float) -> float:
    """Tokens that a rank's experts multiply, of ``tokens`` on each context rank's tensor group."""
    return role.model.num_experts_per_token * tokens / role.sequence_split * role.sizes.expert_tensor_size


def columns(role: Role) -> int:
    """Columns of an expert on one rank."""
    return (role.model.moe_ffn_hidden_size or role.model.ffn_hidden_size) // role.sizes.expert_tensor_size


def kept(job: Job, role: Role, tokens: int) -> int:
    """Bytes that the experts and the router of a layer keep for the backward pass, the norm before them not counted.

    The first matrix's input; gate and up, and their product weighed by the router (on GPUs one operation makes it, else
    three more tensors on the way there are kept); for each token and expert the router's fp32 weight and its place, and
    numbers and indices for each choice.
    """
    model, e, m, f = role.model, job.element_bytes, int(routed(role, tokens)), columns(role)
    own = tokens // role.sequence_split
    experts, choices = model.num_experts or 0, model.num_experts_per_token
    inner = 3 if job.cuda else 6
    return m * (model.hidden_size + inner * f) * e + own * experts * 5 + own * choices * 28


def work(job: Job, role: Role, tokens: int) -> int:
    """Bytes that a layer's experts work with in a pass without gradient, residual and output included."""
    model, e, m, f = role.model, job.element_bytes, int(routed(role, tokens)), columns(role)
    own = tokens // role.sequence_split
    # Tokens as they are sent, received and put in order; of one pair two exist at once, and what an expert makes of it.
    return e * (3 * own * model.hidden_size + m * (3 * model.hidden_size + (3 if job.cuda else 4) * f))


def sent(role: Role, tokens: float, element_bytes: int, *, backward: bool) -> tuple[float, float]:
    """Bytes that a rank sends to other experts' ranks in a layer, and collectives.

    Tokens go to the experts and come back, in each direction of a pass: an all-to-all sends ``(EP - 1) / EP`` of
    ``k n h e / s``. Where several ranks share an expert they gather all tokens of it, and scatter the sums.
    """
    ep, etp = role.sizes.expert_model_parallel_size, role.sizes.expert_tensor_size
    size = routed(role, tokens) / etp * role.model.hidden_size * element_bytes
    times = 2.0 * (1 + backward + (backward and role.again("moe")))
    every = (ep - 1) / ep * size * times + (etp - 1) * size * times
    # Counts, tokens, weights and results of a forward pass; no counts backwards.
    calls = 0.0 if ep * etp == 1 else 4.0 * (times / 2) - backward
    return every, calls


def read_share(role: Role, tokens: float) -> float:
    """Share of a layer's experts that at least one of ``tokens`` on every rank of the experts goes to."""
    model, ranks = role.model, role.sizes.expert_block
    if not model.num_experts:
        return 1.0
    # The experts of one token are different ones.
    missed = 1.0 - model.num_experts_per_token / model.num_experts
    return float(1.0 - missed ** (tokens / role.sequence_split * ranks))
