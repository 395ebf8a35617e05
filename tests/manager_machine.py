"""Drives the manager and its slow model through the same calls, with cache content that is really written and
moved.

After every call the two must agree: on the answer or the error and its numbers, on every count and total, on
    the
order of eviction, and, block by block, on which sequences name the same block. The content that each sequence
finds through its slots must be what was written for its tokens. A call that raises must have changed nothing
at all.
"""

from __future__ import annotations

import copy
import hashlib
from dataclasses import asdict

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from manager_mirror import Mirror
from manager_model import Model

from paged_kv import errors
from paged_kv.manager import ContentKey, PagedKVCacheManager

KEYS = [
    (),
    (ContentKey("salt", "x"),),
    (ContentKey("adapter", "x"),),
    (ContentKey("media", b"cat", 1, 4),),
    (ContentKey("media", b"dog", 1, 4), ContentKey("salt", "x")),
]

# A few texts, so that prompts meet often: beginnings of them, and sometimes another ending.
TEXTS = [[0] * 24, [0, 1] * 12, [0, 0, 1] * 8, [0] * 8 + [1] * 16]
tails = st.lists(st.integers(0, 1), max_size=6)
tokens_of = st.builds(
    lambda text, length, tail: TEXTS[text][:length] + tail,
    st.integers(0, 3),
    st.integers(0, 18),
    st.one_of(st.just([]), tails),
)
some = st.integers(0, 2**16)


class ArrayCache:
    """One number a slot, on the device and on the host."""

    def __init__(self, num_blocks, num_host_blocks, block_size):
        self.device = np.zeros((num_blocks, block_size), np.int64)
        self.host = np.zeros((num_host_blocks, block_size), np.int64)

    def write(self, slots, values):
        self.device.reshape(-1)[slots] = values

    def copy(self, pairs):
        assert not {s for s, _ in pairs} & {d for _, d in pairs}
        for source, destination in pairs:
            self.device[destination] = self.device[source]

    def swap_out(self, pairs):
        for source, destination in pairs:
            self.host[destination] = self.device[source]

    def swap_in(self, pairs):
        for source, destination in pairs:
            self.device[destination] = self.host[source]

    def read(self, manager, seq_id, group, start):
        slots = manager.slots([seq_id], group)
        return self.device.reshape(-1)[slots[start:]].tolist()


def snapshot(manager):
    """Everything that a failed call must leave as it was, as plain values."""
    pool, tables, prefix = manager._pool, manager._tables, manager._prefix
    rows = {
        seq_id: (
            tables.seq_len[row],
            tables.computed_len[row],
            tables.known_len[row],
            tables.num_named[row],
            tables.num_blocks[row],
            tables.first_block[:, row].tolist(),
            [tables.held(group, row).tolist() for group in range(len(manager.windows))],
        )
        for seq_id, row in tables.row_of.items()
    }
    away = {
        seq_id: (
            s.seq_len,
            s.computed_len,
            s.known_len,
            s.num_named,
            s.first_block.tolist(),
            copy.deepcopy(s.blocks),
        )
        for seq_id, s in tables.away.items()
    }

    def pool_state(pool):
        lists = pool._whole, pool._broken, pool._extent_free, pool.ref_count, pool.generation
        return pool.num_free, pool.evictable(), bytes(pool.is_cached), *map(list, lists)

    return (
        rows,
        away,
        pool_state(pool),
        pool_state(manager._swapper.host),
        prefix.entries(),
        copy.deepcopy(prefix.continuations),
        prefix.tokens.tolist(),
        dict(manager._swapper.device_of),
        {pin: blocks.tolist() for pin, blocks in manager._pins.blocks.items()},
        manager.stats(),
    )


