"""A chat tokenizer with one id per character, on which every expected id can be written down as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mrlhf.data.tokenizer import Tokenizer
from tests.unit.test_data_prompts import CharacterBackend


class ChatBackend(CharacterBackend):
    """A turn is ``[u]text|`` with ``|`` as the end id, followed by ``after``."""

    eos_id: int | None = ord("|")
    chat_template = "in code"

    def __init__(self, prefix: Sequence[int] = (), after: str = "", end: str = "|"):
        super().__init__(prefix)
        self.after, self.end = after, end

    def encode_inside(self, text: str) -> list[int]:
        return self.encode(text)

    def render(self, messages: Any, template: str, add_generation_prompt: bool) -> str:
        turns = (f"[{m['role'][0]}]{m['content']}{self.end}{self.after}" for m in messages)
        return "".join(turns) + "[a]" * add_generation_prompt


class UnstableBackend(ChatBackend):
    """Leaves all but the last answer out, as templates of reasoning models do with their thoughts."""

    def render(self, messages: Any, template: str, add_generation_prompt: bool) -> str:
        last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
        kept = [m for i, m in enumerate(messages) if m["role"] != "assistant" or i == last]
        return super().render(kept, template, add_generation_prompt)


def chat(backend: ChatBackend | None = None) -> Tokenizer:
    return Tokenizer(backend or ChatBackend(), "characters")


def text(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def marked(ids: Sequence[int], learned: Sequence[bool]) -> str:
    """The learned characters, and a dot for each of the others."""
    return "".join(chr(i) if flag else "." for i, flag in zip(ids, learned, strict=True))


def say(*turns: str) -> list[dict[str, str]]:
    """Chat messages from ``u:text`` and ``a:text``."""
    roles = {"u": "user", "a": "assistant", "s": "system"}
    return [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]
