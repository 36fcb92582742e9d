"""Rows of data files: JSONL, CSV, and Parquet through the ``datasets`` package, with errors that name the row."""

from __future__ import annotations

import csv
import glob
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mrlhf.errors import DataError, join_problems

T = TypeVar("T")
Fields = dict[str, Any]
SHOWN_PROBLEMS = 10
Rows = Iterator[tuple[int, Callable[[], Fields]]]
TABLES = (".parquet", ".csv")
"""File suffixes that are not JSONL."""
LONGEST_CELL = 2**31 - 1
"""Characters; the csv module's own limit is 131072, less than a long document."""


def place(file: str | Path, number: int) -> str:
    """Where a row stands: ``file:3`` for the physical line of a JSONL file, ``file, row 3`` for that of a table."""
    return f"{file}, row {number}" if Path(file).suffix.lower() in TABLES else f"{file}:{number}"


def read_rows(
    path: str | Path,
    parse: Callable[[Fields, int], T],
    *,
    noun: str,
    expected: str,
    skip_bad_lines: bool = False,
    skip_key: str | None = "data.skip_bad_lines",
) -> tuple[list[T], int]:
    """Read every row of a file.

    ``.parquet`` and ``.csv`` files are tables (CSV cells are strings, whatever they look like); everything else is
    JSONL, one object a line. Blank lines of JSONL are passed over. Numbers in messages are physical lines of JSONL,
    blank ones included, and rows of a table, counted from 1 without the header.

    Args:
        path: the file; JSONL and CSV in UTF-8.
        parse: turns the fields of a row and its number into a record; raises ValueError for a malformed one.
        noun: what a row is, for messages.
        expected: a row as it should be, for messages.
        skip_bad_lines: count malformed rows instead of failing on them.
        skip_key: the configuration key of ``skip_bad_lines``, for messages; None where there is none.

    Returns:
        the records and the number of malformed rows.

    Raises:
        DataError: no such file, a malformed row (its place, and what was expected), no row at all, or a table without
            the package that reads it.
    """
    file = Path(path)
    table = file.suffix.lower() in TABLES
    if not file.is_file():
        form = "file" if table else "JSONL file"
        wrong = "is not a file" if file.exists() else "does not exist"
        raise DataError(f"{file} {wrong} (expected a {form} with one {noun} a {'row' if table else 'line'})")
    records: list[T] = []
    problems: list[str] = []
    skipped = 0
    for number, read in ROWS.get(file.suffix.lower(), _json_lines)(file, expected):
        try:
            records.append(parse(read(), number))
        except ValueError as error:
            skipped += 1
            if len(problems) < SHOWN_PROBLEMS:
                problems.append(f"{place(file, number)}: {error}")
    if problems and not skip_bad_lines:
        more = f" (the first {SHOWN_PROBLEMS} are shown)" if skipped > len(problems) else ""
        headline = f"{skipped} malformed line(s) in {file}{more}"
        headline += f"; {skip_key}=true passes over them" if skip_key else ""
        raise DataError(join_problems(headline, problems))
    if not records:
        raise DataError(
            f"{file} holds no {noun}: expected {'rows' if table else 'lines'} such as {expected}"
            + (f"; {skipped} malformed line(s) were skipped" if skipped else "")
        )
    return records, skipped


def nothing_left(
    noun: str, paths: str | Path | Sequence[str | Path], section: str, max_length: int, dropped: int, skipped: int
) -> str:
    """The message where every row was left out, with the way out."""
    files = ", ".join(map(str, [paths] if isinstance(paths, (str, Path)) else paths))
    text = f"{files}: no {noun} is left: {dropped} are longer than {section}.max_length={max_length}, {skipped} are "
    return text + "malformed" + (f"; raise {section}.max_length" if dropped else "")


def check_messages(messages: Sequence[Any], key: str) -> None:
    """Raise ValueError unless these are chat messages, at least one."""
    if not messages:
        raise ValueError(f"{key!r} is an empty list, expected at least one chat message")
    for i, message in enumerate(messages):
        if not (isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message):
            expected = '{"role": "user", "content": "..."}'
            raise ValueError(f"{key}[{i}] is not a chat message, expected {expected}, found {message!r:.80}")
        content = message["content"]
        # A template would write other things as Python does, "None" for null. Messages that call tools have no text;
        # whether the template takes the parts of a list is found out when it has written them.
        if not (isinstance(content, (str, list)) or (content is None and message.get("tool_calls"))):
            raise ValueError(f"{key}[{i}]: 'content' is {kind(content)}, expected a string")


