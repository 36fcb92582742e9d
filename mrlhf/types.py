"""What travels between rollout, roles and trainer: named fields with fixed shapes and dtypes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

Reduction = Literal["mean", "max", "min"]


@dataclass(frozen=True)
class Metric:
    """A logged number that can be put together from parts: micro-batches, then ranks.

    ``value`` is the sum for ``mean`` and the extreme for ``max`` and ``min``; ``count`` is how many tokens (rows,
    pairs, or their weights) it stands for. A part with count 0 changes nothing.
    """

    reduction: Reduction
    value: Tensor | float
    count: Tensor | float

    def merge(self, other: Metric) -> Metric:
        """Both parts together.

        Raises:
            ValueError: the reductions differ.
        """
        if self.reduction != other.reduction:
            raise ValueError(f"a metric is reduced by {self.reduction} here and by {other.reduction} there")
        mine, theirs = _scalar(self.value), _scalar(other.value)
        if self.reduction == "mean":
            value = mine + theirs
        elif self.reduction == "max":
            value = torch.maximum(mine, theirs)  # keeps NaN, unlike Python's max
        else:
            value = torch.minimum(mine, theirs)
        return Metric(self.reduction, value, _scalar(self.count) + _scalar(other.count))

    def result(self) -> float:
        """The number to log; NaN where nothing was counted."""
        count = float(self.count)
        if count == 0:
            return math.nan
        return float(self.value) / count if self.reduction == "mean" else float(self.value)


def _scalar(x: Tensor | float) -> Tensor:
    return x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64)


def merge_metrics(parts: Sequence[dict[str, Metric]]) -> dict[str, Metric]:
    """Merge dictionaries of metrics name by name; a name may be missing in some."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def labels(tokens: Tensor) -> Tensor:
    """The label of each position of the label frame: ``[B, S] -> [B, S-1]``, ``result[b, t] = tokens[b, t + 1]``.

    This is the only place where tokens are shifted.
    """
    return tokens[:, 1:]


