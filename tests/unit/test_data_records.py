"""Rows of Parquet and CSV files, for every reader, and what JSONL has in common with them."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mrlhf.data.preferences import load_preferences
from mrlhf.data.prompts import load_prompts, read_prompts
from mrlhf.data.sft import load_sft
from mrlhf.errors import DataError
from tests.unit.test_data_prompts import tokenizer, write
from tests.unit.text_tools import chat, text

USER, REPLY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def csv_file(path: Path, *rows: list[str]) -> Path:
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows(rows)
    return path


def test_csv_cells_stay_the_text_they_are(tmp_path: Path) -> None:
    file = csv_file(
        tmp_path / "odd [1] name.csv", ["prompt", "gold"], ["007", "1.50"], ["NA", "null"], ['two\nlines, "so"', ""]
    )
    records, skipped = read_prompts(file)
    assert skipped == 0
    assert [(r.prompt, r.meta, r.line) for r in records] == [
        ("007", {"gold": "1.50"}, 1),
        ("NA", {"gold": "null"}, 2),
        ('two\nlines, "so"', {"gold": ""}, 3),
    ]


def test_parquet_keeps_strings_messages_and_numbers(tmp_path: Path) -> None:
    odd = {"role": "assistant", "content": "x", "name": "n"}
    file = parquet(tmp_path / "p.parquet", [{"prompt": [USER], "n": 1}, {"prompt": [USER, odd, USER], "n": None}])
    records, _ = read_prompts(file)
    assert [(r.prompt, r.meta, r.line) for r in records] == [
        ([USER], {"n": 1}, 1),  # the schema's null "name" is not part of the message
        ([USER, odd, USER], {"n": None}, 2),
    ]
    data = load_prompts(parquet(tmp_path / "s.parquet", [{"prompt": "ab"}]), tokenizer(), max_prompt_length=4)
    assert data.prompts[0].ids == [97, 98]


def test_e1_bad_rows_of_tables_are_named_by_row(tmp_path: Path) -> None:
    file = csv_file(tmp_path / "p.csv", ["prompt", "response"], ["a", "b"], ["c", ""], ["", "d"])
    with pytest.raises(DataError) as caught:
        load_sft(file, tokenizer(), max_length=9)
    assert [line.split(": ", 1)[1] for line in str(caught.value).splitlines()[1:]] == [
        "'response' is an empty string",
        "'prompt' is an empty string",
    ]
    assert f"{file}, row 2: 'response'" in str(caught.value)
    data = load_sft(file, tokenizer(), max_length=9, skip_bad_lines=True)
    assert (len(data), data.skipped) == (1, 2)
    table = parquet(tmp_path / "p.parquet", [{"prompt": "a", "chosen": "b", "rejected": c} for c in ("c", None, "b")])
    with pytest.raises(DataError) as caught:
        load_preferences(table, tokenizer(), max_length=9)
    assert f"{table}, row 2: no field 'rejected'" in str(caught.value)
    assert f"{table}, row 3: 'chosen' and 'rejected' are the same" in str(caught.value)
    with pytest.raises(DataError, match=r"p\.parquet, row 1: the longer answer ends at token 3"):
        load_preferences(table, tokenizer(), max_length=2, skip_bad_lines=True)
    with pytest.raises(DataError, match=r"p\.csv, row 2: no field 'question'"):
        read_prompts(csv_file(tmp_path / "p.csv", ["prompt"], ["a"], ["b"]), prompt_key="question")


def test_margins_of_tables(tmp_path: Path) -> None:
    rows = [["prompt", "chosen", "rejected", "margin"], ["a", "b", "c", "1.5"], ["a", "b", "d", ""]]
    from_csv = load_preferences(csv_file(tmp_path / "p.csv", *rows), tokenizer(), max_length=9)
    table = [dict(zip(rows[0], ["a", "b", c, m], strict=True)) for c, m in (("c", 1.5), ("d", None))]
    from_parquet = load_preferences(parquet(tmp_path / "p.parquet", table), tokenizer(), max_length=9)
    assert [e.margin for e in from_csv.examples] == [e.margin for e in from_parquet.examples] == [1.5, 0.0]
    assert from_csv.fingerprint == from_parquet.fingerprint


def test_parquet_conversations(tmp_path: Path) -> None:
    file = parquet(tmp_path / "p.parquet", [{"messages": [USER, REPLY], "prompt": None}])
    example = load_sft(file, chat(), max_length=99).examples[0]
    assert text(example.ids) == "[u]hi|[a]yes|"


@pytest.mark.parametrize("name", ["p.csv", "p.parquet"])
def test_unreadable_and_empty_tables(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=rf"{name} does not exist \(expected a file with one prompt a row\)"):
        read_prompts(tmp_path / name)
    file = tmp_path / name
    file.write_bytes(b"")
    with pytest.raises(DataError, match=rf"{name} holds no prompt: expected rows such as"):
        read_prompts(file)
    file.write_bytes(b'prompt\n"a\xff')
    with pytest.raises(DataError, match=rf"{name}(, row 1.* is not UTF-8| cannot be read as a Parquet file)"):
        read_prompts(file)


def test_a_parquet_file_without_rows(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "p.parquet")
    with pytest.raises(DataError, match=r"p\.parquet holds no prompt: expected rows such as"):
        read_prompts(tmp_path / "p.parquet")


def test_csv_rows_that_do_not_fit_the_header(tmp_path: Path) -> None:
    # Table readers take the first of too many cells for a name of the row, so that every column is the wrong one.
    file = csv_file(tmp_path / "p.csv", ["prompt", "response"], ["a", "b", "c"], ["a"], ["a", "b"])
    with pytest.raises(DataError) as caught:
        load_sft(file, tokenizer(), max_length=9)
    lines = str(caught.value).splitlines()[1:]
    assert [line.split(", ")[1] for line in lines] == ["row 1: 3 cells", "row 2: 1 cells"]
    loaded = load_sft(file, tokenizer(), max_length=9, skip_bad_lines=True)
    assert (len(loaded), loaded.skipped) == (1, 2)
    with pytest.raises(DataError, match=r"p\.csv: the header has the column 'prompt' twice"):
        read_prompts(csv_file(tmp_path / "p.csv", ["prompt", "prompt"], ["a", "b"]))
    long = read_prompts(csv_file(tmp_path / "p.csv", ["prompt"], ["x" * 200_000]))[0]
    assert len(long[0].prompt) == 200_000
    file.write_text('prompt\na\n"b\nc')
    with pytest.raises(DataError, match=r"p\.csv, row 2 is not valid CSV: unexpected end of data"):
        read_prompts(file)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = parquet(tmp_path / "p.parquet", [{"prompt": "a"}])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r'p\.parquet: Parquet files are .* the package datasets.*pip install "mrlhf\['):
        read_prompts(file)
    assert len(read_prompts(write(tmp_path / "p.jsonl", '{"prompt": "a"}'))[0]) == 1


@pytest.mark.parametrize("load", [load_sft, load_preferences])
def test_e1_malformed_jsonl_is_named_by_physical_line(tmp_path: Path, load: Any) -> None:
    good = {"prompt": "a", "response": "b", "chosen": "b", "rejected": "c"}
    file = write(tmp_path / "d.jsonl", json.dumps(good), "", '{"prompt": "cut', '["a"]')
    with pytest.raises(DataError) as caught:
        load(file, tokenizer(), max_length=9)
    third, fourth = str(caught.value).splitlines()[1:]
    assert f"{file}:3: not valid JSON" in third
    assert f"{file}:4: not an object but a list" in fourth
    data = load(file, tokenizer(), max_length=9, skip_bad_lines=True)
    assert (len(data), data.skipped, data.examples[0].line) == (1, 2, 1)
