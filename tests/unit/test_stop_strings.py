"""Where responses end at strings of their text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mrlhf.rollout.stop_strings import StopStrings

PIECES = ["a", "b", "ab", "\n", "", "stop", " st", "op ", "é", "longer piece of text"]


def decode(ids: Sequence[int]) -> str:
    return "".join(PIECES[i] for i in ids)


def ends_at(strings: Sequence[str], ids: Sequence[int]) -> int | None:
    """How many tokens a response has when it ends; None where it goes on."""
    complete = StopStrings(strings, decode)
    return next((n for n in range(1, len(ids) + 1) if complete(ids[:n])), None)


@pytest.mark.parametrize(
    ("strings", "ids", "end"),
    [
        (["stop"], [0, 1, 5, 0], 3),
        (["stop"], [0, 6, 7, 0], 3),  # over two tokens
        (["b\na"], [1, 3, 2, 0], 3),  # completed in the middle of a token, which stays whole
        (["stop"], [6, *[4] * 60, 7], 62),  # tokens without text between the halves
        (["nowhere", "é"], [9, 9, 8], 3),
        (["stop"], [6, 0, 7], None),
        (["aaaa"], [0, 0, 0, 0], 4),
    ],
)
def test_the_token_that_completes_a_string_is_the_last(strings: list[str], ids: list[int], end: int | None) -> None:
    assert ends_at(strings, ids) == end


def test_only_the_end_of_a_long_text_is_decoded() -> None:
    asked: list[int] = []

    def counted(ids: Sequence[int]) -> str:
        asked.append(len(ids))
        return decode(ids)

    complete = StopStrings(["stop"], counted)
    assert not complete([0] * 10_000)
    assert max(asked) < 50


def test_an_empty_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""], decode)
