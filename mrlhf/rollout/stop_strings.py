"""Ends responses at strings of their text."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class StopStrings:
    """Tells after every token whether it has completed one of some strings.

    Only the end of the text is decoded: as many tokens as hold the longest string and the token that completes it.
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        """Keep the strings.

        Args:
            strings: none of them empty.
            decode: text of token ids, as the user sees it.

        Raises:
            ValueError: an empty string, which would end every response at once.
        """
        if not all(strings):
            raise ValueError("a stop string is empty, which would end every response at its first token")
        self.strings = tuple(strings)
        self.decode = decode
        # A character takes at most four tokens (one for each byte), and the decoder may drop a space at the beginning.
        self.longest = max(map(len, self.strings), default=0) + 1

    def __call__(self, response: Sequence[int]) -> bool:
        """Whether the text of ``response`` contains a string; it did not without its last token."""
        if not self.strings:
            return False
        count = 2 * self.longest
        while True:
            text = self.decode(response[-count:])
            # Tokens without text (special ones) and parts of characters: look further back.
            if count >= len(response) or len(text) >= 2 * self.longest:
                return any(string in text for string in self.strings)
            count *= 2
