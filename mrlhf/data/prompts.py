"""Prompts from JSONL files and the stream of global batches over them."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch

from mrlhf.data.tokenizer import Tokenizer
from mrlhf.errors import DataError, join_problems

T = TypeVar("T")
Overlong = Literal["error", "drop", "keep_last"]
SHOWN_PROBLEMS = 10


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
        fingerprint: changes with the prompts and their order.
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
    """Read a JSONL file: one object a line with the prompt, a string or a list of chat messages, under ``prompt_key``.

    Blank lines are passed over. Line numbers in messages are those of the file, blank lines included.

    Args:
        path: the file, UTF-8.
        prompt_key: field that holds the prompt; the others become ``meta``.
        skip_bad_lines: count malformed lines instead of failing on them.

    Returns:
        the records and the number of malformed lines.

    Raises:
        DataError: no such file, a malformed line (``file:line``, and what was expected), or no prompt at all.
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(f"{file} does not exist (expected a JSONL file with one prompt a line)")
    records: list[PromptRecord] = []
    problems: list[str] = []
    skipped = 0
    with file.open("rb") as lines:  # bytes, so that only "\n" ends a line
        for number, raw in enumerate(lines, start=1):
            if not raw.strip() or (number == 1 and not raw.removeprefix(b"\xef\xbb\xbf").strip()):
                continue
            try:
                records.append(_parse_line(raw, number, prompt_key))
            except ValueError as error:
                skipped += 1
                if len(problems) < SHOWN_PROBLEMS:
                    problems.append(f"{file}:{number}: {error}")
    if problems and not skip_bad_lines:
        more = f" (the first {SHOWN_PROBLEMS} are shown)" if skipped > len(problems) else ""
        headline = f"{skipped} malformed line(s) in {file}{more}; data.skip_bad_lines=true passes over them"
        raise DataError(join_problems(headline, problems))
    if not records:
        raise DataError(
            f"{file} holds no prompt: expected lines such as {_example(prompt_key)}"
            + (f"; {skipped} malformed line(s) were skipped" if skipped else "")
        )
    return records, skipped


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
    dropped = truncated = 0
    digest = hashlib.sha256()
    for record in records:
        text = record.prompt if isinstance(record.prompt, str) else tokenizer.render(record.prompt)
        ids = tokenizer.encode(text)
        if not ids:
            raise DataError(f"{source}:{record.line}: the prompt has no token")
        if len(ids) > max_prompt_length:
            if overlong == "error":
                raise DataError(
                    f"{source}:{record.line}: the prompt has {len(ids)} tokens, data.max_prompt_length is "
                    f"{max_prompt_length}; raise it, or set data.overlong to drop or keep_last"
                )
            if overlong == "drop":
                dropped += 1
                continue
            truncated += 1
            ids = ids[-max_prompt_length:]
            text = tokenizer.decode(ids, skip_special_tokens=False)
        digest.update(json.dumps([record.prompt, record.meta], sort_keys=True).encode())
        prompts.append(Prompt(ids, text, record.meta, record.line))
    if not prompts:
        raise DataError(
            f"{source}: all {len(records)} prompts are longer than data.max_prompt_length={max_prompt_length}"
        )
    return PromptDataset(prompts, digest.hexdigest(), skipped, dropped, truncated)


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
    """Endless global batches of prompts, the same on every rank and under every parallel layout.

    Epochs follow each other without a gap (a batch may span two), each in its own order, which depends on the seed and
    the epoch alone. A prompt's ``group_id`` is its position in the stream, so it never repeats.

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
        if not dataset.prompts:
            raise ValueError("a prompt stream needs at least one prompt")
        if batch_size < 1 or samples_per_prompt < 1:
            raise ValueError(f"batch_size={batch_size} and samples_per_prompt={samples_per_prompt} must be at least 1")
        self.dataset = dataset
        self.seed = seed
        self.batch_size = batch_size
        self.samples_per_prompt = samples_per_prompt
        self.shuffle = shuffle
        self.position = 0
        self._order: tuple[int, list[int]] | None = None

    @property
    def epoch(self) -> int:
        """Complete passes over the data set so far."""
        return self.position // len(self.dataset)

    def __iter__(self) -> Iterator[list[Sample]]:
        return self

    def __next__(self) -> list[Sample]:
        """The next global batch: ``batch_size * samples_per_prompt`` samples, in stream order."""
        samples: list[Sample] = []
        for group_id in range(self.position, self.position + self.batch_size):
            prompt = self.dataset.prompts[self.index(group_id)]
            first = group_id * self.samples_per_prompt
            samples.extend(Sample(first + k, group_id, prompt) for k in range(self.samples_per_prompt))
        self.position += self.batch_size
        return samples

    def index(self, position: int) -> int:
        """Which prompt of the data set stands at ``position`` of the stream."""
        epoch, offset = divmod(position, len(self.dataset))
        if not self.shuffle:
            return offset
        if self._order is None or self._order[0] != epoch:
            mixed = hashlib.sha256(f"prompt order {self.seed} {epoch}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(mixed[:8], "little") >> 1)
            self._order = (epoch, torch.randperm(len(self.dataset), generator=generator).tolist())
        return self._order[1][offset]

    def state_dict(self) -> dict[str, Any]:
        """The cursor: plain numbers and strings."""
        return {
            "position": self.position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "fingerprint": self.dataset.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the saved stream stood, in its order; over another data set start at 0 with a warning."""
        if state["fingerprint"] != self.dataset.fingerprint:
            warnings.warn("the prompts are not those of the checkpoint: starting at the first one", stacklevel=2)
            self.position = 0
            return
        if (state["seed"], state["shuffle"]) != (self.seed, self.shuffle):
            warnings.warn(
                f"going on in the prompt order of the checkpoint (seed {state['seed']}, shuffle {state['shuffle']}), "
                f"not in that of the configuration (seed {self.seed}, shuffle {self.shuffle})",
                stacklevel=2,
            )
        self.seed, self.shuffle, self.position = int(state["seed"]), bool(state["shuffle"]), int(state["position"])
        self._order = None


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


