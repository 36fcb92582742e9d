"""Whether the tokenizers of several models give the same ids to the same pieces."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mrlhf.errors import ConfigError, DataError


def check_same_vocabulary(paths: Mapping[str, str | Path], *, tolerated_share: float = 0.0) -> None:
    """Refuse models that read the same token ids but mean different text by them.

    Only the tokenizer files are compared: ``tokenizer.json``, the SentencePiece ``tokenizer.model``, or ``vocab.json``.
    A folder without one is passed over, and so are ids that only one of two vocabularies has (padding rows and tokens
    that were added for one model).

    Args:
        paths: folder (or SentencePiece file) of each model by its configuration key; the first one that has a
            tokenizer is what the others are compared with.
        tolerated_share: part of the ids that may differ: fine-tuning may give reserved tokens other names.

    Raises:
        ConfigError: two vocabularies differ; the message names both keys, the first differing id and its pieces.
        DataError: a tokenizer file cannot be read.
    """
    first: tuple[str, str, dict[int, str]] | None = None
    read: dict[Path, dict[int, str] | None] = {}
    for key, path in paths.items():
        place = Path(path).resolve()
        if place not in read:
            read[place] = read_vocabulary(place)
        pieces = read[place]
        if pieces is None:
            continue
        if first is None:
            first = key, str(path), pieces
            continue
        differing = [i for i in first[2].keys() & pieces.keys() if first[2][i] != pieces[i]]
        if len(differing) > tolerated_share * len(first[2]):
            token = min(differing)
            raise ConfigError(
                f"{key}: {path} reads other token ids than {first[0]}: {first[1]}: id {token} is {pieces[token]!r} "
                f"here and {first[2][token]!r} there ({len(differing)} ids differ); use models that share one tokenizer"
            )


def read_vocabulary(path: str | Path) -> dict[int, str] | None:
    """The piece of each id; None where there is no tokenizer file that names them.

    Raises:
        DataError: the file is malformed.
    """
    place = Path(path)
    if place.is_file() and place.suffix == ".model":
        return _sentencepiece(place)
    if (file := place / "tokenizer.json").is_file():
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            vocabulary: Any = content["model"]["vocab"]
            if isinstance(vocabulary, list):  # Unigram: [piece, score] by id
                pieces = {i: str(entry[0]) for i, entry in enumerate(vocabulary)}
            else:
                pieces = {int(i): piece for piece, i in vocabulary.items()}
            return pieces | {int(token["id"]): token["content"] for token in content.get("added_tokens") or []}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{file} is not a tokenizer file with a vocabulary: {error!r}") from error
    if (file := place / "tokenizer.model").is_file():
        return _sentencepiece(file)
    if (file := place / "vocab.json").is_file():
        try:
            return {int(i): piece for piece, i in json.loads(file.read_text(encoding="utf-8")).items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(f"{file} is not a vocabulary: {error!r}") from error
    return None


def _sentencepiece(file: Path) -> dict[int, str] | None:
    import sentencepiece

    try:
        processor: Any = sentencepiece.SentencePieceProcessor(model_proto=file.read_bytes())
    except Exception:
        # Other families call other formats tokenizer.model, for example tiktoken's.
        return None
    return {i: processor.id_to_piece(i) for i in range(processor.vocab_size())}
