"""`mrlhf tokenizer train`, and the agreement of vocabularies."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mrlhf.cli import app
from mrlhf.data.tokenizer import load_tokenizer
from mrlhf.data.tokenizer_training import train_tokenizer
from mrlhf.data.vocabulary import check_same_vocabulary, read_vocabulary
from mrlhf.errors import ConfigError, DataError
from tests.unit.test_data_tokenizer import MESSAGES, TEXTS, WORDS, byte_level_folder, llama_model  # noqa: F401

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = random.Random(0)
    file = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    file.write_text("\n\n".join(" ".join(generator.choice(WORDS) for _ in range(8)) for _ in range(300)))
    return file


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["tokenizer", "train", *map(str, arguments)])
    return result.exit_code, result.output


@pytest.mark.parametrize(("model_type", "size"), [("bpe", 350), ("unigram", 308)])
def test_the_folder_is_read_by_mrlhf_and_by_transformers(
    corpus: Path, tmp_path: Path, model_type: str, size: int
) -> None:
    from transformers import AutoTokenizer

    folder, template = tmp_path / "tokenizer", tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    special = ["--special-token", "<|user|>", "--special-token", "<|assistant|>"]
    options = ["--vocab-size", str(size), "--output", folder, "--chat-template", template, "--model-type", model_type]
    options += special
    assert run(corpus, *options) == (0, f"{folder}: {size} ids\n")
    tokenizer, file = load_tokenizer(folder), load_tokenizer(folder / "tokenizer.model")
    for one in (tokenizer, file):
        assert (one.vocab_size, one.pad_id, one.bos_id, one.eos_ids) == (size, 0, 1, [2])
        assert one.pieces(range(6)) == ["<pad>", "<s>", "</s>", "<unk>", "<|user|>", "<|assistant|>"]
        ids = one.encode_messages(MESSAGES)
        assert one.pieces(ids)[:2] == ["<s>", "<|user|>"]
        assert one.pieces(ids)[-2:] == ["</s>", "<|assistant|>"]
    generator = random.Random(1)
    parts = [*WORDS, " ", "  ", "\n", "\t", "7", "42", "\u20ac", "<s>", "</s>", "<|user|>", "<|user|", "\u2581", "x"]
    mixed = ["".join(generator.choice(parts) for _ in range(12)) for _ in range(200)]
    for text in [*TEXTS, "<|user|>Hello<|assistant|> x", *mixed]:
        assert tokenizer.encode(text) == file.encode(text)
        assert tokenizer.backend.encode_inside(text) == file.backend.encode_inside(text)
        assert tokenizer.decode(tokenizer.encode(text)) == file.decode(file.encode(text))
    assert file.decode(file.encode("caf\u00e9 \u4e16\u754c\n 42 zebra")) == "caf\u00e9 \u4e16\u754c\n 42 zebra"
    assert AutoTokenizer.from_pretrained(folder)("Hello world")["input_ids"] == file.encode("Hello world")

    status, text = run(corpus, *options)
    assert status == 2
    assert f"{folder} holds a tokenizer already (tokenizer.model)" in text
    before = (folder / "tokenizer.model").read_bytes()
    (folder / "tokenizer.json").write_text("of another tokenizer")
    assert run(corpus, *options, "--overwrite")[0] == 0
    assert (folder / "tokenizer.model").read_bytes() == before
    assert (folder / "tokenizer.json").exists() == (model_type == "unigram")
    assert load_tokenizer(folder).encode("Hello world") == file.encode("Hello world")


def test_unigram_from_jsonl(corpus: Path, tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    lines = corpus.read_text().split("\n\n")
    rows = [{"body": line} for line in lines[:200]] + [{"body": [{"role": "user", "content": x}]} for x in lines[200:]]
    file.write_text("\n".join(map(json.dumps, rows)))
    options = {"vocab_size": 308, "model_type": "unigram", "chat_template": TEMPLATE, "key": "body"}
    folder = train_tokenizer([file], tmp_path / "unigram", **options)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("the lazy dogs")) == "the lazy dogs"
    assert len(tokenizer.encode("the cat")) <= 4
    assert tokenizer.render(MESSAGES).startswith("<s><|user|>Hello world</s>")
    from_text = train_tokenizer([corpus], tmp_path / "text", **options)
    assert (from_text / "tokenizer.model").read_bytes() == (folder / "tokenizer.model").read_bytes()
    with pytest.raises(DataError, match=r"corpus\.jsonl:1: no field 'text' \(--key\); the fields are: 'body'"):
        train_tokenizer([file], tmp_path / "x", vocab_size=308)


def test_sizes_that_do_not_fit_name_the_limit(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "tokenizer"
    with pytest.raises(
        ConfigError, match=r"--vocab-size 9000 is too large for the corpus.*use at most (\d+)"
    ) as caught:
        train_tokenizer([corpus], output, vocab_size=9000)
    largest = int(str(caught.value).split("at most ")[1].split(",")[0])
    with pytest.raises(ConfigError, match="too small.*use at least (\\d+)") as caught:
        train_tokenizer([corpus], output, vocab_size=50)
    smallest = int(str(caught.value).split("at least ")[1].split(",")[0])
    assert not output.exists()
    for size in (smallest, largest):
        assert load_tokenizer(train_tokenizer([corpus], output, vocab_size=size, overwrite=True)).vocab_size == size
    train_tokenizer([corpus], output, vocab_size=50, byte_fallback=False, overwrite=True)


def test_lines_and_sizes_below_the_limits_of_sentencepiece(tmp_path: Path) -> None:
    corpus, output = tmp_path / "short.txt", tmp_path / "tokenizer"
    corpus.write_bytes(b"a b\nc\n\0\n")
    with pytest.raises(ConfigError, match="too small: the special tokens alone are 5; use more"):
        train_tokenizer([corpus], output, vocab_size=5, special_tokens=["<x>"])
    with pytest.raises(ConfigError, match=r"too small.*use at least (\d+)") as caught:
        train_tokenizer([corpus], output, vocab_size=6, special_tokens=["<x>"])
    size = int(str(caught.value).split("at least ")[1].split(",")[0])
    assert load_tokenizer(train_tokenizer([corpus], output, vocab_size=size)).vocab_size == size


def test_settings_that_sentencepiece_cannot_take(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'<0x41>' is the name of a byte"):
        train_tokenizer([corpus], tmp_path / "t", vocab_size=300, special_tokens=["<0x41>"])
    with pytest.raises(ConfigError, match="--character-coverage 0.5 must be from 0.98 to 1"):
        train_tokenizer([corpus], tmp_path / "t", vocab_size=300, character_coverage=0.5)


def test_a_folder_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    file = tmp_path / "corpus.txt"
    file.write_text("some text\n")
    for output in (file, file / "below"):
        status, text = run(file, "--vocab-size", "300", "--output", output)
        assert (status, "cannot be a folder" in text) == (2, True)
    assert run(tmp_path, "--vocab-size", "300", "--output", tmp_path / "t")[1].count("is not a file")


def test_bad_input(tmp_path: Path) -> None:
    empty, latin = tmp_path / "empty.txt", tmp_path / "latin.txt"
    empty.write_text("\n \n")
    latin.write_bytes(b"one\ncaf\xe9\n")
    for file, message in (
        (tmp_path / "gone.txt", r"gone\.txt does not exist"),
        (empty, "the corpus holds no text"),
        (latin, r"latin\.txt:2: not UTF-8"),
    ):
        with pytest.raises(DataError, match=message):
            train_tokenizer([file], tmp_path / "t", vocab_size=300)
    for tokens in (["<s>"], ["a b"], ["<x>", "<x>"]):
        with pytest.raises(ConfigError, match="--special-token"):
            train_tokenizer([latin], tmp_path / "t", vocab_size=300, special_tokens=tokens)
    with pytest.raises(DataError, match="neither Jinja source nor an existing file"):
        train_tokenizer([latin], tmp_path / "t", vocab_size=300, chat_template="gone.jinja")


def test_a_long_line_is_not_left_out(tmp_path: Path) -> None:
    file = tmp_path / "long.txt"
    file.write_text("short words\n" + "zebra " * 2000)
    tokenizer = load_tokenizer(train_tokenizer([file], tmp_path / "t", vocab_size=278))
    assert tokenizer.pieces(tokenizer.encode("zebra")) == ["<s>", "\u2581zebra"]


def test_vocabularies_that_agree(tmp_path: Path, llama_model: Path) -> None:  # noqa: F811
    from transformers import AutoTokenizer

    folder, fast, empty = tmp_path / "llama", tmp_path / "fast", tmp_path / "empty"
    folder.mkdir()
    empty.mkdir()
    shutil.copy(llama_model, folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "legacy": false}')
    AutoTokenizer.from_pretrained(folder).save_pretrained(fast)
    assert (fast / "tokenizer.json").is_file()
    assert read_vocabulary(folder) == read_vocabulary(fast) == read_vocabulary(folder / "tokenizer.model")
    extended = tmp_path / "extended"
    shutil.copytree(fast, extended)
    content = json.loads((fast / "tokenizer.json").read_text())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 400, "content": "[PAD]"})
    (extended / "tokenizer.json").write_text(json.dumps(content))
    assert read_vocabulary(empty) is None
    places = (empty, folder, fast, extended, tmp_path / "gone", folder / "tokenizer.model")
    check_same_vocabulary({f"model{i}.path": place for i, place in enumerate(places)})


def test_vocabularies_that_differ(corpus: Path, tmp_path: Path) -> None:
    one = train_tokenizer([corpus], tmp_path / "one", vocab_size=320)
    other = train_tokenizer([corpus], tmp_path / "other", vocab_size=320, special_tokens=["<|user|>"])
    with pytest.raises(ConfigError) as caught:
        check_same_vocabulary({"actor.path": one, "critic.path": tmp_path, "reward.sources[0].path": other})
    message = str(caught.value)
    assert f"reward.sources[0].path: {other} reads other token ids than actor.path: {one}" in message
    assert "id 4 is '<|user|>' here and '<0x00>' there" in message
    bytes_folder = byte_level_folder(tmp_path / "bytes")
    with pytest.raises(ConfigError, match=r"id 0 is '<\|begin\|>' here and '<pad>' there"):
        check_same_vocabulary({"actor.path": one, "reward.sources[0].path": bytes_folder})
    (bytes_folder / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(DataError, match=r"tokenizer\.json is not a tokenizer file"):
        check_same_vocabulary({"actor.path": one, "reward.sources[0].path": bytes_folder})
