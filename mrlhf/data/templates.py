"""Chat templates: where they come from, and Jinja as transformers runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mrlhf.config_sections import template_file
from mrlhf.errors import DataError


def read_template(chat_template: str | None) -> str | None:
    """Jinja source as it is; anything that cannot be one is the name of a file.

    Raises:
        DataError: neither Jinja source nor an existing file, or not valid Jinja.
    """
    if chat_template is None:
        return None
    named = template_file(chat_template)
    if named is None:
        template, where = chat_template, "tokenizer.chat_template: line "
    else:
        file = Path(named)
        if not file.is_file():
            raise DataError(f"tokenizer.chat_template: {chat_template!r} is neither Jinja source nor an existing file")
        try:
            template, where = file.read_text(encoding="utf-8-sig"), f"tokenizer.chat_template: {file}:"
        except UnicodeDecodeError as error:
            raise DataError(f"tokenizer.chat_template: {file} is not UTF-8 at byte {error.start}") from None
        except OSError as error:
            raise DataError(f"tokenizer.chat_template: {file} cannot be read: {error.strerror}") from None
    _check_syntax(template, where)
    return template


def _check_syntax(template: str, where: str) -> None:
    import jinja2

    try:
        # With transformers' own extensions of Jinja; what the template says to no messages at all is of no interest.
        render_jinja([], template, False, {})
    except jinja2.TemplateSyntaxError as error:
        raise DataError(f"{where}{error.lineno} is not valid Jinja: {error.message}") from None
    except Exception:
        return


def render_jinja(
    messages: Sequence[Mapping[str, Any]], template: str, add_generation_prompt: bool, special: Mapping[str, Any]
) -> str:
    """What a template makes of chat messages, also of none; ``special`` are its further variables."""
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(
        conversations=[list(messages)], chat_template=template, add_generation_prompt=add_generation_prompt, **special
    )
    return str(rendered[0])
