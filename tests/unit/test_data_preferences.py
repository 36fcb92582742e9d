"""Preference pairs: tokens of both answers, refusals, and rows of batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mrlhf.data.preferences import PreferenceExample, load_preferences, pair_batch
from mrlhf.data.stream import ExampleSet
from mrlhf.data.tokenizer import Tokenizer, load_tokenizer
from mrlhf.errors import DataError
from tests.unit.test_data_prompts import tokenizer as plain_tokenizer
from tests.unit.test_data_prompts import write
from tests.unit.test_data_sft import CHATML
from tests.unit.test_data_tokenizer import byte_level_folder
from tests.unit.text_tools import ChatBackend, chat, say, text


def load(
    tmp_path: Path, *rows: Any, tokenizer: Tokenizer | None = None, **options: Any
) -> ExampleSet[PreferenceExample]:
    file = write(tmp_path / "d.jsonl", *map(json.dumps, rows))
    return load_preferences(file, tokenizer or chat(), **{"max_length": 99, **options})


def pair(chosen: Any, rejected: Any, **other: Any) -> dict[str, Any]:
    return {"chosen": chosen, "rejected": rejected, **other}


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        (pair("yes", "no", prompt="ab"), ("ab", "yes|", "no|")),
        (pair("yes|", "no", prompt="ab", margin=2), ("ab", "yes|", "no|")),
        (pair("yes", "no", prompt=say("u:hi")), ("[u]hi|[a]", "yes|", "no|")),
        (pair(say("u:hi", "a:yes"), say("u:hi", "a:no")), ("[u]hi|[a]", "yes|", "no|")),
        (
            pair(say("s:x", "u:hi", "a:o", "u:so", "a:yes"), say("s:x", "u:hi", "a:o", "u:so", "a:no"), prompt="hi"),
            ("[s]x|[u]hi|[a]o|[u]so|[a]", "yes|", "no|"),
        ),
        (pair(say("a:yes"), say("a:no"), prompt="hi"), ("[u]hi|[a]", "yes|", "no|")),
        (pair(say("a:yes"), say("a:no"), prompt=say("s:x", "u:hi")), ("[s]x|[u]hi|[a]", "yes|", "no|")),
    ],
)
def test_forms_of_a_pair(tmp_path: Path, row: Any, parts: tuple[str, str, str]) -> None:
    example = load(tmp_path, row).examples[0]
    assert (text(example.prompt_ids), text(example.chosen_ids), text(example.rejected_ids)) == parts
    assert example.margin == row.get("margin", 0)
    after = load(tmp_path, row, tokenizer=chat(ChatBackend(after="\n"))).examples[0]
    assert text(after.chosen_ids) == "yes|"


CONVERSATION = say("u:hi", "a:yes")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "no field 'rejected', expected"),
        ({"prompt": "a"}, "no field 'chosen' and 'rejected', expected"),
        (pair("b", "c"), "no field 'prompt', expected"),
        (pair("b", None, prompt="a"), "no field 'rejected'"),
        (pair("b", 3, prompt="a"), "'chosen' is a string and 'rejected' is a number"),
        (pair(2, 3, prompt="a"), "'chosen' is a number, expected a string"),
        (pair("b", "", prompt="a"), "'rejected' is an empty string"),
        (pair("b", "c", prompt=""), "'prompt' is an empty string"),
        (pair("b", "b", prompt="a"), "'chosen' and 'rejected' are the same, so neither is better"),
        (pair("b", "b|", prompt="a"), "the two answers have the same tokens"),
        (pair(CONVERSATION, CONVERSATION), "the two conversations are the same"),
        (
            pair(CONVERSATION, say("u:ho", "a:no")),
            "the two conversations, of 2 and 2 messages, must have the same messages but for the last",
        ),
        (pair(CONVERSATION, [*CONVERSATION, *say("u:so", "a:no")]), "the two conversations, of 2 and 4 messages"),
        (pair(say("a:yes"), say("a:no")), "the two conversations, of 1 and 1 messages"),
        (pair(CONVERSATION, say("u:hi", "u:no")), "the last message must be from the assistant, not from 'user'"),
        (pair(CONVERSATION, ["no"]), r"rejected\[0\] is not a chat message"),
        (pair("b", "c", prompt="a", margin="big"), "'margin' is 'big', expected a finite number"),
        (pair("b", "c", prompt="a", margin=True), "'margin' is True"),
        (pair("b", "c", prompt="a", margin=float("nan")), "'margin' is nan"),
        (pair("b", "c", prompt="a", margin=1e300), "'margin' is 1e[+]300"),
    ],
)
def test_bad_rows(tmp_path: Path, row: Any, message: str) -> None:
    good = pair("b", "c", prompt="a")
    with pytest.raises(DataError, match=rf"d\.jsonl:2: {message}"):
        load(tmp_path, good, row)
    data = load(tmp_path, good, row, skip_bad_lines=True)
    assert (len(data), data.skipped) == (1, 1)


def test_over_long_pairs(tmp_path: Path) -> None:
    rows = [
        pair("cd", "e", prompt="ab"),
        pair("cde", "f", prompt="ab"),
        pair("cdefg", "cdexy", prompt="ab"),  # the same once cut to five
        pair("f", "gh", prompt="abcde"),
    ]
    with pytest.raises(DataError, match=r"d\.jsonl:2: the longer answer ends at token 6, data\.max_length is 5; raise"):
        load(tmp_path, *rows, max_length=5)
    dropped = load(tmp_path, *rows, max_length=5, overlong="drop")
    assert ([e.line for e in dropped.examples], dropped.dropped, dropped.truncated) == ([1], 3, 0)
    cut = load(tmp_path, *rows, max_length=5, overlong="truncate")
    assert [(text(e.chosen_ids), text(e.rejected_ids)) for e in cut.examples] == [("cd|", "e|"), ("cde", "f|")]
    assert (cut.dropped, cut.truncated) == (2, 1)
    with pytest.raises(DataError, match="no pair is left: 4 are longer"):
        load(tmp_path, *rows, max_length=2, overlong="drop")
    with pytest.raises(ValueError, match="error, drop, truncate, not 'keep_last'"):
        load(tmp_path, *rows, overlong="keep_last")


def test_other_field_names_and_the_fingerprint(tmp_path: Path) -> None:
    row = {"q": "a", "good": "b", "bad": "c", "gap": 0.5}
    names = {"prompt_key": "q", "chosen_key": "good", "rejected_key": "bad", "margin_key": "gap"}
    data = load(tmp_path, row, **names)
    assert data.examples == [PreferenceExample([97], [98, 124], [99, 124], 0.5, 1)]
    assert load(tmp_path, row, **names).fingerprint == data.fingerprint
    assert load(tmp_path, row | {"gap": 1}, **names).fingerprint != data.fingerprint


def test_e7_messages_without_a_template(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"set tokenizer\.chat_template"):
        load(tmp_path, pair(CONVERSATION, say("u:hi", "a:no")), tokenizer=plain_tokenizer(), skip_bad_lines=True)


def test_e3_pairs_are_neighbouring_rows() -> None:
    # 2 is the end id and the pad id.
    examples = [
        PreferenceExample([5, 6], [7, 2], [8, 9, 2], 1.5, 1),
        PreferenceExample([5], [2], [6, 2], 0.0, 2),
    ]
    batch = pair_batch(examples, pad_id=2, pad_to_multiple=2, first_id=3)
    assert batch.tokens.tolist() == [[5, 6, 7, 2, 2, 2], [5, 6, 8, 9, 2, 2], [5, 2, 2, 2, 2, 2], [5, 6, 2, 2, 2, 2]]
    assert batch.response_mask is not None
    assert batch.margins is not None
    assert batch.response_mask.int().tolist() == [[0, 1, 1, 0, 0], [0, 1, 1, 1, 0], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]
    assert batch.margins.tolist() == [1.5, 1.5, 0, 0]
    assert (batch.group_ids.tolist(), batch.sample_ids.tolist()) == ([3, 3, 4, 4], [6, 7, 8, 9])
    assert batch.select([2, 3]).margins.tolist() == [0, 0]  # type: ignore[union-attr]


def test_e5_one_bos_and_one_end_id_with_a_hugging_face_template(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path / "hf")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    tokenizer = load_tokenizer(folder, CHATML)
    example = load(tmp_path, pair(CONVERSATION, say("u:hi", "a:no")), tokenizer=tokenizer).examples[0]
    assert example.prompt_ids == tokenizer.encode_messages(CONVERSATION[:1])
    assert example.prompt_ids.count(0) == 1
    said = [tokenizer.decode(ids, skip_special_tokens=False) for ids in (example.chosen_ids, example.rejected_ids)]
    assert said == ["yes<|eot|>", "no<|eot|>"]
    plain = load(tmp_path, pair(" dog", " fox", prompt="cat"), tokenizer=tokenizer).examples[0]
    assert plain.prompt_ids + plain.chosen_ids == [*tokenizer.encode("cat dog"), 1]
