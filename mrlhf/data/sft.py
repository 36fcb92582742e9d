"""Examples for supervised fine-tuning: which tokens a row has, and which of them are learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from mrlhf.data.conversations import encode_answer, encode_conversation, encode_text
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
from mrlhf.types import RolloutBatch

LearnOn = Literal["response", "all"]
EXPECTED = '{"prompt": "...", "response": "..."}, {"messages": [...]} or {"text": "..."}'


@dataclass(frozen=True)
class SFTRecord:
    """One row of a file: ``messages``, or ``prompt`` and ``response``, or ``response`` alone for plain text."""

    line: int
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[dict[str, Any]] | None = None
    response: str = ""

    @property
    def has_messages(self) -> bool:
        """Whether the chat template is needed."""
        return self.messages is not None or isinstance(self.prompt, list)


@dataclass(frozen=True)
class SFTExample:
    """One row as it is trained on.

    Attributes:
        ids: its tokens.
        learned: for each token, whether it is a target of the loss; the first one never is.
        line: where it stood in its file.
    """

    ids: list[int]
    learned: list[bool]
    line: int

    @property
    def start(self) -> int:
        """Place of the first learned token; the length where there is none."""
        return next((i for i, learned in enumerate(self.learned) if learned), len(self.ids))

    @property
    def context(self) -> tuple[int, ...]:
        """The tokens before the first learned one; of a text without any, all of it."""
        return tuple(self.ids[: self.start] if self.start > 1 else self.ids)


def load_sft(
    paths: str | Path | Sequence[str | Path],
    tokenizer: Tokenizer,
    *,
    max_length: int,
    learn_on: LearnOn = "response",
    overlong: Overlong = "error",
    skip_bad_lines: bool = False,
    prompt_key: str = "prompt",
    response_key: str = "response",
    messages_key: str = "messages",
    text_key: str = "text",
    section: str = "data",
) -> ExampleSet[SFTExample]:
    """Read rows of JSONL, Parquet or CSV files as token ids.

    A row has chat messages, or a prompt (text or messages) and a response, or plain text; the first of these that
    it has counts, other fields are left alone. The response, and plain text, end with exactly one end id, which is
    learned; where the chat template ends a turn with an end id, that one.

    Args:
        paths: one file or several, read in order.
        tokenizer: of the model that is trained.
        max_length: tokens of a row, the end id included.
        learn_on: ``response``: what the assistant says, in every turn; ``all``: every token. Plain text is all learned.
        overlong: what happens to a longer row: ``error``, ``drop``, or ``truncate`` to keep its first tokens.
        skip_bad_lines: count malformed rows instead of failing on them.
        prompt_key: field of the prompt.
        response_key: field of the response.
        messages_key: field of a conversation.
        text_key: field of plain text.
        section: of the configuration where these options stand, for messages.

    Returns:
        the examples; ``dropped`` counts also truncated rows without any learned token left.

    Raises:
        DataError: a file or a row cannot be used; the message names its place.
        ValueError: an unknown ``learn_on`` or ``overlong``.
    """
    for name, value, choices in (("learn_on", learn_on, LearnOn), ("overlong", overlong, Overlong)):
        if value not in get_args(choices):
            raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}, not {value!r}")
    kind = ExampleKind(
        noun="example",
        unit="row",
        expected=EXPECTED,
        parse=partial(_parse, keys=(messages_key, prompt_key, response_key, text_key)),
        encode=partial(_encode, tokenizer=tokenizer, learn_on=learn_on),
        length=lambda example: len(example.ids),
        too_long="the row has {} tokens",
        truncate=_cut,
        mark=lambda example: f"{example.ids} {example.learned}",
    )
    return load_examples(
        paths,
        tokenizer,
        kind,
        max_length=max_length,
        overlong=overlong,
        skip_bad_lines=skip_bad_lines,
        section=section,
    )


def sft_batch(
    examples: Sequence[SFTExample], *, pad_id: int, pad_to_multiple: int = 1, first_id: int = 0
) -> RolloutBatch:
    """Lay examples out as rows, right-padded.

    Args:
        examples: ``B`` of them.
        pad_id: fills what is left of each row; may be an end id, since the masks come from the examples.
        pad_to_multiple: the width ``S`` is rounded up to it.
        first_id: sample id of the first row; the others follow.

    Returns:
        a batch whose ``response_mask`` ``[B, S-1]`` marks the learned tokens; the prompt of a row is what stands before
        the first of them.
    """
    batch = RolloutBatch.from_sequences(
        [e.ids[: e.start] for e in examples],
        [e.ids[e.start :] for e in examples],
        pad_id=pad_id,
        pad_to_multiple=pad_to_multiple,
        sample_ids=range(first_id, first_id + len(examples)),
    )
    mask = torch.zeros(batch.size, batch.width - 1, dtype=torch.bool)
    for row, example in enumerate(examples):
        mask[row, : len(example.ids) - 1] = torch.tensor(example.learned[1:], dtype=torch.bool)
    return batch.replace(response_mask=mask)


def _parse(item: Fields, number: int, keys: tuple[str, str, str, str]) -> SFTRecord:
    messages_key, prompt_key, response_key, text_key = keys
    present = {key: value for key, value in item.items() if value is not None}
    if messages_key in present:
        messages = present[messages_key]
        if not isinstance(messages, list):
            raise ValueError(f"{messages_key!r} is {kind(messages)}, expected a list of chat messages")
        check_messages(messages, messages_key)
        answers = [message for message in messages if message["role"] == "assistant"]
        if not answers:
            raise ValueError(f"{messages_key!r} has no message from the assistant, so there is nothing to learn")
        if not any(message["content"] or message.get("tool_calls") for message in answers):
            raise ValueError(f"{messages_key!r} has no answer with text, so there is nothing to learn")
        return SFTRecord(number, messages=messages)
    if prompt_key in present and response_key in present:
        prompt = check_prompt(present[prompt_key], prompt_key)
        return SFTRecord(number, prompt=prompt, response=check_text(present[response_key], response_key))
    if text_key in present:
        return SFTRecord(number, response=check_text(present[text_key], text_key))
    expected = f"{prompt_key!r} and {response_key!r}, or {messages_key!r}, or {text_key!r}"
    raise ValueError(f"expected the fields {expected}; the fields are: {field_names(present)}")


def _cut(example: SFTExample, max_length: int) -> SFTExample | None:
    """The first tokens; None where none of them is learned."""
    shorter = SFTExample(example.ids[:max_length], example.learned[:max_length], example.line)
    return shorter if any(shorter.learned) else None


def _encode(record: SFTRecord, *, tokenizer: Tokenizer, learn_on: LearnOn) -> SFTExample:
    if record.messages is not None and learn_on == "response":
        ids, learned = encode_conversation(tokenizer, record.messages)
    elif record.messages is not None:
        ids = encode_text(tokenizer, tokenizer.render(record.messages, add_generation_prompt=False))
        learned = [True] * len(ids)
    elif record.prompt is not None:
        prompt, response = encode_answer(tokenizer, record.prompt, record.response)
        if not prompt:
            raise ValueError("the prompt has no token")
        ids, learned = prompt + response, [learn_on == "all"] * len(prompt) + [True] * len(response)
    else:
        ids = encode_text(tokenizer, record.response)
        learned = [True] * len(ids)
    if not any(learned[1:]):
        raise ValueError("no token of the row is learned, since nothing stands before it")
    return SFTExample(ids, [False, *learned[1:]], record.line)
