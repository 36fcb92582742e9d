"""Losses on preference pairs: reward models (Bradley-Terry and DeepSpeed-Chat's) and direct preference optimisation."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mrlhf.rl.losses import LossTerms
from mrlhf.rl.masked import masked_sum, select
from mrlhf.types import Metric

DPOKind = Literal["sigmoid", "ipo", "hinge"]


def sequence_logprobs(logprobs: Tensor, mask: Tensor, *, average: bool = False) -> Tensor:
    """Log-prob of each row's response: the sum over its tokens, or their mean.

    Args:
        logprobs: ``[B, W]``, per label.
        mask: bool ``[B, W]``, response tokens; what lies outside is not read.
        average: divide by the number of tokens (0 for a row without any).

    Returns:
        ``[B]``, differentiable.
    """
    total = masked_sum(logprobs, mask, dim=1)
    return total / mask.sum(dim=1).clamp(min=1) if average else total


def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    kind: DPOKind = "sigmoid",
    margin: Tensor | float | None = None,
) -> LossTerms:
    """Direct preference optimisation, summed over pairs.

    With ``h = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)``, ``m`` the margin and ``e`` the label
    smoothing:

    - ``sigmoid``: ``-(1 - e) log sigmoid(beta h - m) - e log sigmoid(-(beta h - m))``. ``e = m = 0`` is Rafailov et
      al. 2023, eq. 7; ``e`` the probability that a label is flipped (conservative DPO, Mitchell 2023, eq. 3); ``m``
      the offset of Amini et al. 2024, eq. 7.
    - ``ipo``: ``(h - 1 / (2 beta))^2`` (Azar et al. 2023, eq. 17). As in TRL it is meant for log-probs that are
      averaged over the response's tokens (``sequence_logprobs(..., average=True)``); all others for sums.
    - ``hinge``: ``max(0, 1 + m - beta h)`` (SLiC, Zhao et al. 2023, on the implicit reward).

    Args:
        policy_chosen: ``[N]``, of the policy that is trained.
        policy_rejected: ``[N]``.
        ref_chosen: ``[N]``, of the frozen reference; no gradient flows here.
        ref_rejected: ``[N]``.
        beta: strength of the tie to the reference, above 0.
        label_smoothing: in ``[0, 0.5)``, ``sigmoid`` only.
        kind: see above.
        margin: a number or ``[N]``; not with ``ipo``.

    Returns:
        terms over ``N`` pairs with metrics ``accuracy`` (the chosen one has the higher implicit reward; equal counts
        as wrong), ``chosen_reward`` and ``rejected_reward`` (``beta * (policy - ref)``), ``reward_margin``,
        ``chosen_logprob`` and ``rejected_logprob`` (of the policy).

    Raises:
        ValueError: an option out of range, or one that ``kind`` does not have.
    """
    if not beta > 0:
        raise ValueError(f"beta must be above 0, not {beta}")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must be in [0, 0.5), not {label_smoothing}")
    if label_smoothing and kind != "sigmoid":
        raise ValueError(f"label_smoothing has a meaning with the sigmoid loss only, not with {kind}")
    if margin is not None and kind == "ipo":
        raise ValueError("a margin has no meaning with the ipo loss, whose target difference is 1 / (2 beta)")
    chosen_ratio = _fp32(policy_chosen) - _fp32(ref_chosen).detach()
    rejected_ratio = _fp32(policy_rejected) - _fp32(ref_rejected).detach()
    difference = chosen_ratio - rejected_ratio
    logits = beta * difference - (0.0 if margin is None else margin)
    if kind == "sigmoid":
        loss = -(1 - label_smoothing) * F.logsigmoid(logits)
        if label_smoothing:
            loss = loss - label_smoothing * F.logsigmoid(-logits)
    elif kind == "hinge":
        loss = torch.relu(1 - logits)
    elif kind == "ipo":
        loss = (difference - 1 / (2 * beta)).square()
    else:
        raise ValueError(f"kind must be sigmoid, ipo or hinge, not {kind!r}")
    metrics = _pair_metrics(beta * chosen_ratio, beta * rejected_ratio, "reward")
    count = _count(loss)
    metrics["chosen_logprob"] = Metric("mean", policy_chosen.detach().to(loss.dtype).sum(), count)
    metrics["rejected_logprob"] = Metric("mean", policy_rejected.detach().to(loss.dtype).sum(), count)
    return LossTerms(loss.sum(), count, metrics)


def pairwise_loss(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    margin: Tensor | float | None = None,
    *,
    centering_coef: float = 0.0,
) -> LossTerms:
    """Bradley-Terry loss ``-log sigmoid(chosen - rejected - margin)``, summed over pairs (Ouyang et al. 2022, eq. 1).

    ``centering_coef * (chosen + rejected)^2`` is added (Eisenstein et al. 2023, eq. 2; TRL's
    ``center_rewards_coefficient``): the difference alone leaves the level of the scores open.

    Args:
        chosen_scores: ``[N]``.
        rejected_scores: ``[N]``.
        margin: a number or ``[N]``, how far the chosen score shall be ahead (Touvron et al. 2023, eq. 2).
        centering_coef: weight of the centring.

    Returns:
        terms over ``N`` pairs with metrics ``accuracy``, ``chosen_score``, ``rejected_score`` and ``score_margin``.
    """
    chosen, rejected = _fp32(chosen_scores), _fp32(rejected_scores)
    difference = chosen - rejected if margin is None else chosen - rejected - margin
    loss = -F.logsigmoid(difference)
    if centering_coef:
        loss = loss + centering_coef * (chosen + rejected).square()
    return LossTerms(loss.sum(), _count(loss), _pair_metrics(chosen, rejected, "score"))


def diverging_pairwise_loss(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    chosen_tokens: Tensor,
    rejected_tokens: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
) -> LossTerms:
    """DeepSpeed-Chat's step-2 loss: Bradley-Terry at every position of the span in which the two rows differ.

    The span runs from the first position whose tokens differ up to the longer row's end, so scores of the shorter row
    on its padding take part. Each pair is the mean over its span, pairs are summed. Two identical rows are compared at
    their last token (loss ``log 2``).

    Args:
        chosen_scores: ``[N, S]``, score after each token.
        rejected_scores: ``[N, S]``.
        chosen_tokens: ``[N, S]``, right-padded with the same pad id as ``rejected_tokens``.
        rejected_tokens: ``[N, S]``.
        chosen_lengths: ``[N]``, tokens before the padding, at least 1 (see `lengths_before_padding`).
        rejected_lengths: ``[N]``.

    Returns:
        terms over ``N`` pairs; the metrics (those of `pairwise_loss`) use the scores at each row's last token.
    """
    position = torch.arange(chosen_tokens.shape[1], device=chosen_tokens.device).unsqueeze(0)
    end = torch.maximum(chosen_lengths, rejected_lengths).unsqueeze(1)
    differs = chosen_tokens != rejected_tokens
    start = torch.where(differs.any(dim=1), differs.long().argmax(dim=1), end.squeeze(1) - 1).unsqueeze(1)
    # A row that goes on with the pad id itself differs nowhere before the end; it still has one position.
    span = (position >= torch.minimum(start, end - 1)) & (position < end)
    difference = select(chosen_scores, span) - select(rejected_scores, span)
    per_position = select(-F.logsigmoid(difference), span)
    loss = per_position.sum(dim=1) / span.sum(dim=1)
    chosen_end = chosen_scores.gather(1, chosen_lengths.unsqueeze(1) - 1).squeeze(1)
    rejected_end = rejected_scores.gather(1, rejected_lengths.unsqueeze(1) - 1).squeeze(1)
    return LossTerms(loss.sum(), _count(loss), _pair_metrics(chosen_end, rejected_end, "score"))


def lengths_before_padding(tokens: Tensor, lengths: Tensor, pad_id: int, *, padding_at_beginning: int = 0) -> Tensor:
    """Where DeepSpeed-Chat takes a row to end: at the first pad id, whoever wrote it.

    Where pad equals EOS that is the end token itself. The first ``padding_at_beginning`` pad ids are passed over
    (DeepSpeed-Chat's ``num_padding_at_beginning``: OPT's rows begin with the id that also pads them, so 1 there).

    Args:
        tokens: ``[B, S]`` int64, right-padded.
        lengths: ``[B]``, true lengths; no result is beyond them.
        pad_id: of the padding.
        padding_at_beginning: see above.

    Returns:
        ``[B]`` int64, at least 1.
    """
    is_pad = tokens == pad_id
    wanted = is_pad & (is_pad.cumsum(dim=1) == padding_at_beginning + 1)
    first = torch.where(wanted.any(dim=1), wanted.long().argmax(dim=1), lengths)
    return torch.minimum(first, lengths).clamp(min=1)


def nll_loss(logprobs: Tensor) -> LossTerms:
    """``-logprobs`` summed over rows: what keeps the chosen response likely beside a preference loss.

    With the mean log-prob per token of each chosen response this is the second term of Pang et al. 2024, eq. 1 (RPO).

    Args:
        logprobs: ``[N]``.

    Returns:
        terms over ``N`` rows with the metric ``chosen_nll``.
    """
    loss = -_fp32(logprobs)
    count = _count(loss)
    return LossTerms(loss.sum(), count, {"chosen_nll": Metric("mean", loss.detach().sum(), count)})


def _fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _count(loss: Tensor) -> Tensor:
    return torch.tensor(float(loss.numel()), dtype=loss.dtype, device=loss.device)


def _pair_metrics(chosen: Tensor, rejected: Tensor, what: str) -> dict[str, Metric]:
    chosen, rejected = _fp32(chosen.detach()), _fp32(rejected.detach())
    count = _count(chosen)
    return {
        "accuracy": Metric("mean", (chosen > rejected).to(chosen.dtype).sum(), count),
        f"chosen_{what}": Metric("mean", chosen.sum(), count),
        f"rejected_{what}": Metric("mean", rejected.sum(), count),
        f"{what}_margin": Metric("mean", (chosen - rejected).sum(), count),
    }
