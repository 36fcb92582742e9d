"""SentencePiece tokenizers trained on a corpus, in a folder that we and transformers read."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from mrlhf.data.records import Fields, check_prompt, field_names, read_rows
from mrlhf.data.templates import read_template
from mrlhf.errors import ConfigError, DataError
from mrlhf.folders import check_writable

ModelType = Literal["bpe", "unigram"]
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
"""The first ids, in this order."""
LEAST_COVERAGE = 0.98
"""SentencePiece's own limit."""
FILES = ("tokenizer.model", "tokenizer_config.json", "chat_template.jinja", "tokenizer.json")
SPACE = "\u2581"
"""How SentencePiece writes a space."""
TABLE_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")


def train_tokenizer(
    corpus: Sequence[str | Path],
    output: str | Path,
    *,
    vocab_size: int,
    model_type: ModelType = "bpe",
    character_coverage: float = 0.9995,
    byte_fallback: bool = True,
    special_tokens: Sequence[str] = (),
    chat_template: str | None = None,
    key: str = "text",
    overwrite: bool = False,
) -> Path:
    """Train a tokenizer with Llama's settings of SentencePiece and write its folder.

    The ids start with ``<pad> <s> </s> <unk>`` and the special tokens; with byte fallback 256 bytes follow, so that no
    text is unknown. The same corpus and settings give the same files. transformers reads the folder too, with the same
    ids.

    Args:
        corpus: text files, a line a sentence, or JSONL, Parquet or CSV files.
        output: folder to write ``tokenizer.model`` into, with ``tokenizer_config.json``, ``chat_template.jinja`` and,
            for ``unigram``, ``tokenizer.json``.
        vocab_size: number of ids, all of the above included.
        model_type: ``bpe`` or ``unigram``.
        character_coverage: share of the corpus whose characters get ids of their own.
        byte_fallback: spell other characters as bytes; else they are unknown.
        special_tokens: pieces that are never split, for example the role markers of a chat template.
        chat_template: Jinja source or the path of a file with it.
        key: field of the text, or of chat messages, in JSONL, Parquet and CSV files.
        overwrite: replace a tokenizer that is there.

    Returns:
        the folder.

    Raises:
        DataError: a corpus file is missing, malformed or empty.
        ConfigError: the vocabulary does not fit the corpus, with the limit; a special token is given twice or taken;
            the coverage is out of range; a tokenizer is there already, or the folder cannot be written.
    """
    if model_type not in get_args(ModelType):
        raise ValueError(f"model_type must be one of {', '.join(get_args(ModelType))}, not {model_type!r}")
    folder = Path(output)
    check_writable(folder, "--output")
    files = [folder / name for name in FILES]
    there = [file.name for file in files if file.exists()]
    if there and not overwrite:
        raise ConfigError(f"{folder} holds a tokenizer already ({there[0]}); choose another folder, or --overwrite")
    taken = [*SPECIAL.values()]
    for token in special_tokens:
        if not token or token in taken or any(c.isspace() for c in token):
            raise ConfigError(f"--special-token {token!r} is empty, has a blank in it, or is there twice")
        taken.append(token)
        if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            raise ConfigError(f"--special-token {token!r} is the name of a byte; choose another")
    if not LEAST_COVERAGE <= character_coverage <= 1:
        raise ConfigError(f"--character-coverage {character_coverage} must be from {LEAST_COVERAGE} to 1")
    if vocab_size <= len(taken):
        raise ConfigError(
            f"--vocab-size {vocab_size} is too small: the special tokens alone are {len(taken)}; use more"
        )
    template = read_template(chat_template)
    model = _train(
        [line for path in corpus for line in _lines(Path(path), key)],
        vocab_size=vocab_size,
        model_type=model_type,
        character_coverage=character_coverage,
        byte_fallback=byte_fallback,
        control_symbols=list(special_tokens),
    )
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        # What is left of the replaced tokenizer would be read instead of, or with, the new one.
        file.unlink(missing_ok=True)
    model_file, settings_file, template_file, fast_file = files
    model_file.write_bytes(model)
    settings: dict[str, Any] = {"tokenizer_class": "LlamaTokenizer", "legacy": False}
    settings |= {"add_bos_token": True, "add_eos_token": False}
    if model_type == "unigram":
        # Of transformers' classes none reads a unigram model with Llama's settings.
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
        _write_unigram(model, fast_file, byte_fallback)
    settings_file.write_text(json.dumps(settings | SPECIAL, indent=2) + "\n", encoding="utf-8")
    if template is not None:
        template_file.write_text(template, encoding="utf-8")
    return folder


