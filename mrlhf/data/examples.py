"""From rows of files to training examples: what SFT rows and preference pairs have in common."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

from mrlhf.data.records import Fields, nothing_left, place, read_rows
from mrlhf.data.stream import ExampleSet
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.errors import DataError

Overlong = Literal["error", "drop", "truncate"]


class Record(Protocol):
    """A row as it stands in its file."""

    @property
    def line(self) -> int:
        """Where it stands."""

    @property
    def has_messages(self) -> bool:
        """Whether the chat template is needed."""


R = TypeVar("R", bound=Record)
E = TypeVar("E")


@dataclass(frozen=True)
class ExampleKind(Generic[R, E]):
    """One kind of training example.

    Attributes:
        noun: what a row is, for messages.
        unit: the same in one word.
        expected: a row as it should be, for messages.
        parse: turns the fields of a row and its number into a record; ValueError for a malformed one.
        encode: turns a record into an example; ValueError or DataError where it cannot be one.
        length: tokens of an example.
        too_long: what `length` means, for the message about an example that is longer than allowed.
        truncate: the example in so many tokens; None where nothing to learn is left of it.
        mark: text that tells examples apart, for the fingerprint of them all.
    """

    noun: str
    unit: str
    expected: str
    parse: Callable[[Fields, int], R]
    encode: Callable[[R], E]
    length: Callable[[E], int]
    too_long: str
    truncate: Callable[[E, int], E | None]
    mark: Callable[[E], str]


def load_examples(
    paths: str | Path | Sequence[str | Path],
    tokenizer: Tokenizer,
    kind: ExampleKind[R, E],
    *,
    max_length: int,
    overlong: Overlong,
    skip_bad_lines: bool,
    section: str = "data",
) -> ExampleSet[E]:
    """Read files in order.

    Args:
        paths: one file or several.
        tokenizer: of the model that is trained; it needs an end id.
        kind: of example.
        max_length: tokens of an example.
        overlong: what happens to a longer one: ``error``, ``drop``, or ``truncate``; what is not worth learning after
            that counts as dropped.
        skip_bad_lines: count malformed rows instead of failing on them.
        section: of the configuration where these options stand, for messages.

    Raises:
        DataError: a file or a row cannot be used, or nothing is left; the message names the place.
    """
    tokenizer.finish([])
    found: list[E] = []
    counts = {"skipped": 0, "dropped": 0, "truncated": 0}
    for path in [paths] if isinstance(paths, (str, Path)) else paths:
        records, bad = read_rows(
            path,
            kind.parse,
            noun=kind.noun,
            expected=kind.expected,
            skip_bad_lines=skip_bad_lines,
            skip_key=f"{section}.skip_bad_lines",
        )
        counts["skipped"] += bad
        if any(record.has_messages for record in records):
            tokenizer.require_chat_template()
        for record in records:
            where = place(path, record.line)
            try:
                example: E | None = kind.encode(record)
            except (ValueError, DataError) as error:
                if not skip_bad_lines:
                    raise DataError(f"{where}: {error}") from error
                counts["skipped"] += 1
                continue
            assert example is not None
            if kind.length(example) > max_length:
                example = _shorter(example, kind, max_length, overlong, where, section)
                counts["dropped" if example is None else "truncated"] += 1
            if example is not None:
                found.append(example)
    if not found:
        dropped, skipped = counts["dropped"], counts["skipped"]
        raise DataError(nothing_left(kind.unit, paths, section, max_length, dropped, skipped))
    digest = hashlib.sha256()
    for each in found:
        digest.update(f"{kind.mark(each)}\n".encode())
    return ExampleSet(found, digest.hexdigest(), **counts)


def _shorter(
    example: E, kind: ExampleKind[Any, E], max_length: int, overlong: Overlong, where: str, section: str
) -> E | None:
    if overlong == "error":
        raise DataError(
            f"{where}: {kind.too_long.format(kind.length(example))}, {section}.max_length is {max_length}; raise it, "
            f"or set {section}.overlong to drop or truncate"
        )
    return None if overlong == "drop" else kind.truncate(example, max_length)
