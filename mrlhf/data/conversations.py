"""Prompts with answers and whole conversations as token ids, with the tokens that are answers."""

from __future__ import annotations

from collections.abc import Sequence

from mrlhf.data.tokenizer import Message, Tokenizer
from mrlhf.errors import DataError

UNSTABLE = (
    "the chat template does not write a conversation as a continuation of its beginning (message {index} from the "
    "assistant changes what stands before it), so the tokens of an answer cannot be told apart; set "
    "tokenizer.chat_template to one that does"
)


def encode_answer(tokenizer: Tokenizer, prompt: str | Sequence[Message], answer: str) -> tuple[list[int], list[int]]:
    """Ids of a prompt, as generation gets them, and of the answer with one end id after it.

    Args:
        tokenizer: chat messages go through its template, and the answer as the assistant's next message.
        prompt: text or chat messages.
        answer: text.

    Raises:
        ValueError: the chat template is not prefix-stable.
        DataError: the chat template fails, or there is no end id.
    """
    if isinstance(prompt, str):
        before, more = prompt, answer
    else:
        before = tokenizer.render(prompt, add_generation_prompt=True)
        whole = tokenizer.render([*prompt, {"role": "assistant", "content": answer}], add_generation_prompt=False)
        if not whole.startswith(before):
            raise ValueError(UNSTABLE.format(index=len(prompt)))
        more = whole[len(before) :]
    ids = tokenizer.encode(before)
    end = _end(tokenizer, tokenizer.extend(ids, before, more), start=len(ids))
    return ids, end[len(ids) :]


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of plain text or of a rendered conversation, with one BOS where the family has one and one end id."""
    return _end(tokenizer, tokenizer.encode(text), start=0)


def encode_conversation(tokenizer: Tokenizer, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    """Ids of a conversation up to its last answer, and which of them the assistant says.

    The spans are found by rendering the conversation's beginnings: an answer is what its message adds to the messages
    before it with the generation prompt, up to and including the end-of-turn id.

    Returns:
        the ids, with one end id at the end, and a flag for each.

    Raises:
        ValueError: the chat template is not prefix-stable, or there is no answer.
        DataError: the chat template fails, or there is no end id.
    """
    full = tokenizer.render(messages, add_generation_prompt=False)
    parts: list[tuple[str, bool]] = []
    at = 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _before(tokenizer, messages[:index])
        through = tokenizer.render(messages[: index + 1], add_generation_prompt=False)
        if len(before) < at or not (through.startswith(before) and full.startswith(through)):
            raise ValueError(UNSTABLE.format(index=index))
        parts += [(full[at : len(before)], False), (full[len(before) : len(through)], True)]
        at = len(through)
    ids: list[int] = []
    learned: list[bool] = []
    text = ""
    for part, answer in parts:
        if not part:
            continue
        longer = tokenizer.extend(ids, text, part) if ids else tokenizer.encode(part)
        said = len(longer)
        if answer:
            ends = [i for i in range(len(ids), len(longer)) if longer[i] in tokenizer.eos_ids]
            # What a template puts after the end of a turn is never generated.
            said = ends[-1] + 1 if ends else said
        learned += [answer and i < said for i in range(len(ids), len(longer))]
        ids, text = longer, text + part
    if not any(learned):
        raise ValueError("no message is from the assistant")
    last = max(i for i, flag in enumerate(learned) if flag)
    ids = tokenizer.finish(ids[: last + 1])
    return ids, learned[: last + 1] + [True] * (len(ids) - last - 1)


def _before(tokenizer: Tokenizer, messages: Sequence[Message]) -> str:
    """The prompt of the next answer. Raises ValueError where there is none and the template needs one."""
    try:
        return tokenizer.render(messages, add_generation_prompt=True)
    except DataError:
        if messages:
            raise
        raise ValueError(
            "the conversation begins with the assistant, for which the chat template has no beginning; put a message "
            "before it"
        ) from None


def _end(tokenizer: Tokenizer, ids: list[int], start: int) -> list[int]:
    """One end id at the end; blanks that a template puts after its end-of-turn id are left out."""
    last = next((i for i in range(len(ids) - 1, start - 1, -1) if ids[i] in tokenizer.eos_ids), None)
    if last is not None and not tokenizer.decode(ids[last + 1 :], skip_special_tokens=False).strip():
        ids = ids[: last + 1]
    return tokenizer.finish(ids)
