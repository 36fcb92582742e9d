"""Masks of the two semantics and the shaped per-token reward."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from mrlhf.rl.kl import KLKind, kl_estimate
from mrlhf.rl.masked import compute_dtype, select

Semantics = Literal["standard", "deepspeed_chat"]


def response_masks(
    prompt_lengths: Tensor,
    response_lengths: Tensor,
    *,
    width: int,
    semantics: Semantics,
    response_width: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Build the two masks of the label frame from lengths (never from ``token != pad``: pad may equal EOS).

    Label position ``t`` predicts token ``t + 1``, so the response of a row sits at
    ``prompt_length - 1 <= t < prompt_length - 1 + response_length``.

    Args:
        prompt_lengths: ``[B]`` int, at least 1 each.
        response_lengths: ``[B]`` int. In ``standard`` they include the EOS token; in ``deepspeed_chat`` they count the
            tokens before the first pad, so EOS is outside where it is also the pad id.
        width: ``S - 1``, the width of the label frame.
        semantics: ``deepspeed_chat`` gives ``gae_mask`` the one label position after the response as well, unless the
            response is full.
        response_width: for ``deepspeed_chat``, the length of a full response: the padded width that generation
            returned for the whole rollout batch over all ranks (which counts an EOS that ``response_lengths`` leaves
            out). Unused in ``standard``.

    Returns:
        ``(response_mask, gae_mask)``, bool ``[B, width]``; equal in value in ``standard``.

    Raises:
        ValueError: an unknown semantics, ``response_width`` missing or too small, or rows that do not fit ``width``.
    """
    if semantics not in get_args(Semantics):
        raise ValueError(f"semantics must be one of {', '.join(get_args(Semantics))}, not {semantics!r}")
    start = (prompt_lengths - 1).unsqueeze(1)
    end = start + response_lengths.unsqueeze(1)
    gae_end = end
    if semantics == "deepspeed_chat":
        if response_width is None:
            raise ValueError("semantics deepspeed_chat needs response_width, the padded response width of the rollout")
        if response_lengths.numel() and int(response_lengths.max()) > response_width:
            raise ValueError(f"a response has {int(response_lengths.max())} tokens, response_width is {response_width}")
        gae_end = end + (response_lengths < response_width).unsqueeze(1).to(end.dtype)
    if prompt_lengths.numel() and (int(start.min()) < 0 or int(gae_end.max()) > width):
        raise ValueError(
            f"rows do not fit a label frame of width {width}: the shortest prompt has {int(start.min()) + 1} tokens "
            f"(at least 1 needed), the longest row needs {int(gae_end.max())} label positions"
        )
    position = torch.arange(width, device=prompt_lengths.device).unsqueeze(0)
    return (position >= start) & (position < end), (position >= start) & (position < gae_end)


def last_true(mask: Tensor) -> Tensor:
    """Mark the last True of every row of ``mask [B, W]``; a row without any stays all False."""
    return mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)


def shape_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    gae_mask: Tensor,
    *,
    kl_coef: float,
    score_clip: float | None,
    kl_kind: KLKind = "k1",
) -> tuple[Tensor, Tensor]:
    """Per-token reward: ``-kl_coef * kl``, plus the clipped score on the last True of ``gae_mask``.

    (Ziegler et al. 2019, eq. 2; Ouyang et al. 2022, eq. 2.) No input is written to, so a second call gives the same.

    Args:
        scores: ``[B]``, one per response.
        logprobs: ``[B, W]`` of the policy that sampled.
        ref_logprobs: ``[B, W]`` of the reference.
        gae_mask: bool ``[B, W]``.
        kl_coef: weight of the KL penalty.
        score_clip: scores are clamped to ``[-score_clip, score_clip]``; None leaves them.
        kl_kind: see `mrlhf.rl.kl.kl_estimate`.

    Returns:
        ``(rewards, kl)``, two new tensors ``[B, W]`` in at least fp32, 0 outside the mask. A row without any True gets
        no score.
    """
    dtype = compute_dtype(torch.promote_types(logprobs.dtype, ref_logprobs.dtype))
    kl = kl_estimate(select(logprobs, gae_mask).to(dtype), select(ref_logprobs, gae_mask).to(dtype), kl_kind)
    scores = scores.to(dtype)
    if score_clip is not None:
        scores = scores.clamp(-score_clip, score_clip)
    penalty = -kl_coef * kl
    return torch.where(last_true(gae_mask), penalty + scores.unsqueeze(1), penalty), kl
