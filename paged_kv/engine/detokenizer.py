"""Turns tokens into text as they come."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Detokenizer"]

_INCOMPLETE = "\ufffd"  # a decoder's answer to the bytes of half a character: one for all, or one for each


class Detokenizer:
    """The pieces that `push` and `flush` return, joined, are `tokenizer.decode` of all tokens pushed.

    Only the last few tokens are decoded each time: those of the piece before, which decide about a space
    between, and those that came since.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # tokens from here on are decoded
        self._middle = 0  # tokens before here are all told
        self._told = 0  # characters from `_start` on that are told

    def push(self, token: int) -> str:
        """The text that `token` completes: often a word, sometimes nothing yet."""
        self._ids.append(token)
        text = self._decode(self._start)
        whole = not text.endswith(_INCOMPLETE)
        piece = text.rstrip(_INCOMPLETE)[self._told :]
        if not piece:
            return ""
        self._told += len(piece)
        if whole:
            self._start, self._middle = self._middle, len(self._ids)
            self._told = len(self._decode(self._start))
        return piece

    def flush(self) -> str:
        """What is left when no more tokens come, such as half a character."""
        return self._decode(self._start)[self._told :]

    def _decode(self, start: int) -> str:
        return self._tokenizer.decode(self._ids[start:], skip_special_tokens=True)
