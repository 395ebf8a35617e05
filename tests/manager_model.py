"""The block manager once more, slow and obvious, for tests to compare with.

A block is an object without a number; a cache entry is found by the whole text before it; nothing is hashed,
nothing is vectorised, and the least recently used order is a list. The model foretells every answer, error
and count of the real manager, but not which block ids are handed out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from paged_kv import errors
from paged_kv.manager.events import Counters
from paged_kv.manager.prefix import PARTIAL_CANDIDATES


@dataclass(eq=False)
class Block:
    holders: int = 1
    content: tuple | None = None  # (group, text) under which the cache finds it
    is_free: bool = False
    filled: int = 0  # of a host block: tokens that it has for certain


@dataclass(eq=False)
class Sequence:
    keys: tuple
    tokens: list = field(default_factory=list)  # ids, or objects where ids are not known
    computed: int = 0
    known: float = float("inf")
    named: int = 0
    blocks: list = field(default_factory=list)  # [groups] of lists of Block, None where behind the window

    def text(self, stop: int) -> tuple:
        """Everything that the keys and values of the first `stop` tokens depend on."""
        keys = [key for key in self.keys if key.stop is None or key.start < stop]
        return tuple(self.tokens[:stop]), frozenset(keys)


class Model:
    def __init__(self, num_blocks, block_size, windows, partial_hits, num_host_blocks, pin_budget):
        self.size = block_size
        self.windows = windows
        self.partial_hits = partial_hits
        self.pin_budget = pin_budget
        self.num_blocks = num_blocks
        self.free = num_blocks
        self.host_free = num_host_blocks
        self.lru: list[Block] = []
        self.cached: dict[tuple, Block] = {}
        self.order: list[tuple] = []  # texts in the order in which the cache came to know them
        self.device: dict = {}
        self.host: dict = {}
        self.preempted: set = set()
        self.pins: dict = {}
        self.twins: list[tuple[Block, Block]] = []  # (device block, host block)
        self.count = asdict(Counters())

    # Blocks

    @property
    def available(self):
        return self.free + len(self.lru)

    def take(self):
        if self.free:
            self.free -= 1
        else:
            self.forget(self.lru.pop(0))
        return Block()

    def hold(self, block):
        if block.holders == 0:
            self.lru.remove(block)
        block.holders += 1

    def drop(self, block):
        block.holders -= 1
        if block.holders == 0 and block.content:
            self.lru.append(block)
        elif block.holders == 0:
            block.is_free = True
            self.free += 1

    def forget(self, block):
        _, text = block.content
        del self.cached[block.content]
        if not any((g, text) in self.cached for g in range(len(self.windows))):
            self.order.remove(text)
        block.content = None
        block.is_free = block.holders == 0
        self.count["evicted"] += 1

    def first_needed(self, window, seq_len):
        return 0 if window is None else max(0, seq_len - window + 1) // self.size

    def ceil(self, tokens):
        return -(-tokens // self.size)

    def drop_from(self, seq, start):
        """Last place first, so that the end of a text is evicted before its beginning."""
        for place in reversed(range(start, len(seq.blocks[0]))):
            for blocks in seq.blocks:
                if blocks[place] is not None:
                    self.drop(blocks[place])
        for blocks in seq.blocks:
            del blocks[start:]

    def resident(self, seq_id):
        if seq_id in self.host:
            raise errors.SwappedSequenceError(seq_id)
        if seq_id not in self.device:
            raise errors.UnknownSequenceError(seq_id)
        return self.device[seq_id]

    # Calls

    def find(self, seq, limit):
        """Most blocks of seq's text that are cached as far as each group needs them."""
        for count in range(limit, 0, -1):
            found = [
                [self.cached.get((group, seq.text((place + 1) * self.size))) for place in range(count)]
                for group in range(len(self.windows))
            ]
            first = [self.first_needed(window, count * self.size) for window in self.windows]
            if all(None not in blocks[f:] for blocks, f in zip(found, first, strict=True)):
                return [[None] * f + blocks[f:] for blocks, f in zip(found, first, strict=True)]
        return [[] for _ in self.windows]

    def find_partial(self, seq, found, num_tokens):
        """The cached block whose beginning goes on with seq's text, and how many tokens of it do."""
        start = len(found[0]) * self.size
        end = start + self.size
        most = min(num_tokens - 1 - start, self.size)
        keyed = any(key.stop is not None and key.start < end and start < key.stop for key in seq.keys)
        if not self.partial_hits or keyed:
            return None, 0
        candidates = [
            text
            for text in self.order
            if len(text[0]) == end
            and text[0][:start] == tuple(seq.tokens[:start])
            and text[1] == seq.text(start)[1]
        ]
        best, length = None, 0
        for text in candidates[::-1][:PARTIAL_CANDIDATES]:
            same = 0
            while same < most and text[0][start + same] == seq.tokens[start + same]:
                same += 1
            blocks = [self.cached.get((group, text)) for group in range(len(self.windows))]
            if None not in blocks and same > length:
                best, length = blocks, same
        return best, length

    def admit(self, seq_id, tokens, keys, chunk_size):
        if seq_id in self.device or seq_id in self.host:
            raise errors.DuplicateSequenceError(seq_id, "")
        known = not isinstance(tokens, int)
        num_tokens = len(tokens) if known else tokens

        def most(first):
            total = []
            for window, start in zip(self.windows, first, strict=True):
                places = self.ceil(num_tokens) - start
                if window is not None and chunk_size is not None:
                    span = window - 1 + chunk_size
                    places = min(places, max(self.ceil(offset + span) for offset in range(self.size)))
                total.append(places)
            return total

        if sum(most([0] * len(self.windows))) > self.num_blocks:
            return "never", 0
        seq = Sequence(keys, list(tokens) if known else [])
        found = self.find(seq, (num_tokens - 1) // self.size) if known else [[] for _ in self.windows]
        partial, length = self.find_partial(seq, found, num_tokens) if known else (None, 0)
        for last, extra in [(partial, length)] * bool(partial) + [(None, 0)]:  # noqa: B007 - the one that fits
            first = [sum(block is None for block in blocks) for blocks in found]
            needed = sum(
                max(0, m - len(blocks) + f) for m, blocks, f in zip(most(first), found, first, strict=True)
            )
            held = [block for blocks in found for block in blocks if block] + (last or [])
            if needed + sum(block.holders == 0 for block in held) <= self.available:
                break
        else:
            return "later", 0
        for block in held:
            self.hold(block)
        seq.blocks = [blocks + ([last[group]] if last else []) for group, blocks in enumerate(found)]
        cached = len(found[0]) * self.size + extra
        seq.tokens = seq.tokens[:cached]
        seq.computed = cached
        seq.named = cached // self.size
        self.device[seq_id] = seq
        self.count["admitted"] += 1
        if seq_id not in self.preempted:
            self.count["prompt_tokens"] += num_tokens
            self.count["cached_tokens"] += cached
        self.preempted.discard(seq_id)
        return "admitted", cached

    def append(self, batch, lookahead):
        """batch: {seq_id: list of ids, or of objects where ids are not known}. Returns the copied blocks."""
        seqs = [(self.resident(seq_id), tokens) for seq_id, tokens in batch.items()]
        growth = [max(0, self.ceil(len(s.tokens) + len(t) + lookahead) - len(s.blocks[0])) for s, t in seqs]
        must, may = self.plan_copies(seqs)
        if sum(growth) * len(self.windows) + len(must) > self.available:
            self.publish()
            must, may = self.plan_copies(seqs)
        needed = sum(growth) * len(self.windows) + len(must)
        if needed > self.available:
            raise errors.OutOfBlocksError(needed, self.available)
        if needed + len(may) <= self.available:
            must, may = must + may, []
        for (seq, _), count in zip(seqs, growth, strict=True):
            for blocks in seq.blocks:
                blocks.extend(self.take() for _ in range(count))
        for seq, group in may:
            self.forget(seq.blocks[group][len(seq.tokens) // self.size])
        copies = []
        for seq, group in must:
            place = len(seq.tokens) // self.size
            copies.append((seq.blocks[group][place], self.take()))
            seq.blocks[group][place] = copies[-1][1]
        for source, _ in copies:
            self.drop(source)
        self.count["copied"] += len(copies)
        for seq, tokens in seqs:
            offset = len(seq.tokens) % self.size
            if tokens and offset:  # a host block with more tokens keeps what is overwritten here
                written = [blocks[len(seq.tokens) // self.size] for blocks in seq.blocks]
                self.twins = [(d, h) for d, h in self.twins if d not in written or h.filled <= offset]
            if any(not isinstance(token, int) for token in tokens):
                seq.known = min(seq.known, len(seq.tokens))
            seq.tokens += tokens
        return copies

    def plan_copies(self, seqs):
        """Which (sequence, group) must not write in place: others hold the block, or only the cache finds it."""
        must, may, left = [], [], {}
        for group in range(len(self.windows)):
            for seq, tokens in seqs:
                if tokens and len(seq.tokens) % self.size:
                    block = seq.blocks[group][len(seq.tokens) // self.size]
                    left.setdefault(block, block.holders)
                    if left[block] > 1:
                        left[block] -= 1
                        must.append((seq, group))
                    elif block.content:
                        may.append((seq, group))
        return must, may

    def commit(self, seq_lens):
        for seq_id, length in seq_lens.items():
            seq = self.resident(seq_id)
            if not seq.computed <= length <= len(seq.tokens):
                raise ValueError
        for seq_id, length in seq_lens.items():
            self.device[seq_id].computed = length
        for group, window in enumerate(self.windows):
            if window is not None:
                self.publish()
                for seq_id in seq_lens:
                    seq = self.device[seq_id]
                    for place in range(self.first_needed(window, seq.computed)):
                        if seq.blocks[group][place] is not None:
                            self.drop(seq.blocks[group][place])
                            seq.blocks[group][place] = None

    def publish(self):
        for seq in self.device.values():
            full = max(seq.named, int(min(seq.computed, seq.known)) // self.size)
            for group, blocks in enumerate(seq.blocks):
                dropped = []
                for place in range(seq.named, full):
                    content = (group, seq.text((place + 1) * self.size))
                    known = self.cached.setdefault(content, blocks[place])
                    if known is not blocks[place]:
                        dropped.append((place, blocks[place], known))
                    elif blocks[place].content is None:
                        blocks[place].content = content
                        self.count["stored"] += 1
                        if content[1] not in self.order:
                            self.order.append(content[1])
                for _, _, known in dropped:
                    self.hold(known)
                for place, block, known in dropped:
                    self.drop(block)
                    blocks[place] = known
            seq.named = full

    def rollback(self, seq_lens):
        for seq_id, length in seq_lens.items():
            seq = self.resident(seq_id)
            holds = all(
                None not in blocks[self.first_needed(window, length) :]
                for window, blocks in zip(self.windows, seq.blocks, strict=True)
            )
            if not 0 <= length <= len(seq.tokens) or not holds:
                raise errors.RollbackError(seq_id, length, 0, 0)
        for seq_id, length in seq_lens.items():
            seq = self.device[seq_id]
            self.drop_from(seq, self.ceil(length))
            del seq.tokens[length:]
            seq.computed = min(seq.computed, length)
            seq.named = min(seq.named, length // self.size)
            if length <= seq.known:
                seq.known = float("inf")

    def copy_of(self, seq):
        stop = self.ceil(len(seq.tokens))
        blocks = [blocks[:stop] for blocks in seq.blocks]
        return Sequence(seq.keys, seq.tokens.copy(), seq.computed, seq.known, seq.named, blocks)

    def fork(self, seq_id, child_id):
        child = self.copy_of(self.resident(seq_id))
        if child_id in self.device or child_id in self.host:
            raise errors.DuplicateSequenceError(child_id, "")
        for blocks in child.blocks:
            for block in filter(None, blocks):
                self.hold(block)
        self.device[child_id] = child
        self.count["forked"] += 1

    def reorder(self, parents):
        for seq_id in (*parents, *parents.values()):
            self.resident(seq_id)
        moved = {seq_id: self.copy_of(self.device[p]) for seq_id, p in parents.items() if seq_id != p}
        for seq in moved.values():
            for blocks in seq.blocks:
                for block in filter(None, blocks):
                    self.hold(block)
        for seq_id, seq in moved.items():
            self.drop_from(self.device[seq_id], 0)
            self.device[seq_id] = seq
        self.count["forked"] += len(moved)

    def release(self, seq_id):
        if seq_id in self.host:
            self.drop_host(self.host.pop(seq_id))
            return
        self.drop_from(self.resident(seq_id), 0)
        del self.device[seq_id]

    def preempt(self, seq_id):
        self.resident(seq_id)
        self.release(seq_id)
        self.preempted.add(seq_id)
        self.count["preempted"] += 1

    def pin(self, tokens, keys):
        found = self.find(Sequence(keys, list(tokens)), len(tokens) // self.size)
        blocks = [block for group in found for block in group if block]
        pinned = {block for held in self.pins.values() for block in held}
        left = self.pin_budget - len(pinned)
        needed = len(set(blocks) - pinned)
        if needed > left:
            raise errors.PinBudgetError(needed, left)
        for block in blocks:
            self.hold(block)
        return blocks, len(found[0]) * self.size

    def unpin(self, pin):
        for block in reversed(self.pins.pop(pin)):
            self.drop(block)

    def reset(self):
        for pin in list(self.pins):
            self.unpin(pin)
        for block in list(self.cached.values()):
            self.forget(block)
        self.free += len(self.lru)
        self.lru.clear()
        for seq in (*self.device.values(), *self.host.values()):
            seq.named = 0
            seq.known = 0 if seq.tokens else float("inf")

    def held_tokens(self):
        """Slots that hold a token: the most that a holder has filled, all of a block that was published."""
        filled = {}
        for seq in self.device.values():
            for blocks in seq.blocks:
                for place, block in enumerate(blocks):
                    if block:
                        fill = min(self.size, max(0, len(seq.tokens) - place * self.size))
                        filled[block] = self.size if block.content else max(filled.get(block, 0), fill)
        for blocks in self.pins.values():
            filled.update(dict.fromkeys(blocks, self.size))
        return sum(filled.values())

    # Swap

    def twin_of(self, block):
        """The host block with the device block's content, or the other way round."""
        for device, host in self.twins:
            alive = host.holders and not device.is_free
            if block is device and alive:
                return host
            if block is host:
                return device if alive else None
        return None

    def swap_out(self, seq_ids):
        seqs = [self.resident(seq_id) for seq_id in seq_ids]
        copies = {seq_id: self.copy_of(seq) for seq_id, seq in zip(seq_ids, seqs, strict=True)}
        distinct = dict.fromkeys(b for seq in copies.values() for blocks in seq.blocks for b in blocks if b)
        for seq in copies.values():
            for blocks in seq.blocks:
                for place, block in enumerate(blocks):
                    if block:
                        tokens = min(self.size, len(seq.tokens) - place * self.size)
                        distinct[block] = max(distinct[block] or 0, tokens)
        missing = [
            block
            for block, tokens in distinct.items()
            if self.twin_of(block) is None or self.twin_of(block).filled < tokens
        ]
        if len(missing) > self.host_free:
            raise errors.OutOfHostBlocksError(len(missing), self.host_free)
        twins = {block: self.twin_of(block) for block in distinct}
        for block in missing:
            twins[block] = Block(holders=0, filled=distinct[block])
            self.host_free -= 1
            self.twins = [(d, h) for d, h in self.twins if d is not block]
            self.twins.append((block, twins[block]))
        for seq_id, seq in copies.items():
            self.drop_from(self.device.pop(seq_id), 0)
            seq.blocks = [[block and twins[block] for block in blocks] for blocks in seq.blocks]
            for blocks in seq.blocks:
                for block in filter(None, blocks):
                    block.holders += 1
            self.host[seq_id] = seq
        self.count["swapped_out"] += len(missing)
        return [(block, twins[block]) for block in missing]

    def drop_host(self, seq):
        for blocks in seq.blocks:
            for block in filter(None, blocks):
                block.holders -= 1
                self.host_free += block.holders == 0

    def swap_in(self, seq_ids):
        for seq_id in seq_ids:
            if seq_id in self.device:
                raise errors.ResidentSequenceError(seq_id)
            if seq_id not in self.host:
                raise errors.UnknownSequenceError(seq_id)
        seqs = [self.host[seq_id] for seq_id in seq_ids]
        content = {}
        for named in (True, False):
            for seq in seqs:
                for group, blocks in enumerate(seq.blocks):
                    for place, block in enumerate(blocks):
                        if block and (place < seq.named) == named and block not in content:
                            content[block] = (group, seq.text((place + 1) * self.size)) if named else block
        kept, fresh = {}, {}
        for block, what in content.items():
            there = self.twin_of(block) if what is block else self.cached.get(what)
            if there:
                kept[what] = there
            else:
                fresh.setdefault(what, block)
        needed = len(fresh) + sum(block.holders == 0 for block in set(kept.values()))
        if needed > self.available:
            raise errors.OutOfBlocksError(needed, self.available)
        held = list(dict.fromkeys(kept.values()))
        for block in held:
            self.hold(block)
        pairs = []
        for what, block in fresh.items():
            kept[what] = self.take()
            pairs.append((block, kept[what]))
        for what, block in fresh.items():
            if what is not block:
                kept[what].content = what
                self.cached[what] = kept[what]
                self.count["stored"] += 1
                if what[1] not in self.order:
                    self.order.append(what[1])
        for seq_id, seq in zip(seq_ids, seqs, strict=True):
            del self.host[seq_id]
            self.drop_host(seq)
            seq.blocks = [[block and kept[content[block]] for block in blocks] for blocks in seq.blocks]
            for blocks in seq.blocks:
                for block in filter(None, blocks):
                    self.hold(block)
            self.device[seq_id] = seq
        for block, there in pairs:
            self.twins = [(d, h) for d, h in self.twins if h is not block]
            self.twins.append((there, block))
        for block in (*held, *(there for _, there in pairs)):
            self.drop(block)
        self.count["swapped_in"] += len(pairs)
        return pairs
