"""Guesses the next tokens from the text itself: what followed when the last few tokens stood there before.

Prompt lookup (Saxena, 2023): summaries, code and chats repeat what they read. A guess costs a dictionary lookup, and
the model verifies all guesses of a step in one call.
"""

from __future__ import annotations

__all__ = ["PromptLookup"]

NGRAMS = (3, 2)
"""Lengths of what must be equal, the longest first: of one equal token alone too little follows."""


class PromptLookup:
    """An index of one sequence's n-grams, which grows with it."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}  # where the n-gram's last occurrence ends
        self._num_indexed = 0

    def guess(self, tokens: list[int], count: int) -> list[int]:
        """Up to `count` tokens that followed the latest earlier occurrence of the last tokens."""
        for end in range(
            self._num_indexed, len(tokens)
        ):  # all but the one that ends now, which would find itself
            for n in NGRAMS:
                if end >= n:
                    self._after[tuple(tokens[end - n : end])] = end
        self._num_indexed = len(tokens)
        for n in NGRAMS:
            start = self._after.get(tuple(tokens[-n:])) if len(tokens) > n else None
            if start is not None and count > 0:
                return tokens[start : start + count]
        return []