def _write_unigram(model: bytes, file: Path, byte_fallback: bool) -> None:
    """The same tokenizer as a file of the ``tokenizers`` library."""
    import sentencepiece
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    processor: Any = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = range(processor.vocab_size())
    vocabulary = [(processor.id_to_piece(i), processor.get_score(i)) for i in ids]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=processor.unk_id(), byte_fallback=byte_fallback))
    control = [piece for i, (piece, _) in enumerate(vocabulary) if processor.is_control(i)]
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in control])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bos = SPECIAL["bos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, processor.bos_id())]
    )
    tokenizer.save(str(file))


def _train(lines: list[str], *, vocab_size: int, **options: Any) -> bytes:
    import sentencepiece

    if not lines:
        raise DataError("the corpus holds no text")
    model = io.BytesIO()
    ids: dict[str, Any] = {name.replace("_token", "_id"): i for i, name in enumerate(SPECIAL)}
    pieces: dict[str, Any] = {name.replace("_token", "_piece"): piece for name, piece in SPECIAL.items()}
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            vocab_size=vocab_size,
            # As Llama 2: spaces, digits and case stay what they are, and text can be restored from its ids.
            split_digits=True,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            normalization_rule_name="identity",
            # Longer lines would be left out without a word; SentencePiece takes no limit below 10.
            max_sentence_length=max(10, max(len(line.encode()) for line in lines) + 1),
            **ids,
            **pieces,
            num_threads=1,
            minloglevel=2,
            **options,
        )
    except (RuntimeError, OSError, ValueError) as error:
        text = str(error)
        if largest := re.search(r"too high.*<= (\d+)", text):
            raise ConfigError(
                f"--vocab-size {vocab_size} is too large for the corpus: it has no more than {largest[1]} different "
                f"pieces; use at most {largest[1]}, or more text"
            ) from error
        if smallest := re.search(r"smaller than required_chars\. \d+ vs (\d+)", text):
            raise ConfigError(
                f"--vocab-size {vocab_size} is too small: special tokens, bytes and the characters of the corpus are "
                f"{smallest[1]} pieces; use at least {smallest[1]}, a lower --character-coverage, or --no-byte-fallback"
            ) from error
        raise ConfigError(f"SentencePiece cannot train on this corpus: {text}") from error
    return model.getvalue()


def _lines(path: Path, key: str) -> Iterator[str]:
    """Lines with something in them."""
    if path.suffix.lower() in TABLE_SUFFIXES:

        def parse(item: Fields, number: int) -> list[str]:
            """The texts of a row."""
            if key not in item:
                raise ValueError(f"no field {key!r} (--key); the fields are: {field_names(item)}")
            text = check_prompt(item[key], key)
            return [text] if isinstance(text, str) else [str(message["content"]) for message in text]

        rows, _ = read_rows(path, parse, noun="text", expected=f'{{"{key}": "..."}}', skip_key=None)
        texts: list[str] = [text for row in rows for text in row]
    else:
        if not path.is_file():
            wrong = "is not a file" if path.exists() else "does not exist"
            raise DataError(f"{path} {wrong} (expected a text file, or one of {', '.join(TABLE_SUFFIXES)})")
        try:
            texts = [path.read_text(encoding="utf-8-sig")]
        except UnicodeDecodeError as error:
            line = path.read_bytes()[: error.start].count(b"\n") + 1
            raise DataError(f"{path}:{line}: not UTF-8") from error
    for text in texts:
        yield from (line.rstrip("\r") for line in text.replace("\0", "").split("\n") if line.strip())
