"""Prompts from files and the stream of global batches over them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from mrlhf.data.records import Fields, check_prompt, field_names, place, read_rows
from mrlhf.data.stream import ExampleStream
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.errors import DataError

T = TypeVar("T")
Overlong = Literal["error", "drop", "keep_last"]


@dataclass(frozen=True)
class PromptRecord:
    """One line of a prompt file: a string or chat messages, the other fields of the line, the physical line number."""

    prompt: str | list[dict[str, Any]]
    meta: dict[str, Any]
    line: int


@dataclass(frozen=True)
class Prompt:
    """A prompt ready for generation; ``text`` and ``ids`` are the same thing, also after truncation."""

    ids: list[int]
    text: str
    meta: dict[str, Any] = field(default_factory=dict)
    line: int = 0


@dataclass(frozen=True)
class PromptDataset:
    """All prompts of a file, and what was left out on the way.

    Attributes:
        prompts: in file order.
        fingerprint: changes with the prompts' tokens (so with tokenizer and template), fields and order.
        skipped: malformed lines passed over.
        dropped: over-long prompts left out.
        truncated: over-long prompts cut to their last tokens.
    """

    prompts: list[Prompt]
    fingerprint: str
    skipped: int = 0
    dropped: int = 0
    truncated: int = 0

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True)
class Sample:
    """One response to be generated: its prompt, and ids that are the same under every parallel layout."""

    sample_id: int
    group_id: int
    prompt: Prompt


def read_prompts(
    path: str | Path, *, prompt_key: str = "prompt", skip_bad_lines: bool = False
) -> tuple[list[PromptRecord], int]:
    """Read a JSONL, Parquet or CSV file: one prompt a row, a string or a list of chat messages, under ``prompt_key``.

    See `mrlhf.data.records.read_rows` for the formats and for what the numbers in messages count.

    Args:
        path: the file.
        prompt_key: field that holds the prompt; the others become ``meta``.
        skip_bad_lines: count malformed lines instead of failing on them.

    Returns:
        the records and the number of malformed lines.

    Raises:
        DataError: no such file, a malformed line (its place, and what was expected), or no prompt at all.
    """
    return read_rows(
        path,
        partial(_parse, prompt_key=prompt_key),
        noun="prompt",
        expected=f'{{"{prompt_key}": "..."}}',
        skip_bad_lines=skip_bad_lines,
    )


def encode_prompts(
    records: Sequence[PromptRecord],
    tokenizer: Tokenizer,
    *,
    max_prompt_length: int,
    overlong: Overlong = "error",
    source: str | Path = "prompts",
    skipped: int = 0,
) -> PromptDataset:
    """Turn records into token ids of at most ``max_prompt_length``.

    Args:
        records: from `read_prompts`.
        tokenizer: chat messages go through its template.
        max_prompt_length: in tokens.
        overlong: what happens to a longer prompt: ``error``, ``drop``, or ``keep_last`` to keep its last tokens.
        source: file name for messages.
        skipped: malformed lines, passed on to the result.

    Raises:
        DataError: messages without a chat template, an over-long prompt under ``error``, a prompt without any token,
            or nothing left.
        ValueError: an unknown ``overlong``.
    """
    if overlong not in get_args(Overlong):
        raise ValueError(f"overlong must be one of {', '.join(get_args(Overlong))}, not {overlong!r}")
    if any(not isinstance(r.prompt, str) for r in records):
        tokenizer.require_chat_template()
    prompts: list[Prompt] = []
    # Every prompt has every field of the file, so that a reward function sees the same ones with any share of it.
    fields = sorted({key for record in records for key in record.meta})
    dropped = truncated = 0
    digest = hashlib.sha256()
    for record in records:
        text = record.prompt if isinstance(record.prompt, str) else _render(record, tokenizer, source)
        ids = tokenizer.encode(text)
        if not ids:
            raise DataError(f"{place(source, record.line)}: the prompt has no token")
        if len(ids) > max_prompt_length:
            if overlong == "error":
                raise DataError(
                    f"{place(source, record.line)}: the prompt has {len(ids)} tokens, data.max_prompt_length is "
                    f"{max_prompt_length}; raise it, or set data.overlong to drop or keep_last"
                )
            if overlong == "drop":
                dropped += 1
                continue
            truncated += 1
            ids = ids[-max_prompt_length:]
            text = tokenizer.decode(ids, skip_special_tokens=False)
        digest.update(json.dumps([ids, record.meta], sort_keys=True, default=str).encode())
        prompts.append(Prompt(ids, text, dict.fromkeys(fields) | record.meta, record.line))
    if not prompts:
        raise DataError(
            f"{source}: all {len(records)} prompts are longer than data.max_prompt_length={max_prompt_length}"
        )
    return PromptDataset(prompts, digest.hexdigest(), skipped, dropped, truncated)


def _render(record: PromptRecord, tokenizer: Tokenizer, source: str | Path) -> str:
    assert not isinstance(record.prompt, str)
    try:
        return tokenizer.render(record.prompt)
    except DataError as error:
        raise DataError(f"{place(source, record.line)}: {error}") from error


def load_prompts(
    path: str | Path,
    tokenizer: Tokenizer,
    *,
    max_prompt_length: int,
    prompt_key: str = "prompt",
    overlong: Overlong = "error",
    skip_bad_lines: bool = False,
) -> PromptDataset:
    """`read_prompts` and `encode_prompts` in one step."""
    records, skipped = read_prompts(path, prompt_key=prompt_key, skip_bad_lines=skip_bad_lines)
    return encode_prompts(
        records, tokenizer, max_prompt_length=max_prompt_length, overlong=overlong, source=path, skipped=skipped
    )


class PromptStream:
    """Endless global batches of prompts: an `ExampleStream` with several samples of each prompt.

    A prompt's ``group_id`` is its position in the stream, so it never repeats.

    Args:
        dataset: at least one prompt.
        seed: of the shuffle.
        batch_size: prompts per global batch.
        samples_per_prompt: responses per prompt; the samples of a prompt follow each other.
        shuffle: False keeps the file's order.
    """

    def __init__(
        self,
        dataset: PromptDataset,
        *,
        seed: int,
        batch_size: int,
        samples_per_prompt: int = 1,
        shuffle: bool = True,
    ):
        if samples_per_prompt < 1:
            raise ValueError(f"samples_per_prompt={samples_per_prompt} must be at least 1")
        self.dataset = dataset
        self.samples_per_prompt = samples_per_prompt
        self._prompts = ExampleStream(
            dataset.prompts, dataset.fingerprint, seed=seed, batch_size=batch_size, shuffle=shuffle, noun="prompt"
        )

    @property
    def epoch(self) -> int:
        """Complete passes over the data set so far."""
        return self._prompts.epoch

    @property
    def position(self) -> int:
        """Prompts given out so far."""
        return self._prompts.position

    def __iter__(self) -> Iterator[list[Sample]]:
        return self

    def __next__(self) -> list[Sample]:
        """The next global batch: ``batch_size * samples_per_prompt`` samples, in stream order."""
        start, count = self._prompts.position, self.samples_per_prompt
        return [
            Sample(group_id * count + k, group_id, prompt)
            for group_id, prompt in enumerate(next(self._prompts), start=start)
            for k in range(count)
        ]

    def prompt(self, group_id: int) -> Prompt:
        """The prompt of a group, also of one given out before."""
        return self.dataset.prompts[self._prompts.index(group_id)]

    def state_dict(self) -> dict[str, Any]:
        """The cursor: plain numbers and strings."""
        return self._prompts.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the saved stream stood, in its order; over another data set start at 0 with a warning."""
        self._prompts.load_state_dict(state)


def shard(samples: Sequence[T], rank: int, size: int, *, samples_per_prompt: int = 1) -> list[T]:
    """The part of a global batch that data-parallel rank ``rank`` of ``size`` works on: a run of whole groups.

    Raises:
        ValueError: the groups cannot be shared out evenly.
    """
    groups, rest = divmod(len(samples), samples_per_prompt)
    if rest or groups % size:
        raise ValueError(
            f"{len(samples)} samples in groups of {samples_per_prompt} cannot be shared out evenly over {size} "
            f"data-parallel ranks without splitting a group"
        )
    share = groups // size * samples_per_prompt
    return list(samples[rank * share : (rank + 1) * share])


def _parse(item: Fields, number: int, prompt_key: str) -> PromptRecord:
    if prompt_key not in item:
        raise ValueError(f"no field {prompt_key!r} (data.prompt_key); the fields are: {field_names(item)}")
    prompt = check_prompt(item.pop(prompt_key), prompt_key)
    return PromptRecord(prompt, item, number)