def _parse_line(raw: bytes, number: int, prompt_key: str) -> PromptRecord:
    try:
        text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from error
    try:
        item = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"not valid JSON at column {error.colno} ({error.msg}), expected {_example(prompt_key)}"
        ) from None
    if not isinstance(item, dict):
        raise ValueError(f"not an object but {_kind(item)}, expected {_example(prompt_key)}")
    try:
        json.dumps(item, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        # JSON may spell half of a character outside the basic plane; tokenizers and files refuse it much later.
        raise ValueError(f"holds half of a surrogate pair, {ascii(error.object[error.start])}") from None
    if prompt_key not in item:
        found = ", ".join(map(repr, item)) or "none"
        raise ValueError(f"no field {prompt_key!r} (data.prompt_key); the fields are: {found}")
    prompt = item.pop(prompt_key)
    if isinstance(prompt, list):
        _check_messages(prompt, prompt_key)
    elif not isinstance(prompt, str):
        raise ValueError(f"{prompt_key!r} is {_kind(prompt)}, expected a string or a list of chat messages")
    elif not prompt:
        raise ValueError(f"{prompt_key!r} is an empty string")
    return PromptRecord(prompt, item, number)


def _check_messages(messages: list[Any], key: str) -> None:
    if not messages:
        raise ValueError(f"{key!r} is an empty list, expected at least one chat message")
    for i, message in enumerate(messages):
        if not (isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message):
            expected = '{"role": "user", "content": "..."}'
            raise ValueError(f"{key}[{i}] is not a chat message, expected {expected}, found {message!r:.80}")


def _kind(item: Any) -> str:
    names = {list: "a list", dict: "an object", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(item), "a number")


def _example(prompt_key: str) -> str:
    return f'{{"{prompt_key}": "..."}}'
