"""Tokenizers: SentencePiece files and Hugging Face folders made on the spot."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from mrlhf.data.conversations import encode_conversation
from mrlhf.data.tokenizer import load_tokenizer, resolve_pad_id
from mrlhf.errors import DataError

CORPUS = "hello world Hello World the cat sat on a mat of the dogs and quick brown fox jumps over lazy"
WORDS = CORPUS.split()
TEXTS = [
    "Hello world",
    " Hello world",
    "  Hello world",
    "the  cat\n sat\t on",
    "caf\u00e9 \u4e16\u754c 42",
    " ",
    "",
    "<s>Hello world</s> the cat",
    "[INST] Hello [/INST]",
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Hello world"}]


@pytest.fixture(scope="module")
def llama_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model trained with Llama-2's settings."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("sentencepiece")
    generator = random.Random(0)
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(" ".join(generator.choice(WORDS) for _ in range(8)) for _ in range(500)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    return folder / "tokenizer.model"


def write_json(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


@pytest.fixture
def llama_folder(llama_model: Path, tmp_path: Path) -> Path:
    """The same tokenizer as a Hugging Face folder of a Llama."""
    folder = tmp_path / "llama"
    settings = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": True, "add_eos_token": False}
    write_json(folder / "tokenizer_config.json", settings | {"bos_token": "<s>", "eos_token": "</s>"})
    write_json(folder / "config.json", {"model_type": "llama", "vocab_size": 400, "eos_token_id": 2})
    shutil.copy(llama_model, folder)
    return folder


def byte_level_folder(folder: Path, *, bos: bool = True, **settings: Any) -> Path:
    """A byte-level BPE tokenizer that puts a BOS in front, as Llama 3 does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>", "<|eot|>", "<|header|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 5, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", 0)]
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<|begin|>", "eos_token": "<|end|>"} if bos else {"eos_token": "<|end|>"}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names, **settings})
    return folder


@pytest.mark.parametrize("text", TEXTS)
def test_e9_sentencepiece_file_and_hugging_face_folder_agree(llama_model: Path, llama_folder: Path, text: str) -> None:
    file, folder = load_tokenizer(llama_model), load_tokenizer(llama_folder)
    ids = file.encode(text)
    assert folder.encode(text) == ids
    assert file.decode(ids) == folder.decode(ids)
    assert file.pieces(ids) == folder.pieces(ids)
    assert (file.vocab_size, file.bos_id, file.eos_ids, file.pad_id) == (400, 1, [2], 2)
    assert (folder.vocab_size, folder.bos_id, folder.eos_ids, folder.pad_id) == (400, 1, [2], 2)


def test_e9_a_leading_space_is_a_token_of_its_own(llama_model: Path, llama_folder: Path) -> None:
    for tokenizer in (load_tokenizer(llama_model), load_tokenizer(llama_folder)):
        plain, spaced = tokenizer.encode("Hello world"), tokenizer.encode(" Hello world")
        assert tokenizer.pieces(plain) == ["<s>", "\u2581Hello", "\u2581world"]
        assert tokenizer.pieces(spaced) == ["<s>", "\u2581", "\u2581Hello", "\u2581world"]


def test_e9_plain_text_equals_sentencepiece_itself(llama_model: Path) -> None:
    import sentencepiece

    reference = sentencepiece.SentencePieceProcessor(model_file=str(llama_model))
    tokenizer = load_tokenizer(llama_model)
    for text in TEXTS:
        if "<s>" not in text:
            assert tokenizer.encode(text) == [1, *reference.encode(text)]


def test_a_folder_with_only_a_sentencepiece_model(llama_model: Path, tmp_path: Path) -> None:
    shutil.copy(llama_model, tmp_path / "tokenizer.model")
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [2, 7]})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("Hello world") == load_tokenizer(llama_model).encode("Hello world")
    assert tokenizer.eos_ids == [2, 7]