class ManagerMachine(RuleBasedStateMachine):
    cache_type = ArrayCache

    @initialize(
        num_blocks=st.integers(4, 40),
        block_size=st.integers(1, 4),
        windows=st.sampled_from([(None,), (None,), (None,), (3,), (None, 5), (None, None), (2, None, 7)]),
        partial_hits=st.booleans(),
        num_host_blocks=st.integers(0, 12),
        pin_budget=st.integers(0, 6),
        prompts=st.lists(tokens_of, max_size=4),
        heard=st.booleans(),
    )
    def start(
        self, num_blocks, block_size, windows, partial_hits, num_host_blocks, pin_budget, prompts, heard
    ):
        self.now = 0.0
        self.real = PagedKVCacheManager(
            num_blocks,
            block_size,
            windows=windows,
            partial_hits=partial_hits,
            num_host_blocks=num_host_blocks,
            pin_budget=pin_budget,
            clock=lambda: self.now,
        )
        self.model = Model(num_blocks, block_size, windows, partial_hits, num_host_blocks, pin_budget)
        self.cache = self.cache_type(num_blocks, num_host_blocks, block_size)
        self.ids = {}  # model block -> id
        self.names = 0
        self.mirror = Mirror(len(windows)) if heard else None
        if heard:
            self.real.subscribe(self.mirror)
        for tokens in prompts:
            self.serve(tokens, (), 6)

    # Choosing

    @property
    def seq_ids(self):
        return sorted([*self.model.device, *self.model.host])

    def pick(self, choice):
        """Mostly a sequence that is held, sometimes one that isn't."""
        names = [*self.seq_ids, -1]
        return names[choice % len(names)]

    def pick_some(self, choices):
        names = sorted(self.model.device)
        return list(dict.fromkeys(names[c % len(names)] for c in choices)) if names else []

    def new_name(self):
        self.names += 1
        return self.names

    # Comparing

    def both(self, real_call, model_call, publishes=True):
        """Both answers, or None where both raise the same error and nothing has changed."""
        if publishes:
            self.model.publish()
        try:
            expected = model_call()
        except (errors.PagedKVError, ValueError) as error:
            self.refuse(error, real_call)
            return None
        answer = real_call()
        self.compare()
        return answer, expected

    def refuse(self, error, real_call):
        """The manager raises what the model has raised, and nothing has changed."""
        before, pending = snapshot(self.real), self.real._publisher.pending
        try:
            real_call()
        except type(error) as raised:
            for name in ("needed", "free", "left", "seq_id"):
                assert getattr(raised, name, None) == getattr(error, name, None), name
        else:
            raise AssertionError(f"{type(error).__name__} was not raised") from error
        self.compare()
        assert pending or snapshot(self.real) == before

    def compare(self):
        real, model = self.real, self.model
        real.check()
        for seq_id, seq in model.device.items():
            row = real._tables.row(seq_id)
            for group, blocks in enumerate(seq.blocks):
                self.match(real._tables.held(group, row).tolist(), [block for block in blocks if block])
                assert real._tables.first_block[group, row] == sum(block is None for block in blocks)
            assert real.seq_len(seq_id) == len(seq.tokens)
            assert real._tables.computed_len[row] == seq.computed
            assert real._tables.num_named[row] == seq.named
            self.compare_content(seq_id, seq)
        for seq_id, seq in model.host.items():
            for held, blocks in zip(real._tables.away[seq_id].blocks, seq.blocks, strict=True):
                self.match(held, [block for block in blocks if block])
        held = [b for s in (*model.device.values(), *model.host.values()) for g in s.blocks for b in g if b]
        for place in (model.device, model.host):
            blocks = {block for seq in place.values() for group in seq.blocks for block in group if block}
            assert len({self.ids[block] for block in blocks}) == len(blocks)
        assert real._pool.evictable() == [self.ids[block] for block in model.lru]
        self.ids = {block: self.ids[block] for block in (*held, *model.lru, *model.cached.values())}
        stats = real.stats()
        in_use = {
            block: block.holders for s in model.device.values() for g in s.blocks for block in g if block
        }
        in_use.update({block: block.holders for blocks in model.pins.values() for block in blocks})
        assert stats.num_free_blocks == model.free
        assert stats.num_evictable_blocks == len(model.lru)
        assert stats.num_used_blocks == len(in_use)
        assert stats.num_shared_blocks == sum(count > 1 for count in in_use.values())
        assert stats.num_saved_blocks == sum(in_use.values()) - len(in_use)
        assert stats.num_pinned_blocks == len({block for blocks in model.pins.values() for block in blocks})
        assert stats.num_host_blocks - stats.num_used_host_blocks == model.host_free
        assert (stats.num_sequences, stats.num_swapped_sequences) == (len(model.device), len(model.host))
        assert stats.num_held_tokens == model.held_tokens()
        assert asdict(stats.counters) == model.count
        if self.mirror:
            self.mirror.compare(real)

    def match(self, ids, blocks):
        assert len(ids) == len(blocks)
        for block_id, block in zip(ids, blocks, strict=True):
            assert self.ids.setdefault(block, block_id) == block_id

    def compare_content(self, seq_id, seq):
        for group, blocks in enumerate(seq.blocks):
            start = sum(block is None for block in blocks) * self.model.size
            if group == 0:
                assert self.real.block_tables([seq_id])[0, : len(blocks)].tolist()[
                    start // self.model.size :
                ] == [self.ids[block] for block in blocks if block]
            expected = [self.value(seq, group, position) for position in range(start, len(seq.tokens))]
            assert self.cache.read(self.real, seq_id, group, start) == expected

    def value(self, seq, group, position):
        """What a layer of the group writes for the token: it depends on all tokens up to it and on keys."""
        text = seq.text(position + 1)
        data = repr((group, [str(t) for t in text[0]], sorted(map(str, text[1])))).encode()
        return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "little") >> 9

    # Calls

    @rule(tokens=tokens_of, keys=st.sampled_from(KEYS), chunk=st.sampled_from([None, None, 2, 5]), again=some)
    def admit(self, tokens, keys, chunk, again):
        seq_id = self.new_name() if again % 4 else self.pick(again // 4)
        tokens = tokens if again % 5 else len(tokens)
        form = tokens if again % 2 or isinstance(tokens, int) else np.array(tokens, np.int64)
        both = self.both(
            lambda: self.real.admit(seq_id, form, keys=keys, chunk_size=chunk),
            lambda: self.model.admit(seq_id, tokens, keys, chunk),
        )
        if both:
            answer, expected = both
            assert (answer.status.value, answer.num_cached_tokens) == expected

    @rule(tokens=tokens_of, keys=st.sampled_from(KEYS[:2]), chunk=st.sampled_from([3, 6, 50]))
    def serve(self, tokens, keys, chunk):
        """A prompt's whole way: admitted, appended and committed in chunks."""
        seq_id = self.new_name()
        both = self.both(
            lambda: self.real.admit(seq_id, tokens, keys=keys, chunk_size=chunk),
            lambda: self.model.admit(seq_id, tokens, keys, chunk),
        )
        status, cached = both[1]
        assert (both[0].status.value, both[0].num_cached_tokens) == both[1]
        while status == "admitted" and cached < len(tokens):
            part = tokens[cached : cached + chunk]
            self.do_append({seq_id: list(part)}, [part], 0)
            cached += chunk
            done = len(self.model.device[seq_id].tokens)
            self.both(
                lambda: self.real.commit([seq_id]),
                lambda done=done: self.model.commit({seq_id: done}),
                publishes=False,
            )

    @rule(choice=some)
    def come_back(self, choice):
        """Admits a preempted sequence again, as often as it takes."""
        if self.model.preempted:
            names = sorted(self.model.preempted)
            seq_id = names[choice % len(names)]
            tokens = TEXTS[choice // 32 % 4][: choice % 32]
            both = self.both(
                lambda: self.real.admit(seq_id, tokens), lambda: self.model.admit(seq_id, tokens, (), None)
            )
            if both:
                assert (both[0].status.value, both[0].num_cached_tokens) == both[1]

    @rule(
        choices=st.lists(some, min_size=1, max_size=4),
        tokens=st.lists(tokens_of, min_size=4, max_size=4),
        lookahead=st.sampled_from([0, 0, 0, 1, 6]),
        form=st.integers(0, 7),
    )
    def append(self, choices, tokens, lookahead, form):
        seq_ids = self.pick_some(choices) or [self.pick(choices[0])]
        if form == 0:
            seq_ids = list(dict.fromkeys(self.pick(choice) for choice in choices))
        given = [tokens[i] for i in range(len(seq_ids))]
        if form == 1:
            given = [len(entry) for entry in given]
        elif form == 2:
            given = [len(given[0]), *given[1:]]
        elif form >= 5:
            given = [entry[-1:] or [0] for entry in given]
        listed = [[object() for _ in range(e)] if isinstance(e, int) else list(e) for e in given]
        arrayed = np.array(given) if form >= 6 else given
        self.do_append(dict(zip(seq_ids, listed, strict=True)), arrayed, lookahead)

    def do_append(self, batch, given, lookahead):
        old = {seq_id: len(seq.tokens) for seq_id, seq in self.model.device.items()}
        try:
            copies = self.model.append(batch, lookahead)
        except errors.PagedKVError as error:
            self.refuse(error, lambda: self.real.append(list(batch), given, lookahead=lookahead))
            return
        step = self.real.append(list(batch), given, lookahead=lookahead)
        self.cache.copy(step.block_copies)
        for group, slots in enumerate(step.slot_mappings):
            seqs = [(seq_id, self.model.device[seq_id]) for seq_id in batch]
            values = [
                self.value(seq, group, position)
                for seq_id, seq in seqs
                for position in range(old[seq_id], len(seq.tokens))
            ]
            self.cache.write(slots, np.array(values, np.int64))
        self.compare()
        assert [
            self.ids.get(source, pair[0])
            for source, pair in zip((s for s, _ in copies), step.block_copies, strict=True)
        ] == [source for source, _ in step.block_copies]
        assert [self.ids[destination] for _, destination in copies] == [d for _, d in step.block_copies]

    @rule(
        choices=st.lists(some, min_size=1, max_size=4),
        short=st.lists(st.integers(-1, 3), min_size=4, max_size=4),
    )
    def commit(self, choices, short):
        seq_ids = self.pick_some(choices)
        lengths = {s: len(self.model.device[s].tokens) - short[i] for i, s in enumerate(seq_ids)}
        if sum(map(abs, short)) % 2:
            lengths = {s: len(self.model.device[s].tokens) for s in seq_ids}
            self.both(lambda: self.real.commit(seq_ids), lambda: self.model.commit(lengths), publishes=False)
        else:
            self.both(
                lambda: self.real.commit(seq_ids, list(lengths.values())),
                lambda: self.model.commit(lengths),
                publishes=False,
            )

    @rule(
        choices=st.lists(some, min_size=1, max_size=3),
        cut=st.lists(st.integers(-1, 6), min_size=3, max_size=3),
    )
    def rollback(self, choices, cut):
        seq_ids = self.pick_some(choices)
        lengths = {s: len(self.model.device[s].tokens) - cut[i] for i, s in enumerate(seq_ids)}
        self.both(
            lambda: self.real.rollback(seq_ids, list(lengths.values())), lambda: self.model.rollback(lengths)
        )

    @rule(choices=st.lists(some, min_size=1, max_size=2), tokens=tokens_of, keep=some)
    def speculate(self, choices, tokens, keep):
        """Drafts, of which some are accepted: the accepted ones alone are committed."""
        for seq_id in self.pick_some(choices):
            length = len(self.model.device[seq_id].tokens)
            self.do_append({seq_id: list(tokens)}, [tokens], 0)
            accepted = min(length + keep % (len(tokens) + 1), len(self.model.device[seq_id].tokens))
            self.both(
                lambda s=seq_id, n=accepted: self.real.rollback([s], [n]),
                lambda s=seq_id, n=accepted: self.model.rollback({s: n}),
            )
            self.both(
                lambda s=seq_id: self.real.commit([s]),
                lambda s=seq_id, n=accepted: self.model.commit({s: n}),
                publishes=False,
            )

    @rule(choice=some, child=some)
    def fork(self, choice, child):
        seq_id, child_id = self.pick(choice), self.new_name() if child % 8 else self.pick(child // 8)
        self.both(lambda: self.real.fork(seq_id, child_id), lambda: self.model.fork(seq_id, child_id))

    @rule(choices=st.lists(some, min_size=1, max_size=4), parents=st.lists(some, min_size=4, max_size=4))
    def reorder(self, choices, parents):
        seq_ids = self.pick_some(choices)
        moves = {s: self.pick(parents[i]) for i, s in enumerate(seq_ids)}
        self.both(lambda: self.real.reorder(seq_ids, list(moves.values())), lambda: self.model.reorder(moves))

    @rule(choice=some, really=some)
    def free(self, choice, really):
        seq_id = self.pick(choice)
        if really % 3 and len(self.seq_ids) < 6:
            return
        self.both(lambda: self.real.free(seq_id), lambda: self.model.release(seq_id))

    @rule(choice=some, really=some)
    def preempt(self, choice, really):
        seq_id = self.pick(choice)
        if really % 2 and len(self.seq_ids) < 6:
            return
        self.both(lambda: self.real.preempt(seq_id), lambda: self.model.preempt(seq_id))

    @rule(tokens=tokens_of, keys=st.sampled_from(KEYS), seconds=st.sampled_from([None, 1, 3]), like=some)
    def pin(self, tokens, keys, seconds, like):
        if like % 2 and self.model.device:
            seq = self.model.device[sorted(self.model.device)[like // 2 % len(self.model.device)]]
            tokens, keys = [token for token in seq.tokens if isinstance(token, int)], seq.keys
        both = self.both(
            lambda: self.real.pin(tokens, keys=keys, seconds=seconds), lambda: self.model_pin(tokens, keys)
        )
        if both:
            pin, (key, num_tokens) = both
            assert pin.num_tokens == num_tokens
            self.model.pins[pin] = self.model.pins.pop(key)

    def model_pin(self, tokens, keys):
        blocks, num_tokens = self.model.pin(tokens, keys)
        key = object()
        self.model.pins[key] = blocks
        return key, num_tokens

    @rule(choice=some)
    def unpin(self, choice):
        if self.model.pins:
            pin = list(self.model.pins)[choice % len(self.model.pins)]
            self.both(lambda: self.real.unpin(pin), lambda: self.model.unpin(pin), publishes=False)
            self.real.unpin(pin)  # once more changes nothing
            self.compare()

    @rule(seconds=st.integers(1, 2))
    def wait(self, seconds):
        self.now += seconds
        expired = [pin for pin in self.model.pins if pin.expires_at <= self.now]
        self.both(self.real.expire_pins, lambda: [self.model.unpin(pin) for pin in expired], publishes=False)

    @rule(really=some)
    def reset(self, really):
        if really % 10 == 0:
            self.both(self.real.reset_prefix_cache, self.model.reset)

    @rule(choices=st.lists(some, min_size=1, max_size=3), strange=some)
    def swap_out(self, choices, strange):
        seq_ids = self.pick_some(choices) if strange % 8 else [self.pick(choices[0])]
        both = self.both(lambda: self.real.swap_out(seq_ids), lambda: self.model.swap_out(seq_ids))
        if both:
            pairs, expected = both
            assert [self.ids[h] for _, h in expected] == [h for _, h in pairs]
            self.cache.swap_out(pairs)

    @rule(choices=st.lists(some, min_size=1, max_size=3), strange=some)
    def swap_in(self, choices, strange):
        names = sorted(self.model.host)
        seq_ids = list(dict.fromkeys(names[c % len(names)] for c in choices)) if names else []
        if strange % 8 == 0:
            seq_ids = [self.pick(choices[0])]
        self.model.publish()
        try:
            expected = self.model.swap_in(seq_ids)
        except errors.PagedKVError as error:
            self.refuse(error, lambda: self.real.swap_in(seq_ids))
            return
        pairs = self.real.swap_in(seq_ids)
        self.cache.swap_in(pairs)
        self.compare()
        assert [self.ids[there] for _, there in expected] == [device for _, device in pairs]
