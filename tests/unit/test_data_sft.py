"""Rows of supervised fine-tuning: tokens, which of them are learned, and batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mrlhf.data.sft import SFTExample, load_sft, sft_batch
from mrlhf.data.stream import ExampleSet
from mrlhf.data.tokenizer import Tokenizer, load_tokenizer
from mrlhf.errors import DataError
from mrlhf.types import labels
from tests.unit.test_data_prompts import tokenizer as plain_tokenizer
from tests.unit.test_data_prompts import write
from tests.unit.test_data_tokenizer import byte_level_folder, llama_folder, llama_model  # noqa: F401
from tests.unit.text_tools import ChatBackend, UnstableBackend, chat, marked, say, text

TURNS = say("u:hi", "a:yes", "u:so", "a:no")


def load(tmp_path: Path, *rows: Any, tokenizer: Tokenizer | None = None, **options: Any) -> ExampleSet[SFTExample]:
    file = write(tmp_path / "d.jsonl", *map(json.dumps, rows))
    return load_sft(file, tokenizer or chat(), **{"max_length": 99, **options})


def one(tmp_path: Path, row: Any, **options: Any) -> tuple[str, str]:
    """The text of a row and what is learned of it."""
    example = load(tmp_path, row, **options).examples[0]
    return text(example.ids), marked(example.ids, example.learned)


@pytest.mark.parametrize(
    ("row", "whole", "learned"),
    [
        ({"prompt": "ab", "response": "cd"}, "abcd|", "..cd|"),
        ({"prompt": "ab", "response": "cd|"}, "abcd|", "..cd|"),
        ({"prompt": "ab|", "response": "cd"}, "ab|cd|", "...cd|"),
        ({"text": "abc"}, "abc|", ".bc|"),
        ({"text": "abc|"}, "abc|", ".bc|"),
        ({"prompt": say("u:hi"), "response": "yes"}, "[u]hi|[a]yes|", ".........yes|"),
        ({"messages": TURNS}, "[u]hi|[a]yes|[u]so|[a]no|", ".........yes|.........no|"),
        ({"messages": [*TURNS, *say("u:bye")]}, "[u]hi|[a]yes|[u]so|[a]no|", ".........yes|.........no|"),
        ({"messages": say("a:first")}, "[a]first|", "...first|"),
        ({"messages": TURNS[:2], "prompt": "x", "response": "y", "text": "z"}, "[u]hi|[a]yes|", ".........yes|"),
        ({"messages": None, "prompt": "x", "response": "y", "source": 3}, "xy|", ".y|"),
    ],
)
def test_what_is_learned(tmp_path: Path, row: Any, whole: str, learned: str) -> None:
    assert one(tmp_path, row) == (whole, learned)
    # All but the first token, which nothing predicts; a conversation then goes on to its last message.
    everything, all_learned = one(tmp_path, row, learn_on="all")
    assert everything.startswith(whole)
    assert all_learned == "." + everything[1:]


def test_what_a_template_puts_after_a_turn_is_kept_between_turns_and_never_learned(tmp_path: Path) -> None:
    tokenizer = chat(ChatBackend(after="\n"))
    assert one(tmp_path, {"messages": TURNS}, tokenizer=tokenizer) == (
        "[u]hi|\n[a]yes|\n[u]so|\n[a]no|",
        "..........yes|...........no|",
    )
    assert one(tmp_path, {"prompt": say("u:hi"), "response": "yes"}, tokenizer=tokenizer)[0] == "[u]hi|\n[a]yes|"
    assert one(tmp_path, {"messages": TURNS[:2]}, tokenizer=tokenizer, learn_on="all")[0] == "[u]hi|\n[a]yes|"


def test_a_template_without_an_end_id_gets_one_at_the_end(tmp_path: Path) -> None:
    tokenizer = chat(ChatBackend(end=";"))
    assert one(tmp_path, {"messages": TURNS}, tokenizer=tokenizer) == (
        "[u]hi;[a]yes;[u]so;[a]no;|",
        ".........yes;.........no;|",
    )


def test_an_unstable_template_is_refused_with_the_line(tmp_path: Path) -> None:
    tokenizer = chat(UnstableBackend())
    short, long = {"messages": TURNS[:2]}, {"messages": TURNS}
    with pytest.raises(DataError, match=r"d\.jsonl:2: the chat template does not write.*message 1 .*chat_template"):
        load(tmp_path, short, long, tokenizer=tokenizer)
    data = load(tmp_path, short, long, tokenizer=tokenizer, skip_bad_lines=True)
    assert (len(data), data.skipped) == (1, 1)
    assert one(tmp_path, long, tokenizer=tokenizer, learn_on="all")[0] == "[u]hi|[u]so|[a]no|"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a"}, "expected the fields 'prompt' and 'response', or 'messages', or 'text'; .* are: 'prompt'"),
        ({"prompt": "a", "response": 3}, "'response' is a number, expected a string"),
        ({"prompt": "a", "response": ""}, "'response' is an empty string"),
        ({"prompt": "", "response": "b"}, "'prompt' is an empty string"),
        ({"prompt": [{"role": "user"}], "response": "b"}, r"prompt\[0\] is not a chat message"),
        ({"prompt": [{"role": "user", "content": None}], "response": "b"}, r"prompt\[0\]: 'content' is null"),
        ({"messages": [{"role": "assistant", "content": 3}]}, r"messages\[0\]: 'content' is a number"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "'messages' has no answer with text"),
        ({"messages": "hi"}, "'messages' is a string, expected a list"),
        ({"messages": []}, "'messages' is an empty list"),
        ({"messages": say("u:hi")}, "'messages' has no message from the assistant"),
        ({"text": ["a"]}, "'text' is a list, expected a string"),
        ({"text": "|"}, "no token of the row is learned"),
    ],
)
def test_bad_rows(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"d\.jsonl:2: {message}"):
        load(tmp_path, {"text": "good"}, row)
    assert load(tmp_path, {"text": "good"}, row, skip_bad_lines=True).skipped == 1


def test_other_field_names(tmp_path: Path) -> None:
    row = {"question": "ab", "answer": "cd", "prompt": 1}
    assert one(tmp_path, row, prompt_key="question", response_key="answer")[0] == "abcd|"
    assert one(tmp_path, {"chat": TURNS[:2]}, messages_key="chat")[0] == "[u]hi|[a]yes|"
    assert one(tmp_path, {"body": "x"}, text_key="body")[0] == "x|"


def test_over_long_rows(tmp_path: Path) -> None:
    rows = [
        {"prompt": "ab", "response": "cd"},
        {"prompt": "ab", "response": "cde"},
        {"prompt": "abcde", "response": "f"},
    ]
    with pytest.raises(DataError, match=r"d\.jsonl:2: the row has 6 tokens, data\.max_length is 5; raise it"):
        load(tmp_path, *rows, max_length=5)
    dropped = load(tmp_path, *rows, max_length=5, overlong="drop")
    assert ([e.line for e in dropped.examples], dropped.dropped, dropped.truncated) == ([1], 2, 0)
    cut = load(tmp_path, *rows, max_length=5, overlong="truncate")
    assert [marked(e.ids, e.learned) for e in cut.examples] == ["..cd|", "..cde"]  # the third has nothing to learn
    assert (cut.dropped, cut.truncated) == (1, 1)
    with pytest.raises(DataError, match=r"no row is left: 3 are longer than data\.max_length=2"):
        load(tmp_path, *rows, max_length=2, overlong="truncate")
    with pytest.raises(ValueError, match="overlong must be one of error, drop, truncate, not 'keep_last'"):
        load(tmp_path, *rows, overlong="keep_last")
    with pytest.raises(ValueError, match="learn_on must be one of response, all"):
        load(tmp_path, *rows, learn_on="answer")


def test_several_files_and_the_fingerprint(tmp_path: Path) -> None:
    first, second = write(tmp_path / "1.jsonl", '{"text": "a"}'), write(tmp_path / "2.jsonl", "", '{"text": "b"}', "x")
    with pytest.raises(DataError, match=r"2\.jsonl:3: not valid JSON"):
        load_sft([first, second], chat(), max_length=9)
    data = load_sft([first, second], chat(), max_length=9, skip_bad_lines=True)
    assert ([text(e.ids) for e in data.examples], data.skipped) == (["a|", "b|"], 1)
    swapped = load_sft([second, first], chat(), max_length=9, skip_bad_lines=True)
    assert swapped.fingerprint != data.fingerprint
    assert load_sft([first, second], chat(), max_length=9, skip_bad_lines=True).fingerprint == data.fingerprint


def test_e7_messages_without_a_template(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"set tokenizer\.chat_template"):
        load(tmp_path, {"text": "a"}, {"messages": TURNS}, tokenizer=plain_tokenizer(), skip_bad_lines=True)
    assert load(tmp_path, {"text": "a"}, tokenizer=plain_tokenizer()).examples[0].ids == [97, 0]


def test_no_end_id(tmp_path: Path) -> None:
    class Endless(ChatBackend):
        eos_id = None
        pad_id = 5

    with pytest.raises(DataError, match="defines no end-of-sequence token"):
        load(tmp_path, {"text": "a"}, tokenizer=chat(Endless()), skip_bad_lines=True)


def test_e3_batches_mask_by_example_not_by_pad_id() -> None:
    # pad 2 is also the end id: [5, 6, 2] then padding.
    examples = [SFTExample([4, 5, 6, 2], [False, True, True, True], 1), SFTExample([4, 5, 2], [False, False, True], 2)]
    batch = sft_batch(examples, pad_id=2, pad_to_multiple=4, first_id=6)
    assert batch.tokens.tolist() == [[4, 5, 6, 2, 2, 2, 2, 2], [4, 5, 2, 2, 2, 2, 2, 2]]
    assert batch.response_mask is not None
    assert batch.response_mask.int().tolist() == [[1, 1, 1, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0]]
    assert (batch.prompt_lengths.tolist(), batch.response_lengths.tolist()) == ([1, 2], [3, 1])
    assert (batch.sample_ids.tolist(), batch.group_ids.tolist()) == ([6, 7], [6, 7])


def test_batches_of_conversations(tmp_path: Path) -> None:
    examples = load(tmp_path, {"messages": TURNS}, {"text": "xyz"}).examples
    batch = sft_batch(examples, pad_id=0)
    assert batch.response_mask is not None
    learned = [text(labels(batch.tokens)[row][batch.response_mask[row]].tolist()) for row in range(2)]
    assert learned == ["yes|no|", "yz|"]
    torch.testing.assert_close(batch.lengths, torch.tensor([25, 4]))
    assert sft_batch(examples, pad_id=0, pad_to_multiple=8).trim().width == 32


CHATML = (
    "{{ bos_token }}{% for m in messages %}<|header|>{{ m['role'] }}\n{{ m['content'] }}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant\n{% endif %}"
)


def test_e5_a_hugging_face_chat_has_one_bos_and_its_own_end_ids(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path / "hf")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')  # <|end|>, <|eot|>
    tokenizer = load_tokenizer(folder, CHATML)
    example = load(tmp_path, {"messages": TURNS}, tokenizer=tokenizer).examples[0]
    assert example.ids.count(tokenizer.bos_id) == 1
    assert example.ids[-1] == 2
    assert 1 not in example.ids
    learned = [i for i, flag in zip(example.ids, example.learned, strict=True) if flag]
    assert tokenizer.decode(learned, skip_special_tokens=False) == "yes<|eot|>no<|eot|>"
    # What is not learned is, up to the first answer, what generation starts from.
    prompt = tokenizer.encode_messages(TURNS[:1])
    assert example.ids[: len(prompt)] == prompt
    assert not any(example.learned[: len(prompt)])
    for row in ({"prompt": "cat", "response": " dog"}, {"text": "cat dog"}, {"text": "<|begin|>cat dog<|end|>"}):
        ids = load(tmp_path, row, tokenizer=tokenizer).examples[0].ids
        assert ids == [0, *tokenizer.encode("cat dog")[1:], 1]


def test_e9_answers_are_the_same_ids_from_sentencepiece_and_hugging_face(
    tmp_path: Path,
    llama_model: Path,  # noqa: F811
    llama_folder: Path,  # noqa: F811
) -> None:
    file, folder = load_tokenizer(llama_model), load_tokenizer(llama_folder)
    rows = [
        {"prompt": "Hello", "response": " world"},
        {"prompt": "Hello ", "response": "world"},  # the blank is the prompt's, so the answer has no token for it
        {"prompt": "wor", "response": "ld the cat"},
        {"prompt": "the cat", "response": "\n\nsat"},
        {"prompt": "a", "response": "<s>b</s>"},
    ]
    one_way, other = (load(tmp_path, *rows, tokenizer=t).examples for t in (file, folder))
    assert [(e.ids, e.learned) for e in one_way] == [(e.ids, e.learned) for e in other]
    for row, example in zip(rows, one_way, strict=True):
        prompt = file.encode(row["prompt"])
        assert example.ids[: len(prompt)] == prompt
        assert example.learned == [False] * len(prompt) + [True] * (len(example.ids) - len(prompt))
        assert example.ids[-1] == 2
        assert example.ids[len(prompt) :].count(2) == 1
    assert file.pieces(one_way[0].ids) == ["<s>", "\u2581Hello", "\u2581world", "</s>"]
    assert file.decode(one_way[1].ids) == "Hello world"
    assert file.decode(one_way[2].ids) == "world the cat"
