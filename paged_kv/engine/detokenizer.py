"""Turns tokens into text as they come."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Detokenizer"]

_INCOMPLETE = "\ufffd"  # a decoder's answer to bytes that are not a whole character yet


class Detokenizer:
    """The pieces that `push` and `flush` return, joined, are `tokenizer.decode` of all tokens pushed.

    Only the last few tokens are decoded each time: those of the piece before, which decide about a space
    between, and those that have not become text yet.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # tokens from here on are decoded
        self._told = 0  # tokens before here have been returned as text

    def push(self, token: int) -> str:
        """The text that `token` completes: often a word, sometimes nothing yet."""
        self._ids.append(token)
        piece = self._rest()
        if not piece or piece.endswith(_INCOMPLETE):
            return ""
        self._start, self._told = self._told, len(self._ids)
        return piece

    def flush(self) -> str:
        """What is left when no more tokens come, such as half a character."""
        return self._rest()

    def _rest(self) -> str:
        told = self._decode(self._ids[self._start : self._told])
        return self._decode(self._ids[self._start :])[len(told) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)
