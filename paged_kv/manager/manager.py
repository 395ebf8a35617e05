"""The block manager: which block holds which token of which sequence. It touches no tensor.

A call returns what has to be done to the cache tensors (slots to write, blocks to copy or swap), and the caller lets
the ops do it in the order of the calls, before anything else is written. Every call is all or nothing: it plans first,
raises or refuses there, and only then changes anything.

Invariants, which `check` verifies together with those of pool.py, tables.py, prefix.py and swap.py:

    ref_count[b] = entries of block tables that name b + pins that hold b
    blocks[g][digest[i]] = table[g][i]     for each named block i of a sequence: equal content is one block
    a block is written only by its one holder, and never while the prefix cache finds it

so only the block of a sequence's last token can need a copy before the next write: all others are full or its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np

from .._arguments import check_flag, check_integer, check_real
from ..errors import (
    DuplicateSequenceError,
    OutOfBlocksError,
    RollbackError,
    SharedBlockError,
    SwappedSequenceError,
)
from .admission import Admission, Admissions, AdmissionStatus
from .arguments import MAX_COUNT, hashable, instance, listing, window_sizes
from .beams import take_over
from .chain import ContentKey, TokenChain, content_keys
from .events import Dropped, Event, Forked, Preempted, Recorder, SwappedIn, SwappedOut
from .growth import Growth
from .pins import Pin, Pins
from .pool import BlockPool
from .prefix import Match, PrefixCache
from .publish import Publisher
from .stats import Stats, collect
from .swap import Swapper
from .tables import UNLIMITED, SequenceTables
from .tokens import Tokens, parse_batch, parse_lengths, parse_prompt


class Step(NamedTuple):
    """Answer of `append`: first do the copies, then write the tokens to their slots.

    slot_mappings: [groups, T] int64, the slot of each new token, packed in the order of the call.
    block_copies: (source, destination) pairs for `copy_blocks`; no destination is a source.
    """

    slot_mappings: np.ndarray
    block_copies: list[tuple[int, int]]

    @property
    def slot_mapping(self) -> np.ndarray:
        """[T] int64: the slots of the first group, which is the only one unless layers are grouped."""
        return self.slot_mappings[0]


class PagedKVCacheManager:
    """Block tables over a pool of `num_blocks` blocks of `block_size` slots.

    windows: one entry for each group of layers: None for full attention, else the sliding window in tokens. Every
        group has its own block table and draws on the same pool; a block serves the layers of one group.
    prefix_cache: find prompts' beginnings among the full blocks that `commit` published.
    identity: what cached content depends on besides tokens, the same for all sequences: model, revision, dtype.
    partial_hits: let a prompt also reuse the beginning of one more cached block, through a copy of it.
    num_host_blocks: blocks that `swap_out` may fill.
    pin_budget: blocks that pins may keep from eviction; half the pool by default.
    clock: seconds, for the expiry of pins.

    A call that raises has changed nothing, but for an interrupt (KeyboardInterrupt) in the middle of it: who goes on
    after one makes the calls of a step within `paged_kv.interrupts_wait()`, as the engine does. The calls don't do so
    each for themselves, since that takes longer than they do. Not for several threads at once.

    >>> m = PagedKVCacheManager(num_blocks=8, block_size=4)
    >>> m.admit("a", [11, 12, 13, 14, 15]).admitted
    True
    >>> m.append(["a"], [[11, 12, 13, 14, 15]]).slot_mapping.tolist()
    [0, 1, 2, 3, 4]
    >>> m.block_tables(["a"]).tolist()
    [[0, 1]]
    >>> m.commit(["a"])
    >>> m.free("a")
    >>> m.admit("b", [11, 12, 13, 14, 16]).num_cached_tokens
    4
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        windows: Sequence[int | None] = (None,),
        prefix_cache: bool = True,
        identity: str = "",
        partial_hits: bool = False,
        num_host_blocks: int = 0,
        pin_budget: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_blocks = check_integer("num_blocks", num_blocks, 1, MAX_COUNT)
        self.block_size = check_integer("block_size", block_size, 1, MAX_COUNT)
        self.windows = window_sizes(windows)
        check_flag("prefix_cache", prefix_cache)
        instance("identity", identity, str, "text")
        check_flag("partial_hits", partial_hits)
        num_host_blocks = check_integer("num_host_blocks", num_host_blocks, 0, MAX_COUNT)
        pin_budget = check_integer(
            "pin_budget", self.num_blocks // 2 if pin_budget is None else pin_budget, 0
        )
        instance("clock", clock, Callable, "a function")
        self.identity = identity
        self._recorder = Recorder()
        try:
            self._pool = BlockPool(self.num_blocks)
            self._tables = SequenceTables(len(self.windows), self.block_size)
            self._prefix = (
                PrefixCache(self._pool, self.block_size, self.windows, self._recorder, partial_hits)
                if prefix_cache
                else None
            )
            self._publisher = Publisher(self._pool, self._tables, self._prefix, self._recorder)
            self._swapper = Swapper(num_host_blocks, self._pool, self._tables, self._prefix)
        except MemoryError:  # often without a word
            sizes = f"{self.num_blocks}, {self.block_size} and {num_host_blocks}"
            raise MemoryError(
                f"num_blocks, block_size, num_host_blocks: expected what memory can keep account of, got {sizes}"
            ) from None
        self._growth = Growth(
            self._pool, self._tables, self._prefix, self._swapper, self._recorder, self._publisher.publish
        )
        self._pins = Pins(pin_budget, clock)
        self._admissions = Admissions(self._pool, self._tables, self._prefix, self.windows, identity)

    # Sequences come and go

    def admit(
        self,
        seq_id: Hashable,
        tokens: Tokens,
        *,
        keys: Sequence[ContentKey] = (),
        chunk_size: int | None = None,
    ) -> Admission:
        """Opens sequence `seq_id` if the prompt `tokens` (ids, or their number) fits now; see Admission.

        The sequence starts with its cached prefix only, at most all of the prompt but one token; `append` adds the
        other tokens, at once or in chunks. What it would take from the evictable blocks counts as taken.

        keys: what the content depends on besides tokens (salt, adapter, media).
        chunk_size: most tokens that will be appended between two commits, if the prompt is to be prefilled in
            chunks: a group with a window then needs no more blocks than the window and a chunk at a time.

        Raises DuplicateSequenceError if `seq_id` is held, TypeError, ValueError. Refusals change nothing.
        """
        self._publisher.publish()
        if seq_id in self._tables:
            raise DuplicateSequenceError(seq_id, "is admitted already")
        if chunk_size is not None:
            chunk_size = check_integer("chunk_size", chunk_size, 1)
        num_tokens, prompt = parse_prompt(tokens)
        keys = content_keys(keys)
        if sum(self._admissions.most_blocks(num_tokens, chunk_size)) > self.num_blocks:
            return Admission(AdmissionStatus.NEVER)
        chain = self._admissions.chain(prompt, keys)
        self.expire_pins()
        preempted = self._admissions.recall(seq_id, chain)
        match = self._admissions.find_fitting(chain, num_tokens, chunk_size)
        if match is None:
            self._admissions.remember(seq_id, chain, preempted)
            return Admission(AdmissionStatus.LATER)

        num_cached = match.num_tokens(self.block_size)
        self._open(seq_id, chain, match, num_cached)
        self._admissions.remembered.pop(seq_id, None)
        self._recorder.counters.admitted += 1
        if not preempted:  # what was computed before a preemption is no hit
            self._recorder.counters.prompt_tokens += num_tokens
            self._recorder.counters.cached_tokens += num_cached
        return Admission(AdmissionStatus.ADMITTED, num_cached)

    def fork(self, seq_id: Hashable, child_id: Hashable) -> None:
        """Opens `child_id` with the same tokens as `seq_id`, sharing every block that holds one of them.

        Whoever appends first to a shared partial block gets a copy of it; lookahead blocks stay with the
        parent. Raises UnknownSequenceError, or DuplicateSequenceError if `child_id` is held.
        """
        self._publisher.publish()
        parent = self._tables.row(seq_id)
        hashable("child_id", child_id)
        if child_id in self._tables:
            raise DuplicateSequenceError(child_id, "is admitted already")
        self._tables.room[parent] = 0
        child = self._tables.restore(child_id, self._tables.save(parent))
        self._pool.hold(self._tables.held_backwards(child))
        self._recorder.counters.forked += 1
        if self._recorder.subscribers:
            self._recorder.emit(Forked(seq_id, child_id, int(self._tables.num_blocks[child])))

    def reorder(self, seq_ids: Sequence[Hashable], parents: Sequence[Hashable]) -> None:
        """The beam step: sequence `seq_ids[i]` goes on from what `parents[i]` holds now, for all i at once.

        Beams that are nobody's parent lose their content, and its blocks are free where nobody shares them. A parent
        may stand several times, and may be a sequence that is not reordered itself. Lookahead blocks of reordered
        sequences are let go. Raises UnknownSequenceError, DuplicateSequenceError (of seq_ids), ValueError.
        """
        self._publisher.publish()
        tables = self._tables
        rows = tables.rows(seq_ids)
        listing("parents", parents, "a sequence of ids")
        if len(parents) != len(rows):
            raise ValueError(
                f"parents: expected one entry for each of the {len(rows)} seq_ids, got {len(parents)}"
            )
        sources = np.array([tables.row(parent) for parent in parents], np.int64)
        moved = np.flatnonzero(rows != sources)
        if not len(moved):
            return
        moves = [(seq_ids[i], int(rows[i])) for i in moved.tolist()] if self._recorder.subscribers else []
        for seq_id, row in moves:
            self._tell_dropped(seq_id, row, 0)
        take_over(tables, self._pool, rows[moved], sources[moved])
        for seq_id, row in moves:
            self._tell_held(seq_id, row)
        self._recorder.counters.forked += len(moved)

    def free(self, seq_id: Hashable) -> None:
        """Lets go of all blocks of `seq_id`, on the device or on the host.

        A second free raises UnknownSequenceError and changes nothing.
        """
        self._publisher.publish()
        try:
            row = self._tables.row(seq_id)
        except SwappedSequenceError:
            self._swapper.free(seq_id)
            return
        self._drop(seq_id, row, 0)
        self._tables.close(seq_id)

    def preempt(self, seq_id: Hashable) -> None:
        """Frees `seq_id`, to be admitted again later with the tokens it has now.

        Its digests are remembered, and what it finds in the cache then is not counted as a hit.
        """
        self._publisher.publish()
        row = self._tables.row(seq_id)
        self._admissions.remember_held(seq_id, row)
        self._recorder.counters.preempted += 1
        if self._recorder.subscribers:
            self._recorder.emit(Preempted(seq_id))
        self.free(seq_id)

    # Sequences grow and shrink

    def append(
        self, seq_ids: Sequence[Hashable], tokens: np.ndarray | Sequence[Tokens], *, lookahead: int = 0
    ) -> Step:
        """Gives the next tokens of each of the distinct sequences their slots: one call for a whole batch.

        tokens: for each sequence its new token ids or, where they are not known, their number; or an integer
            array [S, n] of n ids for each, the quickest form (n = 1 for decode).
        lookahead: slots to have ready beyond the new tokens (drafts); they are not part of seq_len.

        Raises OutOfBlocksError (needed, free), UnknownSequenceError, SwappedSequenceError,
        DuplicateSequenceError, ValueError; then nothing has changed for any sequence of the call.
        """
        tables = self._tables
        rows = tables.rows(seq_ids)
        batch = parse_batch(tokens, len(rows))
        if type(lookahead) is not int or lookahead < 0:
            lookahead = check_integer("lookahead", lookahead, 0)
        self.expire_pins()
        old = None if batch.unknown is None else tables.seq_len[rows]
        if batch.counts is None and not lookahead:
            slots, block_copies = self._growth.one_each(rows)
        else:
            counts = batch.counts or [1] * len(rows)
            slots, block_copies = self._growth.many(rows, counts, lookahead)
        if batch.unknown is not None:
            limit = np.where(batch.unknown & (tables.seq_len[rows] > old), old, UNLIMITED)
            tables.known_len[rows] = np.minimum(tables.known_len[rows], limit)
        if batch.ids is not None and self._prefix is not None:
            for group_slots in slots:
                self._prefix.token_at[group_slots] = batch.ids
        return Step(slots, block_copies)

    def commit(self, seq_ids: Sequence[Hashable], seq_lens: Sequence[int] | np.ndarray | None = None) -> None:
        """Says that keys and values of each sequence's tokens are computed, of the first `seq_lens` or else of all.

        Full blocks of them can be found from then on. One whose content the cache holds already is let go, and the
        table names the other one instead. That is put off to the next call that depends on it, so fetch the tables of
        a step after its last other call. Blocks that no later token can see through a group's window are let go too.
        Tokens that may be taken back (drafts) are committed once they are accepted, after `rollback`.

        Raises UnknownSequenceError, SwappedSequenceError, DuplicateSequenceError; ValueError for a length
        beyond seq_len or below what was committed.
        """
        tables = self._tables
        rows = tables.rows(seq_ids)
        lengths = tables.seq_len[rows]
        if seq_lens is not None:
            most, lengths = lengths, parse_lengths("seq_lens", seq_lens, len(rows))
            for i in ((lengths > most) | (lengths < tables.computed_len[rows])).nonzero()[0].tolist():
                low, high = tables.computed_len[rows[i]], most[i]
                expected = f"{low}" if low == high else f"an integer from {low} to {high}"
                raise ValueError(
                    f"seq_lens: expected {expected} for sequence {seq_ids[i]!r}, got {lengths[i]}"
                )
        tables.computed_len[rows] = lengths
        self._publisher.pending = self._prefix is not None
        for group, window in enumerate(self.windows):
            if window is not None:
                self._publisher.publish()
                self._publisher.slide(seq_ids, rows, group, window)

    def rollback(self, seq_ids: Sequence[Hashable], seq_lens: Sequence[int] | np.ndarray) -> None:
        """Cuts each of the distinct sequences to its first `seq_lens` tokens; lookahead blocks are let go too.

        A block that others hold or the prefix cache finds is not changed: the next append copies it if it has to.
        Raises RollbackError (lowest, highest) for a length beyond seq_len, or one whose next token would see
        blocks that are behind a window by now; UnknownSequenceError, SwappedSequenceError,
        DuplicateSequenceError, ValueError; nothing has changed then.
        """
        self._publisher.publish()
        tables, size = self._tables, self.block_size
        rows = tables.rows(seq_ids)
        lengths = parse_lengths("seq_lens", seq_lens, len(rows))
        highest = tables.seq_len[rows]
        lowest = np.zeros_like(highest)
        for window, first in zip(self.windows, tables.first_block[:, rows], strict=True):
            if window is not None:
                lowest = np.maximum(lowest, np.where(first > 0, first * size + window - 1, 0))
        lowest = np.minimum(lowest, highest)
        wrong = np.flatnonzero((lengths > highest) | (lengths < lowest))
        if len(wrong):
            i = wrong[0]
            raise RollbackError(seq_ids[i], int(lengths[i]), int(lowest[i]), int(highest[i]))
        tables.room[rows] = 0
        num_blocks = -(-lengths // size)
        for i in np.flatnonzero(lengths < highest).tolist():
            del tables.chains[int(rows[i])].digests[int(lengths[i]) // size :]
        for i in np.flatnonzero(num_blocks < tables.num_blocks[rows]).tolist():
            self._drop(seq_ids[i], int(rows[i]), int(num_blocks[i]))
        tables.seq_len[rows] = lengths
        tables.computed_len[rows] = np.minimum(tables.computed_len[rows], lengths)
        tables.num_named[rows] = np.minimum(tables.num_named[rows], lengths // size)
        tables.known_len[rows[lengths <= tables.known_len[rows]]] = UNLIMITED

    def allocate_token_slot(self, seq_id: Hashable, current_seq_len: int) -> int:
        """The block that holds token number `current_seq_len` (counted from 1) of `seq_id`, in the first group.

        The smallest useful call: number 1 of an unknown sequence opens it, and the number after its last token
        appends one, so that counting up gives each token its block. Raises ValueError for any other number,
        OutOfBlocksError, and SharedBlockError where the append would need a block copy; nothing has changed then.
        """
        tables, size = self._tables, self.block_size
        opened = seq_id not in tables and current_seq_len == 1
        seq_len = 0 if opened else self.seq_len(seq_id)
        if type(current_seq_len) is not int or not 1 <= current_seq_len <= seq_len + 1:
            current_seq_len = check_integer(f"current_seq_len of {seq_id!r}", current_seq_len, 1, seq_len + 1)
        if opened and not self.admit(seq_id, 1).admitted:
            raise OutOfBlocksError(len(self.windows), self._pool.num_available)
        if current_seq_len == seq_len + 1:
            if seq_len % size:
                self.expire_pins()  # as append will, so that it finds what is found here
                shared, cached = self._growth.plan_copies([tables.row(seq_id)])
                if len(cached) > self._pool.num_available:
                    cached = []  # the append would write in place, and the cache forget them
                for group, row, place in shared + cached:
                    raise SharedBlockError(seq_id, int(tables.blocks[group, row, place]))
            self.append([seq_id], [1])
        return int(tables.blocks[0, tables.row(seq_id), (current_seq_len - 1) // size])

    # The prefix cache as a whole

    def pin(self, tokens: Tokens, *, keys: Sequence[ContentKey] = (), seconds: float | None = None) -> Pin:
        """Keeps the cached full blocks of this prefix from eviction, for `seconds` or until `unpin`.

        The answer tells how many tokens are pinned: what is not cached now can't be (0 then). Raises PinBudgetError
        (needed, left) and changes nothing if that is more than the budget has left.
        """
        num_tokens, prompt = parse_prompt(tokens)
        keys = content_keys(keys)
        if seconds is not None:
            seconds = check_real("seconds", seconds, "a number of at least 0", lambda span: span >= 0)
        self._publisher.publish()
        self.expire_pins()
        match = Match.empty(len(self.windows))
        chain = self._admissions.chain(prompt, keys)
        if chain.prompt:
            match = self._prefix.find(chain, num_tokens // self.block_size)
        blocks = match.flat_blocks()
        pin = self._pins.add(blocks, match.num_tokens(self.block_size), seconds)
        self._pool.hold(blocks)
        return pin

    def unpin(self, pin: Pin) -> None:
        """Lets go of a pin; one that has expired or was let go already is ignored."""
        instance("pin", pin, Pin, "a Pin")
        if pin in self._pins.blocks:
            self._pool.drop(self._pins.remove(pin)[::-1])

    def expire_pins(self) -> None:
        """Lets go of the pins whose time is over. Calls that need blocks do this by themselves."""
        if self._pins.blocks:
            for pin in self._pins.expired():
                self.unpin(pin)

    def reset_prefix_cache(self) -> None:
        """Forgets all cached content, as after new weights; what runs now is not published any more."""
        self._publisher.publish()
        if self._prefix is None:
            return
        for pin in list(self._pins.blocks):
            self.unpin(pin)
        for block in np.flatnonzero(self._pool.cached).tolist():
            self._prefix.forget([block])
            self._pool.uncache(block)
        tables = self._tables
        for row in tables.row_of.values():
            tables.num_named[row] = 0
            tables.known_len[row] = 0 if tables.seq_len[row] else UNLIMITED
            tables.chains[row].digests.clear()
        self._swapper.forget_names()

    # Swap

    def swap_out(self, seq_ids: Sequence[Hashable]) -> list[tuple[int, int]]:
        """Moves sequences to host blocks. Returns the (device block, host block) pairs for `swap_blocks`.

        Do the copies before anything else is written. Shared blocks are copied once and stay shared, and
        lookahead blocks are let go. A swapped sequence can be swapped in or freed, nothing else. Raises
        OutOfHostBlocksError (needed, free), UnknownSequenceError, SwappedSequenceError,
        DuplicateSequenceError; then nothing has changed.
        """
        self._publisher.publish()
        pairs = self._swapper.out(seq_ids)
        self._recorder.counters.swapped_out += len(pairs)
        if self._recorder.subscribers:
            self._recorder.emit(SwappedOut(tuple(seq_ids), tuple(pairs)))
        return pairs

    def swap_in(self, seq_ids: Sequence[Hashable]) -> list[tuple[int, int]]:
        """Moves sequences back to device blocks. Returns the (host block, device block) pairs for
        `swap_blocks`.

        What is still on the device, held by others or in the prefix cache, is held again and not copied.
        Raises OutOfBlocksError (needed, free) if that does not fit, UnknownSequenceError,
        ResidentSequenceError, DuplicateSequenceError; then nothing has changed.
        """
        self._publisher.publish()
        self.expire_pins()
        pairs = self._swapper.back(seq_ids)
        self._tables.room[:] = 0  # what comes back may share a block that another sequence was writing
        self._recorder.counters.swapped_in += len(pairs)
        if self._recorder.subscribers:
            self._recorder.emit(SwappedIn(tuple(seq_ids), tuple(pairs)))
            for seq_id in seq_ids:
                self._tell_held(seq_id, self._tables.row(seq_id))
        return pairs

    # Looking things up

    def __contains__(self, seq_id: Hashable) -> bool:
        return seq_id in self._tables

    def seq_len(self, seq_id: Hashable) -> int:
        """Tokens that have a slot."""
        return int(self._tables.seq_len[self._tables.row(seq_id)])

    def seq_lens(self, seq_ids: Sequence[Hashable]) -> np.ndarray:
        """Tokens that have a slot, [S] int32, as `paged_attention` takes them."""
        return self._tables.seq_len[self._tables.rows(seq_ids)].astype(np.int32)

    def block_tables(self, seq_ids: Sequence[Hashable], group: int = 0) -> np.ndarray:
        """Block table of each sequence in the group, [S, M] int32; M reaches to the longest (at least 1).

        Entries beyond a sequence's last block, or before its window, are valid block ids without meaning.
        """
        tables = self._tables
        self._check_group(group)
        rows = tables.rows(seq_ids)
        width = max(1, int(tables.num_blocks[rows].max(initial=0)))
        return tables.blocks[group][rows, :width]

    def slots(self, seq_ids: Sequence[Hashable], group: int = 0) -> np.ndarray:
        """Slot of every token of the sequences in the group, packed in order, [sum(seq_lens)] int64.

        Tokens before the group's window may be without a slot by then; theirs have no meaning.
        """
        tables = self._tables
        self._check_group(group)
        rows = tables.rows(seq_ids)
        size, seq_lens = self.block_size, tables.seq_len[rows].tolist()
        blocks = [
            tables.blocks[group, row, : -(-n // size)] for row, n in zip(rows.tolist(), seq_lens, strict=True)
        ]
        slots = tables.slots_of(np.concatenate([np.zeros(0, np.int32), *blocks]))
        if len(slots) == sum(seq_lens):
            return slots
        held, end = np.ones(len(slots), np.bool_), 0
        for n in seq_lens:
            end += -(-n // size) * size
            held[end - -n % size : end] = False
        return slots[held]

    @property
    def has_prefix_cache(self) -> bool:
        return self._prefix is not None

    @property
    def num_available_blocks(self) -> int:
        """Blocks that could be handed out now: free ones and evictable ones."""
        self._publisher.publish()
        return self._pool.num_available

    def holders(self) -> np.ndarray:
        """How many hold each block, sequences and pins: [num_blocks] int32, 0 evictable, -1 free.

        For pictures of the pool: costs O(blocks).
        """
        return np.where(np.frombuffer(self._pool.is_free, np.bool_), np.int32(-1), self._pool.refs)

    def subscribe(self, subscriber: Callable[[Event], None]) -> None:
        """Calls `subscriber` with every event from now on; see events.py.

        It is called in the middle of a change, so it must not call the manager. What it raises is logged and changes
        nothing of the call.
        """
        instance("subscriber", subscriber, Callable, "a function")
        self._recorder.subscribers.append(subscriber)

    def stats(self) -> Stats:
        """What the blocks are used for now, and totals. Costs O(sequences)."""
        return collect(self._pool, self._tables, self._pins, self._swapper.host, self._recorder.counters)

    def check(self) -> None:
        """Verifies every invariant; raises AssertionError naming a broken one. For tests: O(blocks)."""
        holders = self._tables.check(self.num_blocks)
        for blocks in self._pins.blocks.values():
            holders[blocks] += 1
        self._pool.check(holders)
        self._pins.check()
        self._swapper.check()
        if self._prefix is not None:
            self._prefix.check()
            for row in self._tables.row_of.values():
                self._prefix.check_sequence(self._tables, row)
        self._growth.check()

    # Steps of the calls above

    def _check_group(self, group: int) -> None:
        if type(group) is not int or not 0 <= group < len(self.windows):
            check_integer("group", group, 0, len(self.windows) - 1)

    def _set(self, seq_id: Hashable, group: int, start: int, blocks: list[int]) -> None:
        """The sequence's table names `blocks` from place `start` on."""
        row = self._tables.row_of[seq_id]
        self._tables.blocks[group, row, start : start + len(blocks)] = blocks
        self._recorder.held(seq_id, group, start, blocks)

    def _drop(self, seq_id: Hashable, row: int, start: int) -> None:
        """Lets go of the blocks from place `start` on, in every group."""
        tables = self._tables
        if self._recorder.subscribers:
            self._tell_dropped(seq_id, row, start)
        self._pool.drop(tables.held_backwards(row, start))
        tables.num_blocks[row] = start

    def _tell_dropped(self, seq_id: Hashable, row: int, start: int) -> None:
        for group, first in enumerate(self._tables.first_block[:, row].tolist()):
            stop = int(self._tables.num_blocks[row])
            self._recorder.emit(Dropped(seq_id, group, max(start, first), stop))

    def _tell_held(self, seq_id: Hashable, row: int) -> None:
        for group, first in enumerate(self._tables.first_block[:, row].tolist()):
            self._recorder.held(seq_id, group, first, self._tables.held(group, row).tolist())

    def _open(self, seq_id: Hashable, chain: TokenChain, match: Match, num_tokens: int) -> None:
        """A row that starts with the cached prefix `match`."""
        tables = self._tables
        self._pool.hold(match.flat_blocks())
        row = tables.open(seq_id, chain)
        tables.reserve_width(match.num_blocks)
        tables.num_blocks[row] = match.num_blocks
        tables.first_block[:, row] = match.first
        tables.seq_len[row] = tables.computed_len[row] = num_tokens
        tables.num_named[row] = num_tokens // self.block_size
        for group, blocks in enumerate(match.blocks):
            self._set(seq_id, group, match.first[group], blocks)
