"""Which tokenizer an export carries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrlhf.checkpoint.hf_folder import copy_companions


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model's folder with a tokenizer of its own."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("source")
    (folder / "generation_config.json").write_text("{}")
    (folder / "model.safetensors").write_text("weights")
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_sources_own_by_default(source: Path, target: Path) -> None:
    assert copy_companions(source, target) == ["tokenizer.json", "generation_config.json"]
    assert names(target) == ["generation_config.json", "tokenizer.json"]


def test_another_folders_tokenizer_takes_its_place_as_a_whole(source: Path, target: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer_config.json").write_text(json.dumps({"chat_template": "A", "model_max_length": 5}))
    (other / "generation_config.json").write_text("of the tokenizer's model")
    copy_companions(source, target, tokenizer=other, chat_template="A")
    assert names(target) == ["generation_config.json", "tokenizer_config.json"]
    assert (target / "generation_config.json").read_text() == "{}"
    assert (target / "tokenizer_config.json").read_bytes() == (other / "tokenizer_config.json").read_bytes()


def test_another_chat_template_replaces_the_tokenizers(source: Path, target: Path) -> None:
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": "A", "model_max_length": 5}))
    copied = copy_companions(source, target, chat_template="B")
    assert "chat_template.jinja" in copied
    assert (target / "chat_template.jinja").read_text() == "B"
    assert json.loads((target / "tokenizer_config.json").read_text()) == {"model_max_length": 5}


def test_a_sentencepiece_file_gets_the_name_by_which_it_is_found(source: Path, target: Path, tmp_path: Path) -> None:
    import sentencepiece

    from mrlhf.data.tokenizer import load_tokenizer

    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the sea is wide and the old trees stand in the wind\n" * 20)
    prefix = tmp_path / "pieces" / "mine"
    prefix.parent.mkdir()
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(prefix), vocab_size=40, hard_vocab_limit=False, minloglevel=2
    )
    model = prefix.with_suffix(".model")
    copy_companions(source, target, tokenizer=model, chat_template="{{ messages[0]['content'] }}")
    assert names(target) == ["chat_template.jinja", "generation_config.json", "tokenizer.model"]
    before, after = load_tokenizer(model), load_tokenizer(target)
    assert after.encode("the old sea") == before.encode("the old sea")
    assert after.render([{"role": "user", "content": "hi"}]) == "hi"
