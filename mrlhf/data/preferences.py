"""Preference pairs: two answers to one prompt, of which the first is better."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from mrlhf.data.conversations import encode_answer
from mrlhf.data.examples import ExampleKind, Overlong, load_examples
from mrlhf.data.records import (
    Fields,
    check_messages,
    check_prompt,
    check_text,
    field_names,
    kind,
)
from mrlhf.data.stream import ExampleSet
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.rl import response_masks
from mrlhf.types import RolloutBatch

Messages = list[dict[str, Any]]
EXPECTED = '{"prompt": "...", "chosen": "...", "rejected": "..."} or {"chosen": [messages], "rejected": [messages]}'


@dataclass(frozen=True)
class PreferenceRecord:
    """One row of a file."""

    prompt: str | Messages
    chosen: str
    rejected: str
    margin: float
    line: int

    @property
    def has_messages(self) -> bool:
        """Whether the chat template is needed."""
        return not isinstance(self.prompt, str)


@dataclass(frozen=True)
class PreferenceExample:
    """One pair as it is trained on.

    Attributes:
        prompt_ids: the prompt, as generation gets it.
        chosen_ids: the better answer, with its end id unless it was cut.
        rejected_ids: the other answer.
        margin: by how much the better one should win; 0 where the row has none.
        line: where it stood in its file.
    """

    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]
    margin: float
    line: int

    @property
    def length(self) -> int:
        """Tokens of the longer row."""
        return len(self.prompt_ids) + max(len(self.chosen_ids), len(self.rejected_ids))


def load_preferences(
    paths: str | Path | Sequence[str | Path],
    tokenizer: Tokenizer,
    *,
    max_length: int,
    overlong: Overlong = "error",
    skip_bad_lines: bool = False,
    prompt_key: str = "prompt",
    chosen_key: str = "chosen",
    rejected_key: str = "rejected",
    margin_key: str = "margin",
) -> ExampleSet[PreferenceExample]:
    """Read pairs of JSONL, Parquet or CSV files as token ids.

    A row has a prompt (text or chat messages) and two answers as text, or two lists of chat messages that differ in
    their last message alone; lists that hold only the answer go on from the prompt. The row may have a margin.

    Args:
        paths: one file or several, read in order.
        tokenizer: of the model that is trained.
        max_length: tokens of prompt and answer together, the end id included.
        overlong: what happens to a pair with a longer row: ``error``, ``drop``, or ``truncate`` to cut the ends of the
            answers; a pair whose answers are then the same, or gone, is dropped.
        skip_bad_lines: count malformed rows, and pairs of two equal answers, instead of failing on them.
        prompt_key: field of the prompt.
        chosen_key: field of the better answer.
        rejected_key: field of the other answer.
        margin_key: field of the margin.

    Raises:
        DataError: a file or a row cannot be used; the message names its place.
        ValueError: an unknown ``overlong``.
    """
    if overlong not in get_args(Overlong):
        raise ValueError(f"overlong must be one of {', '.join(get_args(Overlong))}, not {overlong!r}")
    kind = ExampleKind(
        noun="preference pair",
        unit="pair",
        expected=EXPECTED,
        parse=partial(_parse, keys=(prompt_key, chosen_key, rejected_key, margin_key)),
        encode=partial(_encode, tokenizer=tokenizer),
        length=lambda example: example.length,
        too_long="the longer answer ends at token {}",
        truncate=_cut,
        mark=lambda e: f"{e.prompt_ids} {e.chosen_ids} {e.rejected_ids} {e.margin}",
    )
    return load_examples(
        paths, tokenizer, kind, max_length=max_length, overlong=overlong, skip_bad_lines=skip_bad_lines
    )


def pair_batch(
    examples: Sequence[PreferenceExample], *, pad_id: int, pad_to_multiple: int = 1, first_id: int = 0
) -> RolloutBatch:
    """Lay ``N`` pairs out as ``2 N`` rows: row ``2 i`` is the better answer of pair ``i``, row ``2 i + 1`` the other.

    Args:
        examples: the pairs.
        pad_id: fills what is left of each row; may be an end id, since the masks come from lengths.
        pad_to_multiple: the width ``S`` is rounded up to it.
        first_id: group id of the first pair; sample ids start at twice that.

    Returns:
        a batch with ``response_mask`` ``[2 N, S-1]`` on the answers and ``margins`` ``[2 N]``.
    """
    numbers = range(2 * first_id, 2 * (first_id + len(examples)))
    batch = RolloutBatch.from_sequences(
        [e.prompt_ids for e in examples for _ in range(2)],
        [answer for e in examples for answer in (e.chosen_ids, e.rejected_ids)],
        pad_id=pad_id,
        pad_to_multiple=pad_to_multiple,
        sample_ids=numbers,
        group_ids=[number // 2 for number in numbers],
    )
    answers, _ = response_masks(
        batch.prompt_lengths, batch.response_lengths, width=batch.width - 1, semantics="standard"
    )
    return batch.replace(
        response_mask=answers,
        margins=torch.tensor([e.margin for e in examples for _ in range(2)], dtype=torch.float32),
    )


def _parse(item: Fields, number: int, keys: tuple[str, str, str, str]) -> PreferenceRecord:
    prompt_key, chosen_key, rejected_key, margin_key = keys
    present = {key: value for key, value in item.items() if value is not None}
    missing = [key for key in (chosen_key, rejected_key) if key not in present]
    if missing:
        raise ValueError(
            f"no field {' and '.join(map(repr, missing))}, expected {EXPECTED}; the fields are: {field_names(present)}"
        )
    chosen, rejected = present[chosen_key], present[rejected_key]
    if kind(chosen) != kind(rejected):
        raise ValueError(f"{chosen_key!r} is {kind(chosen)} and {rejected_key!r} is {kind(rejected)}")
    prompt = check_prompt(present[prompt_key], prompt_key) if prompt_key in present else None
    if isinstance(chosen, list):
        check_messages(chosen, chosen_key)
        check_messages(rejected, rejected_key)
        prompt, chosen, rejected = _from_messages(prompt, chosen, rejected)
    elif prompt is None:
        raise ValueError(f"no field {prompt_key!r}, expected {EXPECTED}; the fields are: {field_names(present)}")
    check_text(chosen, chosen_key)
    check_text(rejected, rejected_key)
    if chosen == rejected:
        raise ValueError(f"{chosen_key!r} and {rejected_key!r} are the same, so neither is better")
    return PreferenceRecord(prompt, chosen, rejected, _margin(present.get(margin_key), margin_key), number)


def _from_messages(prompt: str | Messages | None, chosen: Messages, rejected: Messages) -> tuple[Messages, Any, Any]:
    """The common beginning of two conversations and their two last messages."""
    if len(chosen) == len(rejected) == 1 and prompt is not None:
        start = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        chosen, rejected = start + chosen, start + rejected
    if chosen == rejected:
        raise ValueError("the two conversations are the same, so neither is better")
    if len(chosen) != len(rejected) or len(chosen) < 2 or chosen[:-1] != rejected[:-1]:
        raise ValueError(
            f"the two conversations, of {len(chosen)} and {len(rejected)} messages, must have the same messages but "
            "for the last one, the answer"
        )
    for message in (chosen[-1], rejected[-1]):
        if message["role"] != "assistant":
            raise ValueError(f"the last message must be from the assistant, not from {message['role']!r}")
    return chosen[:-1], chosen[-1]["content"], rejected[-1]["content"]


def _margin(value: Any, key: str) -> float:
    if value is None or value == "":
        return 0.0
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= torch.finfo(torch.float32).max:
        raise ValueError(f"{key!r} is {value!r:.80}, expected a finite number")
    return number


def _encode(record: PreferenceRecord, *, tokenizer: Tokenizer) -> PreferenceExample:
    prompt, chosen = encode_answer(tokenizer, record.prompt, record.chosen)
    _, rejected = encode_answer(tokenizer, record.prompt, record.rejected)
    if not prompt:
        raise ValueError("the prompt has no token")
    if chosen == rejected:
        raise ValueError("the two answers have the same tokens, so neither is better")
    return PreferenceExample(prompt, chosen, rejected, record.margin, record.line)


def _cut(example: PreferenceExample, max_length: int) -> PreferenceExample | None:
    """The pair with both answers cut to ``max_length``; None where that leaves nothing to compare."""
    room = max(0, max_length - len(example.prompt_ids))
    chosen, rejected = example.chosen_ids[:room], example.rejected_ids[:room]
    return None if chosen == rejected else replace(example, chosen_ids=chosen, rejected_ids=rejected)
