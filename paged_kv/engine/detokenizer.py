"""Turns tokens into text as they come, up to where a stop text begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Detokenizer", "TextStream"]

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


class TextStream:
    """The text of a sequence. What may be the beginning of a stop text is held back until that is known.

    Attributes:
        text: what is certain so far; it only grows.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = stop
        self._held = ""
        self._stopped = False
        self.text = ""

    def push(self, token: int, *, may_stop: bool = True) -> bool:
        """Takes the next token; tells whether a stop text is complete, which is then left out of `text`."""
        self._held += self._detokenizer.push(token)
        if not may_stop:
            self.text, self._held = self.text + self._held, ""
            return False
        places = [place for stop in self._stop if (place := self._held.find(stop)) >= 0]
        if places:
            self.text, self._stopped = self.text + self._held[: min(places)], True
            return True
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        certain = len(self._held) - keep
        self.text, self._held = self.text + self._held[:certain], self._held[certain:]
        return False

    def close(self) -> None:
        """No more tokens come."""
        if not self._stopped:
            self.text, self._stopped = self.text + self._held + self._detokenizer.flush(), True


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` may be the beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