def gather_rows(x: Tensor, positions: Tensor) -> Tensor:
    """One entry of every row: ``[B, W], [B] -> [B]``, ``result[b] = x[b, positions[b]]``; differentiable."""
    return x.gather(1, positions.unsqueeze(1)).squeeze(1)


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``number``."""
    return -(-number // multiple) * multiple


@dataclass
class RolloutBatch:
    """Prompts with their responses and everything that was computed per token.

    A row is ``prompt, response, padding``: contiguous and right-padded, with at least one padding slot. Per-token
    fields live in the label frame ``[B, S-1]``: index ``t`` belongs to the prediction of token ``t + 1``.

    Example: prompt ``[5, 6]``, response ``[7, 2]`` (2 ends it), pad id 0, ``S = 5``::

        slot                0     1     2     3     4
        tokens              5     6     7     2     0      prompt_lengths 2, response_lengths 2
        label index t       0     1     2     3
        labels(tokens)      6     7     2     0
        response_mask       -     x     x     -            0 <= t - (prompt_lengths - 1) < response_lengths
        gae_mask            -     x     x     x            in deepspeed_chat: one slot more (standard: response_mask)
        logprobs[t]               log p(7 | 5 6), log p(2 | 5 6 7), ...
        values[t]                 V(5 6), V(5 6 7), and V(5 6 7 2) at t = 3, the value after the last token

    Attributes:
        tokens: ``[B, S]`` int64.
        prompt_lengths: ``[B]`` int64, at least 1.
        response_lengths: ``[B]`` int64, at least 0.
        sample_ids: ``[B]`` int64, one per response, the same under every parallel layout.
        group_ids: ``[B]`` int64, shared by the responses to one prompt.
        truncated: ``[B]`` bool, the response was cut off by the length limit.
        response_mask: ``[B, S-1]`` bool, the label is a response token.
        gae_mask: ``[B, S-1]`` bool, the position takes part in reward shaping and GAE.
        old_logprobs: ``[B, S-1]`` float, of the actor at the time of the rollout.
        rollout_logprobs: ``[B, S-1]`` float, as the sampler computed them while it generated.
        ref_logprobs: ``[B, S-1]`` float, of the reference.
        values: ``[B, S-1]`` float, of the critic at the time of the rollout.
        scores: ``[B]`` float, one per response, as they enter the reward.
        raw_scores: ``[B]`` float, as the reward sources gave them, before any normalisation.
        rewards: ``[B, S-1]`` float, shaped.
        kl: ``[B, S-1]`` float, actor to reference.
        advantages: ``[B, S-1]`` float.
        returns: ``[B, S-1]`` float.
        row_weights: ``[B]`` float, weights of the rows in the losses.
        margins: ``[B]`` float, by how much the better answer of a pair should win; the same on both rows of a pair.
        pad_to_multiple: ``S`` is kept a multiple of it.
    """

    tokens: Tensor
    prompt_lengths: Tensor
    response_lengths: Tensor
    sample_ids: Tensor
    group_ids: Tensor
    truncated: Tensor
    response_mask: Tensor | None = None
    gae_mask: Tensor | None = None
    old_logprobs: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    scores: Tensor | None = None
    raw_scores: Tensor | None = None
    rewards: Tensor | None = None
    kl: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    row_weights: Tensor | None = None
    margins: Tensor | None = None
    pad_to_multiple: int = 1

    ROW_INTEGERS: ClassVar[tuple[str, ...]] = ("prompt_lengths", "response_lengths", "sample_ids", "group_ids")
    TOKEN_MASKS: ClassVar[tuple[str, ...]] = ("response_mask", "gae_mask")
    TOKEN_FLOATS: ClassVar[tuple[str, ...]] = (
        "old_logprobs",
        "rollout_logprobs",
        "ref_logprobs",
        "values",
        "rewards",
        "kl",
        "advantages",
        "returns",
    )
    ROW_FLOATS: ClassVar[tuple[str, ...]] = ("scores", "raw_scores", "row_weights", "margins")

    def __post_init__(self) -> None:
        self._check_shapes()
        if self.size:
            self._check_rows()

    @property
    def size(self) -> int:
        """Number of rows ``B``."""
        return int(self.tokens.shape[0])

    @property
    def width(self) -> int:
        """Slots per row ``S``; the label frame has one less."""
        return int(self.tokens.shape[1])

    @property
    def lengths(self) -> Tensor:
        """``[B]``: prompt and response together."""
        return self.prompt_lengths + self.response_lengths

    @property
    def pad_id(self) -> int:
        """The id in the last slot, which every row keeps free.

        Raises:
            ValueError: the batch has no rows.
        """
        if not self.size:
            raise ValueError("a batch without rows has no pad id")
        return int(self.tokens[0, -1])

    @classmethod
    def from_sequences(
        cls,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        *,
        pad_id: int,
        pad_to_multiple: int = 1,
        sample_ids: Sequence[int] | None = None,
        group_ids: Sequence[int] | None = None,
        truncated: Sequence[bool] | None = None,
    ) -> RolloutBatch:
        """Lay token lists out as rows.

        Args:
            prompts: ``B`` lists of token ids, none of them empty.
            responses: ``B`` lists of token ids; an empty one is allowed.
            pad_id: fills what is left of each row.
            pad_to_multiple: ``S`` is rounded up to it.
            sample_ids: 0, 1, ... by default.
            group_ids: the sample ids by default.
            truncated: all False by default.

        Returns:
            a batch on the CPU without any optional field.

        Raises:
            ValueError: the lists differ in length, or a prompt is empty.
        """
        if len(prompts) != len(responses):
            raise ValueError(
                f"{len(prompts)} prompts and {len(responses)} responses; both lists need one entry per row"
            )
        rows = [list(p) + list(r) for p, r in zip(prompts, responses, strict=True)]
        width = round_up(max((len(row) for row in rows), default=0) + 1, pad_to_multiple)
        tokens = torch.full((len(rows), width), pad_id, dtype=torch.int64)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
        samples = list(range(len(rows))) if sample_ids is None else list(sample_ids)
        groups = samples if group_ids is None else list(group_ids)
        return cls(
            tokens=tokens,
            prompt_lengths=torch.tensor([len(p) for p in prompts], dtype=torch.int64),
            response_lengths=torch.tensor([len(r) for r in responses], dtype=torch.int64),
            sample_ids=torch.tensor(samples, dtype=torch.int64),
            group_ids=torch.tensor(groups, dtype=torch.int64),
            truncated=torch.tensor([False] * len(rows) if truncated is None else list(truncated), dtype=torch.bool),
            pad_to_multiple=pad_to_multiple,
        )

    def prompt(self, row: int) -> list[int]:
        """Token ids of one row's prompt."""
        ids: list[int] = self.tokens[row, : int(self.prompt_lengths[row])].tolist()
        return ids

    def response(self, row: int) -> list[int]:
        """Token ids of one row's response."""
        start = int(self.prompt_lengths[row])
        ids: list[int] = self.tokens[row, start : start + int(self.response_lengths[row])].tolist()
        return ids

    def sampled_logprobs(self, row: int) -> list[float] | None:
        """``rollout_logprobs`` of one row's response; None where they were not kept."""
        if self.rollout_logprobs is None:
            return None
        start = int(self.prompt_lengths[row]) - 1
        found: list[float] = self.rollout_logprobs[row, start : start + int(self.response_lengths[row])].tolist()
        return found

    def tensors(self) -> dict[str, Tensor]:
        """All fields that are present, by name."""
        return {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}

    def replace(self, **changes: Any) -> RolloutBatch:
        """A copy with some fields exchanged, checked again."""
        return replace(self, **changes)

    def select(self, rows: Tensor | Sequence[int] | slice) -> RolloutBatch:
        """The given rows in the given order: indices, a bool mask ``[B]``, or a slice. The width stays (see `trim`)."""
        index = rows if isinstance(rows, slice) else torch.as_tensor(rows, device=self.tokens.device)
        if isinstance(index, Tensor) and index.dtype != torch.bool:
            index = index.long()
        return self._derived({name: value[index] for name, value in self.tensors().items()})

    def to(self, device: torch.device | str) -> RolloutBatch:
        """All tensors on ``device``."""
        return self._derived({name: value.to(device) for name, value in self.tensors().items()})

    def trim(self, width: int | None = None) -> RolloutBatch:
        """Cut or pad the rows to ``width`` slots; by default to what the longest row needs.

        That is the longest row, the one slot after it, rounded up to ``pad_to_multiple``.

        Raises:
            ValueError: ``width`` is too small for the rows or not a multiple of ``pad_to_multiple``.
        """
        needed = (int(self.lengths.max()) if self.size else 0) + 1
        width = round_up(needed, self.pad_to_multiple) if width is None else width
        if width < needed or width % self.pad_to_multiple:
            raise ValueError(
                f"width {width} must be at least {needed} (longest row + 1) and a multiple of {self.pad_to_multiple}"
            )
        changes = {"tokens": _fit(self.tokens, width, self.pad_id if self.size else 0)}
        for name in (*self.TOKEN_MASKS, *self.TOKEN_FLOATS):
            value = getattr(self, name)
            if value is not None:
                changes[name] = _fit(value, width - 1, 0)
        return self.replace(**changes)

    @classmethod
    def cat(cls, batches: Sequence[RolloutBatch]) -> RolloutBatch:
        """Rows of several batches in order, padded to the widest.

        Raises:
            ValueError: no batch, or batches that differ in pad id, ``pad_to_multiple`` or the fields they carry.
        """
        if not batches:
            raise ValueError("nothing to concatenate")
        batches = [b for b in batches if b.size] or [batches[0]]
        first = batches[0]
        names = first.tensors().keys()
        for batch in batches[1:]:
            if batch.tensors().keys() != names:
                different = sorted(batch.tensors().keys() ^ names)
                raise ValueError(f"only some of the batches carry {', '.join(different)}")
            if (batch.pad_id, batch.pad_to_multiple) != (first.pad_id, first.pad_to_multiple):
                raise ValueError(
                    f"batches differ: pad id {first.pad_id} and {batch.pad_id}, "
                    f"pad_to_multiple {first.pad_to_multiple} and {batch.pad_to_multiple}"
                )
        width = max(b.width for b in batches)
        parts = [b.trim(width).tensors() for b in batches]
        return first.replace(**{name: torch.cat([p[name] for p in parts]) for name in names})

    def _derived(self, tensors: dict[str, Tensor]) -> RolloutBatch:
        """A copy with other tensors that are right by construction: no check, so no wait for a GPU."""
        result = copy(self)
        for name, value in tensors.items():
            setattr(result, name, value)
        return result

    def _check_shapes(self) -> None:
        if self.tokens.dim() != 2 or self.tokens.dtype != torch.int64:
            raise ValueError(f"tokens must be int64 [B, S], not {_describe(self.tokens)}")
        rows, width = self.tokens.shape
        row, frame = (rows,), (rows, width - 1)
        for name in self.ROW_INTEGERS:
            _require(name, getattr(self, name), row, "int64", self.tokens.device)
        _require("truncated", self.truncated, row, "bool", self.tokens.device)
        for names, shape, kind in (
            (self.TOKEN_MASKS, frame, "bool"),
            (self.TOKEN_FLOATS, frame, "float"),
            (self.ROW_FLOATS, row, "float"),
        ):
            for name in names:
                if getattr(self, name) is not None:
                    _require(name, getattr(self, name), shape, kind, self.tokens.device)
        if self.pad_to_multiple < 1 or width % self.pad_to_multiple:
            raise ValueError(f"the width {width} of tokens is not a multiple of pad_to_multiple={self.pad_to_multiple}")

    def _check_rows(self) -> None:
        if int(self.prompt_lengths.min()) < 1 or int(self.response_lengths.min()) < 0:
            raise ValueError(
                f"prompts need at least 1 token and responses at least 0; the shortest have "
                f"{int(self.prompt_lengths.min())} and {int(self.response_lengths.min())}"
            )
        longest = int(self.lengths.max())
        if self.width < longest + 1:
            raise ValueError(
                f"tokens have {self.width} slots; the longest row has {longest} tokens and needs {longest + 1}: "
                f"the slot after the last token carries its value"
            )
        padding = torch.arange(self.width, device=self.tokens.device) >= self.lengths.unsqueeze(1)
        wrong = (padding & (self.tokens != self.tokens[0, -1])).any(dim=1)
        if bool(wrong.any()):
            row = int(wrong.long().argmax())
            raise ValueError(
                f"row {row} is not right-padded: it has {int(self.lengths[row])} tokens and something other than "
                f"the pad id {self.pad_id} after them"
            )


def _describe(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _require(name: str, x: Any, shape: tuple[int, ...], kind: str, device: torch.device) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor, not {type(x).__name__}")
    good = x.dtype.is_floating_point if kind == "float" else str(x.dtype) == f"torch.{kind}"
    if not good or tuple(x.shape) != shape:
        raise ValueError(f"{name} must be {kind} {list(shape)}, not {_describe(x)}")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, tokens are on {device}")


def _fit(x: Tensor, width: int, fill: int) -> Tensor:
    if width <= x.shape[1]:
        return x[:, :width]
    return torch.cat([x, x.new_full((x.shape[0], width - x.shape[1]), fill)], dim=1)
