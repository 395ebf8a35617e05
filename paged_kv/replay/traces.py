"""Traces of requests, read from files as their publishers give them, or made up.

Mooncake  JSON lines: timestamp (ms), input_length, output_length, hash_ids (one for every 512 prompt tokens; the
          same id means the same content after the same prefix). Qin et al., Mooncake, FAST 2025.
Azure     CSV: TIMESTAMP, ContextTokens, GeneratedTokens; no content, so every prompt is its own.
          Patel et al., Splitwise, ISCA 2024.
ShareGPT  JSON: a list of {"conversations": [{"from", "value"}, ...]}; every answer is a request whose prompt is all
          that was said before. Text is counted as one token for every four bytes of UTF-8.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cached_property
from itertools import count
from pathlib import Path

import numpy as np

MOONCAKE_BLOCK = 512  # tokens that a hash id stands for
ID_RANGE = 2_000_000_011  # token ids are below: a prime, so that no two pieces of a trace fall on one another
BYTES_PER_TOKEN = 4  # of English text, roughly, with vocabularies of 32,000 to 128,000 tokens


class TraceError(ValueError):
    """A trace cannot be read; the message says where and why, in one line."""


@dataclass(frozen=True)
class Piece:
    """`length` tokens in a row. Pieces with the same start after the same pieces have the same tokens."""

    start: int
    length: int

    def tokens(self) -> np.ndarray:
        """Their ids, [length] int32."""
        start = self.start % ID_RANGE
        if start + self.length <= ID_RANGE:
            return np.arange(start, start + self.length, dtype=np.int32)
        return ((start + np.arange(self.length)) % ID_RANGE).astype(np.int32)


@dataclass(frozen=True)
class Request:
    """arrival: seconds since the trace began. prompt: its pieces. answer: what is generated."""

    arrival: float
    prompt: tuple[Piece, ...]
    answer: Piece

    @cached_property
    def prompt_len(self) -> int:
        return sum(piece.length for piece in self.prompt)

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values are kept at the end: the last token of an answer is never computed on."""
        return self.prompt_len + self.answer.length - 1

    def prompt_tokens(self) -> np.ndarray:
        """[prompt_len] int32."""
        return np.concatenate([piece.tokens() for piece in self.prompt])

    def cut(self, max_output: int) -> Request:
        """The same request with at most `max_output` tokens of answer."""
        answer = replace(self.answer, length=min(self.answer.length, max_output))
        return replace(self, answer=answer)


