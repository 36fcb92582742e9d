"""Prompt files, over-long prompts, and the stream of global batches."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mrlhf.data.prompts import (
    Prompt,
    PromptDataset,
    PromptStream,
    encode_prompts,
    load_prompts,
    read_prompts,
    shard,
)
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.errors import DataError


class CharacterBackend:
    """One id per character: a complete tokenizer that needs no file."""

    vocab_size = 0x110000
    bos_id = None
    eos_id: int | None = 0
    pad_id = None
    chat_template = None

    def __init__(self, prefix: Sequence[int] = ()):
        self.prefix = list(prefix)

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(i) for i in ids)

    def pieces(self, ids: list[int]) -> list[str]:
        return [chr(i) for i in ids]

    def render(self, messages: Any, template: str, add_generation_prompt: bool) -> str:
        return template + "".join(m["content"] for m in messages) + ">" * add_generation_prompt


def tokenizer(template: str | None = None) -> Tokenizer:
    return Tokenizer(CharacterBackend(), "characters", template)


def write(path: Path, *lines: str | bytes) -> Path:
    path.write_bytes(b"\n".join(x.encode() if isinstance(x, str) else x for x in lines))
    return path


def test_reads_strings_and_messages(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    file = write(
        tmp_path / "p.jsonl",
        b"\xef\xbb\xbf" + json.dumps({"prompt": "one\u2028two", "answer": 3}, ensure_ascii=False).encode(),
        "",
        json.dumps({"prompt": messages, "source": {"a": 1}}) + "\r",
        "",
    )
    records, skipped = read_prompts(file)
    assert skipped == 0
    assert [(r.prompt, r.meta, r.line) for r in records] == [
        ("one\u2028two", {"answer": 3}, 1),
        (messages, {"source": {"a": 1}}, 3),
    ]
    with pytest.raises(DataError, match=r"p\.jsonl:1: no field 'question' \(data\.prompt_key\).*'prompt', 'answer'"):
        read_prompts(file, prompt_key="question")


def test_e1_malformed_lines_are_named_by_physical_line(tmp_path: Path) -> None:
    file = write(tmp_path / "p.jsonl", '{"prompt": "good"}', "", '{"prompt": "cut', '["a"]')
    with pytest.raises(DataError) as caught:
        read_prompts(file)
    message = str(caught.value)
    assert message.startswith(f"2 malformed line(s) in {file}")
    third, fourth = message.splitlines()[1:]
    assert f"{file}:3: not valid JSON" in third
    assert 'expected {"prompt": "..."}' in third
    assert f"{file}:4: not an object but a list" in fourth
    records, skipped = read_prompts(file, skip_bad_lines=True)
    assert ([r.prompt for r in records], skipped) == (["good"], 2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x"}', "no field 'prompt'"),
        ('{"prompt": 3}', "'prompt' is a number, expected a string or a list"),
        ('{"prompt": null}', "'prompt' is null"),
        ('{"prompt": ""}', "'prompt' is an empty string"),
        ('{"prompt": []}', "'prompt' is an empty list"),
        ('{"prompt": ["a"]}', r"prompt\[0\] is not a chat message"),
        ('{"prompt": [{"role": "user", "content": "a"}, {"content": "a"}]}', r"prompt\[1\] is not a chat message"),
        ("true", "not an object but a boolean"),
        (b'{"prompt": "\xff"}', "not UTF-8 at byte 12"),
        (r'{"prompt": "a \ud83d b"}', r"holds half of a surrogate pair, '\\ud83d'"),
        (r'{"prompt": "a", "gold": "\udc00"}', r"holds half of a surrogate pair, '\\udc00'"),
    ],
)
def test_bad_lines(tmp_path: Path, line: str | bytes, message: str) -> None:
    file = write(tmp_path / "p.jsonl", '{"prompt": "good"}', line)
    with pytest.raises(DataError, match=rf"p\.jsonl:2: {message}"):
        read_prompts(file)
    assert read_prompts(file, skip_bad_lines=True)[1] == 1


def test_many_bad_lines_give_a_short_message(tmp_path: Path) -> None:
    file = write(tmp_path / "p.jsonl", *["x"] * 50)
    with pytest.raises(DataError, match="50 malformed") as caught:
        read_prompts(file)
    assert len(str(caught.value).splitlines()) == 11


@pytest.mark.parametrize("content", ["", "\n\n", "\ufeff\n"])
def test_an_empty_file_is_an_error(tmp_path: Path, content: str) -> None:
    file = write(tmp_path / "p.jsonl", content)
    with pytest.raises(DataError, match="holds no prompt"):
        read_prompts(file)


def test_missing_and_all_bad_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.jsonl does not exist"):
        read_prompts(tmp_path / "gone.jsonl")
    file = write(tmp_path / "p.jsonl", "x")
    with pytest.raises(DataError, match=r"holds no prompt.*1 malformed line\(s\) were skipped"):
        read_prompts(file, skip_bad_lines=True)


def prompt_file(path: Path, *prompts: Any) -> Path:
    return write(path, *(json.dumps({"prompt": p, "n": i}) for i, p in enumerate(prompts)))


def test_d11_over_long_prompts(tmp_path: Path) -> None:
    long = "".join(chr(1000 + i) for i in range(558))
    file = prompt_file(tmp_path / "p.jsonl", "short", long, "x" * 512)

    def load(overlong: Any) -> PromptDataset:
        return load_prompts(file, tokenizer(), max_prompt_length=512, overlong=overlong)

    with pytest.raises(DataError, match=r"p\.jsonl:2: the prompt has 558 tokens, data\.max_prompt_length is 512"):
        load("error")
    dropped = load("drop")
    assert (len(dropped), dropped.dropped, dropped.truncated) == (2, 1, 0)
    assert [p.meta["n"] for p in dropped.prompts] == [0, 2]
    kept = load("keep_last")
    assert (len(kept), kept.dropped, kept.truncated) == (3, 0, 1)
    assert kept.prompts[1].ids == [ord(c) for c in long[-512:]]
    assert kept.prompts[1].text == long[-512:]  # what a reward function sees is what the model saw
    assert kept.prompts[0] == Prompt([ord(c) for c in "short"], "short", {"n": 0}, 1)
    with pytest.raises(ValueError, match="error, drop, keep_last, not 'cut'"):
        load("cut")


def test_dropping_everything_is_an_error(tmp_path: Path) -> None:
    file = prompt_file(tmp_path / "p.jsonl", "abc", "abcd")
    with pytest.raises(DataError, match="all 2 prompts are longer"):
        load_prompts(file, tokenizer(), max_prompt_length=2, overlong="drop")


def test_e7_messages_need_a_template_before_anything_is_encoded(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    file = prompt_file(tmp_path / "p.jsonl", "text", messages)
    with pytest.raises(DataError, match=r"set tokenizer\.chat_template"):
        load_prompts(file, tokenizer(), max_prompt_length=9)
    prompts = load_prompts(file, tokenizer("%"), max_prompt_length=9).prompts
    assert [p.text for p in prompts] == ["text", "%hi>"]
    assert prompts[1].ids == [ord(c) for c in "%hi>"]
    strings = prompt_file(tmp_path / "s.jsonl", "text")
    assert load_prompts(strings, tokenizer(), max_prompt_length=9).prompts[0].text == "text"


def dataset(tmp_path: Path, count: int = 10, name: str = "p") -> PromptDataset:
    file = prompt_file(tmp_path / f"{name}.jsonl", *(f"{name}{i}" for i in range(count)))
    records, _ = read_prompts(file)
    return encode_prompts(records, tokenizer(), max_prompt_length=9)


def numbers(batch: Any) -> list[int]:
    return [s.prompt.meta["n"] for s in batch]


def test_the_fingerprint_follows_content_and_order(tmp_path: Path) -> None:
    data = dataset(tmp_path)
    assert dataset(tmp_path).fingerprint == data.fingerprint
    assert dataset(tmp_path, 9).fingerprint != data.fingerprint
    assert dataset(tmp_path, name="q").fingerprint != data.fingerprint
    records, _ = read_prompts(prompt_file(tmp_path / "p.jsonl", "a", "b"))
    fingerprints = {encode_prompts(r, tokenizer(), max_prompt_length=9).fingerprint for r in (records, records[::-1])}
    assert len(fingerprints) == 2


def test_every_epoch_is_a_new_order_of_all_prompts(tmp_path: Path) -> None:
    data = dataset(tmp_path)
    stream = PromptStream(data, seed=1, batch_size=4)
    seen = [n for _ in range(5) for n in numbers(next(stream))]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]
    assert seen[:10] != list(range(10))
    assert stream.epoch == 2
    again = PromptStream(data, seed=1, batch_size=10)
    assert [n for _ in range(2) for n in numbers(next(again))] == seen  # the batch size does not change the order
    other = PromptStream(data, seed=2, batch_size=10)
    assert numbers(next(other)) != seen[:10]
    straight = PromptStream(data, seed=1, batch_size=25, shuffle=False)
    assert numbers(next(straight)) == [*range(10), *range(10), *range(5)]


def test_sample_and_group_ids_are_global(tmp_path: Path) -> None:
    stream = PromptStream(dataset(tmp_path), seed=1, batch_size=2, samples_per_prompt=3)
    first, second = next(stream), next(stream)
    assert [s.sample_id for s in first + second] == list(range(12))
    assert [s.group_id for s in first + second] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert len({s.prompt.text for s in first[:3]}) == 1


def test_c11_a_resumed_stream_goes_on(tmp_path: Path) -> None:
    data = dataset(tmp_path)
    whole = numbers(next(PromptStream(data, seed=5, batch_size=10)))
    stream = PromptStream(data, seed=5, batch_size=2)
    for _ in range(2):
        next(stream)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = PromptStream(data, seed=5, batch_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.load_state_dict(state)
    batch = next(resumed)
    assert numbers(batch) == whole[4:6]
    assert [s.group_id for s in batch] == [4, 5]
    assert numbers(next(stream)) == whole[4:6]


def test_c11_another_data_set_starts_at_its_first_prompt(tmp_path: Path) -> None:
    stream = PromptStream(dataset(tmp_path), seed=5, batch_size=2)
    next(stream)
    other = dataset(tmp_path, name="q")
    resumed = PromptStream(other, seed=5, batch_size=2)
    with pytest.warns(UserWarning, match="not those of the checkpoint"):
        resumed.load_state_dict(stream.state_dict())
    assert numbers(next(resumed)) == numbers(next(PromptStream(other, seed=5, batch_size=2)))


def test_another_seed_keeps_the_order_of_the_checkpoint(tmp_path: Path) -> None:
    data = dataset(tmp_path)
    stream = PromptStream(data, seed=5, batch_size=2)
    next(stream)
    resumed = PromptStream(data, seed=6, batch_size=2)
    next(resumed)
    with pytest.warns(UserWarning, match="seed 5.*seed 6"):
        resumed.load_state_dict(stream.state_dict())
    assert numbers(next(resumed)) == numbers(next(stream))


def test_shards_keep_groups_whole(tmp_path: Path) -> None:
    batch = next(PromptStream(dataset(tmp_path), seed=1, batch_size=4, samples_per_prompt=2))
    parts = [shard(batch, rank, 2, samples_per_prompt=2) for rank in range(2)]
    assert parts[0] + parts[1] == batch
    assert {s.group_id for s in parts[0]} == {0, 1}
    assert shard(batch, 0, 1) == batch
    for size, samples in ((3, 2), (8, 2), (2, 3)):
        with pytest.raises(ValueError, match="cannot be shared out evenly"):
            shard(batch, 0, size, samples_per_prompt=samples)


def test_stream_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one prompt"):
        PromptStream(PromptDataset([], ""), seed=0, batch_size=1)
    with pytest.raises(ValueError, match="batch_size=0"):
        PromptStream(dataset(tmp_path), seed=0, batch_size=0)