@pytest.mark.parametrize("kind", ["file", "llama", "byte_level"])
def test_e5_exactly_one_bos(kind: str, llama_model: Path, llama_folder: Path, tmp_path: Path) -> None:
    path = {"file": llama_model, "llama": llama_folder, "byte_level": tmp_path / "bytes"}[kind]
    if kind == "byte_level":
        byte_level_folder(path)
    for template in (TEMPLATE, TEMPLATE.replace("{{ bos_token }}", "")):
        tokenizer = load_tokenizer(path, chat_template=template)
        bos = tokenizer.bos_id
        ids = tokenizer.encode_messages(MESSAGES)
        assert ids[0] == bos
        assert ids.count(bos) == 1
        assert len(ids) > 5
        for text in ("Hello world", tokenizer.pieces([bos])[0] + "Hello world"):
            assert tokenizer.encode(text)[0] == bos
            assert tokenizer.encode(text).count(bos) == 1
        assert tokenizer.decode(ids).strip() == "[user] Hello world [assistant]"
        without = tokenizer.encode_messages(MESSAGES, add_generation_prompt=False)
        assert tokenizer.decode(without).strip() == "[user] Hello world"


def test_e5_llama3_shape(tmp_path: Path) -> None:
    template = "{{ bos_token }}<|header|>user{{ messages[0]['content'] }}<|eot|>"
    tokenizer = load_tokenizer(byte_level_folder(tmp_path / "t", chat_template=template))
    ids = tokenizer.encode_messages(MESSAGES)
    assert ids[:2] == [0, 3]
    assert ids[-1] == 2


def test_no_bos_where_the_family_has_none(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_level_folder(tmp_path / "t", bos=False), chat_template="{{ messages[0].content }}")
    assert tokenizer.bos_id is None
    assert tokenizer.decode(tokenizer.encode("Hello world"), skip_special_tokens=False) == "Hello world"
    assert tokenizer.encode_messages(MESSAGES) == tokenizer.encode("Hello world")
    assert tokenizer.encode(" Hello") != tokenizer.encode("Hello")


def test_e7_no_chat_template_is_one_clear_error(llama_model: Path, tmp_path: Path) -> None:
    for path in (llama_model, byte_level_folder(tmp_path / "t")):
        tokenizer = load_tokenizer(path)
        with pytest.raises(DataError, match=r"no chat template: set tokenizer\.chat_template"):
            tokenizer.encode_messages(MESSAGES)
        assert tokenizer.encode("Hello")


def test_chat_templates_from_files_and_folders(llama_model: Path, llama_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    expected = load_tokenizer(llama_folder, chat_template=TEMPLATE).encode_messages(MESSAGES)
    assert load_tokenizer(llama_folder, chat_template=str(file)).encode_messages(MESSAGES) == expected
    assert load_tokenizer(llama_model, chat_template=TEMPLATE).encode_messages(MESSAGES) == expected
    beside = tmp_path / "beside"
    beside.mkdir()
    shutil.copy(llama_model, beside)
    shutil.copy(file, beside / "chat_template.jinja")
    assert load_tokenizer(beside).encode_messages(MESSAGES) == expected
    with pytest.raises(DataError, match=r"tokenizer\.chat_template: 'missing.jinja' is neither"):
        load_tokenizer(llama_model, chat_template="missing.jinja")
    with pytest.raises(DataError, match=r"tokenizer\.chat_template: line 1 is not valid Jinja"):
        load_tokenizer(llama_model, chat_template="{% for %}")
    file.write_text("a\n{% for x in %}")
    with pytest.raises(DataError, match=rf"tokenizer\.chat_template: {file}:2 is not valid Jinja"):
        load_tokenizer(llama_model, chat_template=str(file))
    file.write_bytes(b"{{ messages }} \xe9")
    with pytest.raises(DataError, match="is not UTF-8 at byte 15"):
        load_tokenizer(llama_model, chat_template=str(file))
    with pytest.raises(DataError, match=r"tokenizer\.chat_template fails on .*: no system turn"):
        load_tokenizer(llama_model, chat_template="{{ raise_exception('no system turn') }}").encode_messages(MESSAGES)


def test_a_conversation_that_the_assistant_begins(llama_model: Path, llama_folder: Path) -> None:
    messages = [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "a"}]
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}[assistant]{% endif %}"
    for path in (llama_model, llama_folder):
        tokenizer = load_tokenizer(path, chat_template=template)
        ids, learned = encode_conversation(tokenizer, messages)
        assert tokenizer.decode([i for i, flag in zip(ids, learned, strict=True) if flag]).strip() == "hi"
        tokenizer = load_tokenizer(path, chat_template=template + "{% if not messages[0]['role'] %}{% endif %}")
        with pytest.raises(ValueError, match="begins with the assistant.*; put a message before it"):
            encode_conversation(tokenizer, messages)


