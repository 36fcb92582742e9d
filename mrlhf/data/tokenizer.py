"""One tokenizer interface over Hugging Face folders and SentencePiece files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mrlhf.data.templates import read_template, render_jinja
from mrlhf.errors import DataError

Message = Mapping[str, Any]

NO_DUMMY_PREFIX = bytes([3 << 3 | 2, 2, 3 << 3, 0])
"""``normalizer_spec { add_dummy_prefix: false }`` as protobuf. Appended to a serialized model it overrides that one
setting, since a parser merges a message field that occurs twice."""


def resolve_pad_id(pad_id: int | None, vocab_size: int, eos_id: int) -> int:
    """The pad id to use: ``eos_id`` where ``pad_id`` is absent, -1 or beyond the vocabulary; else ``pad_id`` itself."""
    return eos_id if pad_id is None or not 0 <= pad_id < vocab_size else pad_id


class Backend(Protocol):
    """What `Tokenizer` needs from a tokenizer library."""

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    prefix: list[int]
    """Ids that the model family puts before every text (its BOS, for most that have one)."""
    chat_template: str | None

    def encode(self, text: str) -> list[int]:
        """Ids of ``text`` without the prefix; special tokens written out in the text become their ids."""
        ...

    def encode_inside(self, text: str) -> list[int]:
        """As `encode`, for text that goes on after other text: no dummy prefix."""
        ...

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Text of ``ids``."""
        ...

    def pieces(self, ids: list[int]) -> list[str]:
        """The vocabulary's own spelling of each id."""
        ...

    def render(self, messages: Sequence[Message], template: str, add_generation_prompt: bool) -> str:
        """Run a Jinja chat template."""
        ...