def read_trace(path: Path) -> list[Request]:
    """The requests of a trace file in order of arrival; what kind it is tells its content. Raises TraceError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TraceError(f"cannot read {path}: it is not UTF-8 text") from None
    reader = _reader_of(text)
    if reader is None:
        raise TraceError(
            f"{path}: expected Mooncake JSON lines (hash_ids), an Azure CSV (ContextTokens) or ShareGPT JSON "
            f"(conversations), got a file that begins with {text[:40]!r}"
        )
    try:
        requests = list(reader(text))
    except (TraceError, csv.Error) as error:
        raise TraceError(f"{path}: {error}") from None
    if not requests:
        raise TraceError(f"{path}: no request in it")
    return sorted(requests, key=lambda request: request.arrival)


def _reader_of(text: str) -> Callable[[str], Iterator[Request]] | None:
    beginning = text.lstrip()
    first_line = beginning.partition("\n")[0]
    if beginning.startswith("["):
        return _read_sharegpt
    if beginning.startswith("{") and "hash_ids" in first_line:
        return _read_mooncake
    if "ContextTokens" in first_line:
        return _read_azure
    return None


def _read_mooncake(text: str) -> Iterator[Request]:
    answers = _Starts(first=-(10**9))  # far from the hash ids
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            length, hash_ids = int(row["input_length"]), [int(hash_id) for hash_id in row["hash_ids"]]
            arrival, output = float(row["timestamp"]) / 1000, int(row["output_length"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise TraceError(f"line {number} is no Mooncake request: {_reason(error)}") from None
        if not math.isfinite(arrival):
            raise TraceError(f"line {number}: expected a timestamp in ms, got {row['timestamp']}")
        if length < 1 or len(hash_ids) != -(-length // MOONCAKE_BLOCK):
            raise TraceError(
                f"line {number}: expected one hash id for every {MOONCAKE_BLOCK} of input_length, got "
                f"{len(hash_ids)} for {length}"
            )
        pieces = [Piece(hash_id * MOONCAKE_BLOCK, MOONCAKE_BLOCK) for hash_id in hash_ids]
        pieces[-1] = Piece(pieces[-1].start, length - MOONCAKE_BLOCK * (len(pieces) - 1))
        yield Request(arrival, tuple(pieces), answers.piece(output))


def _read_azure(text: str) -> Iterator[Request]:
    starts, first = _Starts(), None
    for number, row in enumerate(csv.DictReader(text.splitlines()), 2):
        try:
            # Seven digits of a second, where fromisoformat takes six at most.
            moment = datetime.fromisoformat(row["TIMESTAMP"][:26])
            length, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"line {number} is no Azure request: {_reason(error)}") from None
        if length < 1:
            raise TraceError(f"line {number}: expected ContextTokens of at least 1, got {length}")
        moment = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
        first = first or moment
        yield Request((moment - first).total_seconds(), (starts.piece(length),), starts.piece(output))


def _read_sharegpt(text: str) -> Iterator[Request]:
    """Conversation number i begins at second i, and every turn comes a minute after the one before."""
    starts = _Starts()
    start_of: dict[tuple[Piece | str, ...], Piece] = {}  # by what was said before and what is said now
    try:
        conversations = [_turns(entry) for entry in json.loads(text)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TraceError(f"no list of ShareGPT conversations: {_reason(error)}") from None
    for begin, turns in enumerate(conversations):
        said: tuple[Piece, ...] = ()
        num_answers = 0
        for is_answer, value in turns:
            key = (*said[-1:], value)
            if key not in start_of:
                start_of[key] = starts.piece(round(len(value.encode()) / BYTES_PER_TOKEN))
            piece = start_of[key]
            if is_answer and said:
                yield Request(begin + 60.0 * num_answers, said, piece)
                num_answers += 1
            said = (*said, piece)


def _turns(entry: dict) -> list[tuple[bool, str]]:
    """(is it the model's?, what was said) of each turn."""
    turns = [
        (turn["from"] in ("gpt", "assistant", "model"), turn["value"]) for turn in entry["conversations"]
    ]
    for _, value in turns:
        value.encode()  # anything but text is refused here
    return turns


def synthetic_trace(num_requests: int, seed: int = 0) -> list[Request]:
    """A made-up chat service: four system prompts, conversations of several turns, about five requests a second.

    Lengths are log-normal: system prompts of about 600 tokens, messages of 60, answers of 150.
    """
    rng, starts = random.Random(seed), _Starts()

    def piece(median: float) -> Piece:
        return starts.piece(round(rng.lognormvariate(0, 0.8) * median))

    systems = [piece(600) for _ in range(4)]
    waiting: list[Request] = []  # conversations that could go on
    requests: list[Request] = []
    for arrival in _poisson(rng, rate=5.0):
        if len(requests) == num_requests:
            return requests
        if waiting and rng.random() < 0.6:
            last = waiting.pop(rng.randrange(len(waiting)))
            said = (*last.prompt, last.answer)
        else:
            said = (systems[min(int(rng.expovariate(1.0)), 3)],)
        requests.append(Request(arrival, (*said, piece(60)), piece(150)))
        waiting.append(requests[-1])
        waiting = waiting[-64:]


def _poisson(rng: random.Random, rate: float) -> Iterator[float]:
    now = 0.0
    for _ in count():
        yield now
        now += rng.expovariate(rate)


class _Starts:
    """Gives pieces tokens of their own."""

    def __init__(self, first: int = 0) -> None:
        self._next = first

    def piece(self, length: int) -> Piece:
        """A new piece of `length` tokens, at least one."""
        piece = Piece(self._next, max(1, length))
        self._next += piece.length
        return piece


def _reason(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)


def unlimited_hits(requests: list[Request], block_size: int) -> int:
    """Prompt tokens that a prefix cache would find which never evicts, where each request ends before the next.

    The upper bound of the hit rate of a pool: full blocks only, and never the last token of a prompt.
    """
    longest: dict[int, int] = {}  # start of a piece -> tokens of it that were computed
    hits = 0
    for request in requests:
        found = 0
        for piece in request.prompt:
            known = min(piece.length, longest.get(piece.start, 0))
            found += known
            if known < piece.length:
                break
        hits += min(found, request.prompt_len - 1) // block_size * block_size
        for piece in request.prompt:
            longest[piece.start] = max(piece.length, longest.get(piece.start, 0))
        answer = request.answer
        longest[answer.start] = max(answer.length - 1, longest.get(answer.start, 0))
    return hits