def test_parts_of_a_message_are_not_written_as_python_does(llama_model: Path) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a sea"}]}]
    with pytest.raises(DataError, match="takes text alone: the content of message 0 is a list of parts"):
        load_tokenizer(llama_model, chat_template=TEMPLATE).encode_messages(parts)
    reads = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    assert load_tokenizer(llama_model, chat_template=reads).render(parts) == "a sea"


@pytest.mark.parametrize(("pad", "expected"), [(3, 3), (0, 0), (9, 9), (-1, 2), (10, 2), (None, 2)])
def test_e10_only_ids_outside_the_vocabulary_are_remapped(pad: int | None, expected: int) -> None:
    assert resolve_pad_id(pad, 10, 2) == expected


def test_e10_pad_ids_of_folders(tmp_path: Path) -> None:
    def pad(name: str, config: dict[str, Any], **settings: Any) -> int:
        folder = byte_level_folder(tmp_path / name, **settings)
        write_json(folder / "config.json", {"model_type": "llama", **config})
        return load_tokenizer(folder).pad_id

    assert pad("own", {}, pad_token="<|header|>") == 3
    assert pad("own wins", {"pad_token_id": 2}, pad_token="<|header|>") == 3
    assert pad("config", {"pad_token_id": 2}) == 2
    assert pad("minus one", {"pad_token_id": -1}) == 1
    assert pad("absent", {}) == 1
    # the tokenizer knows a pad token that the model has no row for
    assert pad("too large", {"vocab_size": 300}, pad_token="<|pad|>") == 1


def test_all_end_ids_are_found(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path / "t")
    write_json(folder / "config.json", {"model_type": "llama", "eos_token_id": 3})
    write_json(folder / "generation_config.json", {"eos_token_id": [2, 3]})
    assert load_tokenizer(folder).eos_ids == [2, 3, 1]
    write_json(folder / "config.json", {"model_type": "llama", "eos_token_id": -1, "vocab_size": 300})
    write_json(folder / "generation_config.json", {"eos_token_id": 2})
    assert load_tokenizer(folder).eos_ids == [2, 1]


def test_unreadable_tokenizers(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    broken = tmp_path / "broken.model"
    broken.write_bytes(b"no model")
    for path, message in (
        (tmp_path / "empty", r"tokenizer\.path: .*empty holds no tokenizer"),
        (tmp_path / "nowhere", r"tokenizer\.path: .*nowhere holds no tokenizer"),
        (tmp_path / "gone.model", r"tokenizer\.path: .*gone\.model does not exist"),
        (broken, r"tokenizer\.path: .*broken\.model is not a SentencePiece model"),
    ):
        with pytest.raises(DataError, match=message):
            load_tokenizer(path)
    folder = byte_level_folder(tmp_path / "t")
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(DataError, match=r"generation_config\.json is not valid JSON"):
        load_tokenizer(folder)


def test_ids_that_only_the_model_knows_stand_for_no_text(llama_model: Path, llama_folder: Path) -> None:
    for path in (llama_model, llama_folder):
        tokenizer = load_tokenizer(path)
        ids = tokenizer.encode("Hello world")
        beyond = tokenizer.vocab_size
        mixed = [*ids[:2], beyond, *ids[2:], beyond + 7]
        assert tokenizer.decode(mixed) == tokenizer.decode(ids) == "Hello world"
        assert tokenizer.pieces(mixed)[-1] == f"<{beyond + 7}>"
        assert tokenizer.pieces(mixed)[:2] == tokenizer.pieces(ids)[:2]