class HuggingFaceBackend:
    """A folder that ``transformers.AutoTokenizer`` can read; nothing is downloaded."""

    def __init__(self, path: str):
        from transformers import AutoTokenizer

        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except Exception as error:
            raise DataError(
                f"tokenizer.path: {path} holds no tokenizer that transformers can read (expected a Hugging Face folder "
                f"with tokenizer.json or tokenizer_config.json, or a SentencePiece .model file): {error}"
            ) from error
        self.vocab_size = len(self.tokenizer)
        self.bos_id: int | None = self.tokenizer.bos_token_id
        self.eos_id: int | None = self.tokenizer.eos_token_id
        self.pad_id: int | None = self.tokenizer.pad_token_id
        self.chat_template: str | None = self.tokenizer.get_chat_template() if self.tokenizer.chat_template else None
        probe = self._bare("a")
        whole = self.tokenizer.encode("a")
        start = next((i for i in range(len(whole)) if whole[i : i + len(probe)] == probe), 0)
        self.prefix: list[int] = whole[:start]
        # Metaspace takes a leading space for the dummy prefix that SentencePiece puts before every text, spaces or not.
        self._loses_space = self._bare(" a") == probe != self._bare("  a")
        # Text after which nothing is put before the next one: a special token, for most families.
        anchors = (self.tokenizer.eos_token, self.tokenizer.bos_token, "\n")
        self._anchor = next((a for a in anchors if a and self.pieces(self._after(a, "a")) == ["a"]), "")

    def _bare(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids

    def encode(self, text: str) -> list[int]:
        """See `Backend`; a leading space counts, as in SentencePiece."""
        return self._bare(" " + text if self._loses_space and text.startswith((" ", "\u2581")) else text)

    def _after(self, anchor: str, text: str) -> list[int]:
        return self._bare(anchor + text)[len(self._bare(anchor)) if anchor else 0 :]

    def encode_inside(self, text: str) -> list[int]:
        """See `Backend`."""
        return self._after(self._anchor, text)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """See `Backend`."""
        text: str = self.tokenizer.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def pieces(self, ids: list[int]) -> list[str]:
        """See `Backend`."""
        pieces: list[str] = self.tokenizer.convert_ids_to_tokens(ids)
        return pieces

    def render(self, messages: Sequence[Message], template: str, add_generation_prompt: bool) -> str:
        """See `Backend`."""
        if not messages:
            # transformers refuses what stands before a conversation that the assistant begins.
            return render_jinja(messages, template, add_generation_prompt, self.tokenizer.special_tokens_map)
        text: str = self.tokenizer.apply_chat_template(
            list(messages), chat_template=template, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return text


class SentencePieceBackend:
    """A SentencePiece ``.model`` file, with the ids that Hugging Face's Llama tokenizer gives for it.

    BOS, EOS and the other control pieces are recognised in the text (SentencePiece alone never does). The model's dummy
    prefix is put before text at the very start only, not after a control piece.
    """

    def __init__(self, path: str):
        import sentencepiece

        try:
            model = Path(path).read_bytes()
            self.processor: Any = sentencepiece.SentencePieceProcessor(model_proto=model)
            self._inner: Any = sentencepiece.SentencePieceProcessor(model_proto=model + NO_DUMMY_PREFIX)
        except Exception as error:
            raise DataError(f"tokenizer.path: {path} is not a SentencePiece model: {error}") from error
        self.vocab_size: int = self.processor.vocab_size()
        self.bos_id = _known(self.processor.bos_id())
        self.eos_id = _known(self.processor.eos_id())
        self.pad_id = _known(self.processor.pad_id())
        self.prefix = [] if self.bos_id is None else [self.bos_id]
        self._control = {
            self.processor.id_to_piece(i): i for i in range(self.vocab_size) if self.processor.is_control(i)
        }
        self.chat_template = _template_beside(Path(path))

    def encode(self, text: str) -> list[int]:
        """See `Backend`."""
        return self._encode(text, first=True)

    def encode_inside(self, text: str) -> list[int]:
        """See `Backend`."""
        return self._encode(text, first=False)

    def _encode(self, text: str, first: bool) -> list[int]:
        ids: list[int] = []
        while text:
            found = [(at, -len(piece), piece) for piece in self._control if (at := text.find(piece)) >= 0]
            cut, _, piece = min(found, default=(len(text), 0, ""))
            if cut:
                ids.extend((self.processor if first else self._inner).encode(text[:cut]))
            if piece:
                ids.append(self._control[piece])
            text = text[cut + len(piece) :]
            first = False
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """See `Backend`."""
        special = set(self._control.values())
        if skip_special_tokens:
            return str(self.processor.decode([i for i in ids if i not in special]))
        text = ""
        run: list[int] = []
        for i in [*ids, None]:
            if i is None or i in special:
                text += self.processor.decode(run) if run else ""
                text += "" if i is None else self.processor.id_to_piece(i)
                run = []
            else:
                run.append(i)
        return text

    def pieces(self, ids: list[int]) -> list[str]:
        """See `Backend`."""
        return [self.processor.id_to_piece(i) for i in ids]

    def render(self, messages: Sequence[Message], template: str, add_generation_prompt: bool) -> str:
        """See `Backend`; the template sees ``bos_token`` and ``eos_token``."""
        special = {
            name: self.processor.id_to_piece(i)
            for name, i in (("bos_token", self.bos_id), ("eos_token", self.eos_id))
            if i is not None
        }
        return render_jinja(messages, template, add_generation_prompt, special)


class Tokenizer:
    """Text to ids and back, the same for every kind of tokenizer file.

    Attributes:
        path: where it was read from.
        vocab_size: number of ids the tokenizer knows (a model may have more rows).
        bos_id: id of the beginning-of-sequence token, None where there is none.
        eos_id: the id that ends a text which is learned: the tokenizer's own, else the first of ``eos_ids``, else None.
        eos_ids: every id that ends a response: those of ``generation_config.json``, ``config.json`` and the tokenizer.
        pad_id: the padding id; may equal an end id.
        chat_template: Jinja source or None.
    """

    def __init__(self, backend: Backend, path: str, chat_template: str | None = None):
        self.backend = backend
        self.path = path
        self.vocab_size = backend.vocab_size
        self.bos_id = backend.bos_id
        self.chat_template = chat_template if chat_template is not None else backend.chat_template
        folder = Path(path) if Path(path).is_dir() else Path(path).parent
        generation, config = _read_json(folder / "generation_config.json"), _read_json(folder / "config.json")
        text_config = config.get("text_config") or {}
        found: list[Any] = []
        for ids in (generation.get("eos_token_id"), config.get("eos_token_id"), text_config.get("eos_token_id")):
            found.extend(ids if isinstance(ids, list) else [ids])
        found.append(backend.eos_id)
        rows = int(config.get("vocab_size") or text_config.get("vocab_size") or backend.vocab_size)
        self.eos_ids: list[int] = list(dict.fromkeys(i for i in found if i is not None and 0 <= i < rows))
        pads = (backend.pad_id, generation.get("pad_token_id"), config.get("pad_token_id"))
        pad = next((i for i in pads if i is not None), None)
        if not self.eos_ids and not (pad is not None and 0 <= pad < rows):
            raise DataError(f"tokenizer.path: {path} defines neither an end-of-sequence token nor a pad token")
        own = [i for i in self.eos_ids if i == backend.eos_id]
        self.eos_id: int | None = next(iter(own + self.eos_ids), None)
        self.pad_id = resolve_pad_id(pad, rows, self.eos_id or 0)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text`` with exactly one BOS in front where the model family uses one, never an EOS at the end."""
        return self._with_prefix(self.backend.encode(text))

    def extend(self, ids: Sequence[int], text: str, more: str) -> list[int]:
        """Ids of ``text`` and then ``more`` that begin with ``ids``, those of ``text`` alone.

        These are the ids of the whole, except where a token would span the seam: there ``more`` gets its own, as when a
        model goes on from ``ids``.
        """
        whole = self.encode(text + more)
        return whole if whole[: len(ids)] == list(ids) else [*ids, *self.backend.encode_inside(more)]

    def finish(self, ids: Sequence[int]) -> list[int]:
        """``ids`` with exactly one end id after them: appended unless they end with one.

        Raises:
            DataError: the tokenizer has no end id.
        """
        if ids and ids[-1] in self.eos_ids:
            return list(ids)
        if self.eos_id is None:
            raise DataError(
                f"tokenizer.path: {self.path} defines no end-of-sequence token, so no response could learn to end; set "
                "eos_token in its tokenizer_config.json"
            )
        return [*ids, self.eos_id]

    def encode_messages(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Ids of chat messages, as the chat template writes them; one BOS, whether or not the template has it too.

        Raises:
            DataError: there is no chat template, or it fails on these messages.
        """
        return self._with_prefix(self.backend.encode(self.render(messages, add_generation_prompt)))

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The text of chat messages under the chat template.

        Raises:
            DataError: as for `encode_messages`.
        """
        template = self.require_chat_template()
        try:
            text = self.backend.render(messages, template, add_generation_prompt)
        except Exception as error:
            raise DataError(f"tokenizer.chat_template fails on {list(messages)!r:.200}: {error}") from error
        for index, message in enumerate(messages):
            content = message["content"]
            if isinstance(content, list) and content and (repr(content) in text or json.dumps(content) in text):
                raise DataError(
                    f"tokenizer.chat_template takes text alone: the content of message {index} is a list of parts, "
                    f"{content!r:.80}; write it as one string"
                )
        return text

    def require_chat_template(self) -> str:
        """The chat template.

        Raises:
            DataError: there is none; the message names the option that sets one.
        """
        if self.chat_template is None:
            raise DataError(
                f"the prompts are chat messages, but the tokenizer {self.path} has no chat template: set "
                f"tokenizer.chat_template to a Jinja template or to a file that holds one, or use string prompts"
            )
        return self.chat_template

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``."""
        # A model may have more rows than the tokenizer has ids, and may say them; they stand for no text.
        return self.backend.decode([i for i in ids if i < self.vocab_size], skip_special_tokens)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's spelling of each id, for token-level views."""
        return [self.backend.pieces([i])[0] if i < self.vocab_size else f"<{i}>" for i in ids]

    def _with_prefix(self, ids: list[int]) -> list[int]:
        prefix = self.backend.prefix
        if not prefix:
            return ids
        start = 0
        while ids[start : start + len(prefix)] == prefix:
            start += len(prefix)
        return prefix + ids[start:]


def load_tokenizer(path: str | Path, chat_template: str | None = None) -> Tokenizer:
    """Read a tokenizer from a Hugging Face folder or a SentencePiece ``.model`` file.

    Args:
        path: the folder (or the name of a cached model), or the file. A folder whose only tokenizer file is
            ``tokenizer.model`` is read by SentencePiece.
        chat_template: Jinja source, or the path of a file with it; overrides the tokenizer's own.

    Raises:
        DataError: nothing readable there, or neither an EOS nor a pad token.
    """
    where = Path(path)
    if where.is_dir():
        model = where / "tokenizer.model"
        if model.is_file() and not any((where / n).is_file() for n in ("tokenizer.json", "tokenizer_config.json")):
            where = model
    elif where.suffix == ".model" and not where.is_file():
        raise DataError(f"tokenizer.path: {where} does not exist (expected a SentencePiece .model file)")
    backend: Backend = SentencePieceBackend(str(where)) if where.is_file() else HuggingFaceBackend(str(path))
    return Tokenizer(backend, str(where), read_template(chat_template))


def _template_beside(model: Path) -> str | None:
    file = model.parent / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = _read_json(model.parent / "tokenizer_config.json").get("chat_template")
    return template if isinstance(template, str) else None


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{file} must hold a JSON object, not {type(content).__name__}")
    return content


def _known(token_id: int) -> int | None:
    return token_id if token_id >= 0 else None