def check_text(text: Any, key: str) -> str:
    """``text`` if it is a string with something in it, else ValueError."""
    if not isinstance(text, str):
        raise ValueError(f"{key!r} is {kind(text)}, expected a string")
    if not text:
        raise ValueError(f"{key!r} is an empty string")
    return text


def check_prompt(prompt: Any, key: str) -> str | list[dict[str, Any]]:
    """``prompt`` if it is a string with something in it or a list of chat messages, else ValueError."""
    if isinstance(prompt, list):
        check_messages(prompt, key)
        return prompt
    if not isinstance(prompt, str):
        raise ValueError(f"{key!r} is {kind(prompt)}, expected a string or a list of chat messages")
    return check_text(prompt, key)


def field_names(fields: Fields) -> str:
    """The names of the fields that a row has, for messages."""
    return ", ".join(map(repr, fields)) or "none"


def kind(item: Any) -> str:
    """What a value of JSON is called."""
    names = {list: "a list", dict: "an object", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(item), "a number" if isinstance(item, (int, float)) else f"a {type(item).__name__}")


def _json_lines(file: Path, expected: str) -> Rows:
    with file.open("rb") as lines:  # bytes, so that only "\n" ends a line
        for number, raw in enumerate(lines, start=1):
            if not raw.strip() or (number == 1 and not raw.removeprefix(b"\xef\xbb\xbf").strip()):
                continue
            yield number, lambda raw=raw, number=number: _parse_line(raw, number == 1, expected)  # type: ignore[misc]


def _parse_line(raw: bytes, first: bool, expected: str) -> Fields:
    try:
        text = raw.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from error
    try:
        item = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON at column {error.colno} ({error.msg}), expected {expected}") from None
    except RecursionError:
        raise ValueError("not readable JSON: nested too deeply") from None
    if not isinstance(item, dict):
        raise ValueError(f"not an object but {kind(item)}, expected {expected}")
    try:
        json.dumps(item, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        # JSON may spell half of a character outside the basic plane; tokenizers and files refuse it much later.
        raise ValueError(f"holds half of a surrogate pair, {ascii(error.object[error.start])}") from None
    return item


def _csv_rows(file: Path, expected: str) -> Rows:
    # Readers of tables guess types, drop cells that are too many, or take the first column for a name of the row.
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_CELL))
    number = 0
    try:
        with file.open(encoding="utf-8-sig", newline="") as text:
            rows = (row for row in csv.reader(text, strict=True) if row)
            names = next(rows, [])
            if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
                raise DataError(f"{file}: the header has the column {twice[0]!r} twice")
            for number, row in enumerate(rows, start=1):
                yield number, partial(_csv_fields, names, row)
    except UnicodeDecodeError as error:
        raise DataError(f"{place(file, number + 1)}, or one soon after it, is not UTF-8") from error
    except csv.Error as error:
        raise DataError(f"{place(file, number + 1)} is not valid CSV: {error}") from error


def _csv_fields(names: list[str], row: list[str]) -> Fields:
    if len(row) != len(names):
        raise ValueError(f"{len(row)} cells, but the header has {len(names)} columns: {', '.join(map(repr, names))}")
    return dict(zip(names, row, strict=True))


def _parquet_rows(file: Path, expected: str) -> Rows:
    try:
        import datasets
        from pyarrow.parquet import read_metadata
    except ImportError as error:
        raise DataError(
            f"{file}: Parquet files are read with the package datasets, which is not installed: "
            'pip install "mrlhf[data]", or convert the file to JSONL'
        ) from error
    try:
        # Of a file without rows datasets makes batches of none, which it then refuses.
        if not file.stat().st_size or not read_metadata(file).num_rows:
            return
        # Streaming reads the file itself; otherwise a converted copy of it would be kept in the home directory.
        stream = datasets.load_dataset(
            "parquet", data_files=glob.escape(str(file.resolve())), split="train", streaming=True
        )
        for number, row in enumerate(stream, start=1):
            yield number, lambda row=row: {key: _without_nulls(value) for key, value in row.items()}  # type: ignore[misc]
    except Exception as error:
        raise DataError(f"{file} cannot be read as a Parquet file: {type(error).__name__}: {error}") from error


def _without_nulls(value: Any) -> Any:
    """Objects without the null fields that a table's schema gives to each of them."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


ROWS: dict[str, Callable[[Path, str], Rows]] = {".parquet": _parquet_rows, ".csv": _csv_rows}
"""Readers of the file suffixes that are not JSONL."""
