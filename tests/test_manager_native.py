"""The native part of the block manager, apart: digests and their index; the walks test the loops."""

from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_kv._manager import BlockIndex, PoolArrays, RowArrays, hash_blocks

NUM_BLOCKS = 12


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("block_bytes", [0, 4, 20, 23, 24, 31, 32, 64, 87, 88, 152, 1024])
def test_a_chain_of_digests_is_what_hashlib_makes_of_it(block_bytes, accelerated):
    data = bytes(np.random.default_rng(block_bytes).integers(0, 256, 5 * block_bytes, np.uint8))
    parent, expected = bytes(range(32)), []
    for place in range(1, 5):
        before = expected[-1] if expected else parent
        expected.append(sha256(before + data[place * block_bytes : (place + 1) * block_bytes]).digest())
    assert hash_blocks(parent, data, block_bytes, 4, block_bytes, accelerated) == expected


def test_what_cannot_be_hashed_is_refused():
    for start, count, size in ((0, 2, 64), (101, 0, 4), (90, 3, 4), (0, 2**60, 16)):
        message = f"tokens: expected {count} blocks of {size} bytes from {start} on, got 100 bytes"
        with pytest.raises(ValueError, match=message):
            hash_blocks(bytes(32), bytes(100), start, count, size)
    with pytest.raises(TypeError):
        hash_blocks(bytes(32), np.arange(100, dtype=np.uint8)[::-1], 0, 1, 64)
    with pytest.raises(ValueError, match="digest: expected 32 bytes, got b'abc'"):
        hash_blocks(b"abc", bytes(64), 0, 1, 64)


class Arrays:
    def __init__(self, num_slots=16):
        self.slots = np.zeros(num_slots, np.uint64)
        self.digests = np.zeros((NUM_BLOCKS, 32), np.uint8)
        self.parents = np.zeros((NUM_BLOCKS, 32), np.uint8)
        self.groups = np.zeros(NUM_BLOCKS, np.uint8)
        self.cached = np.zeros(NUM_BLOCKS, np.uint8)
        self.index = BlockIndex(self.slots, self.digests, self.parents, self.groups, self.cached)


def digest(start, number):
    """One of several digests that begin alike, so that their entries want the same slot."""
    return bytes([start, 0, 0, 0, number]) + bytes(27)


names = st.tuples(st.integers(0, 1), st.sampled_from([0, 1, 14, 15]), st.integers(0, 3))
calls = st.one_of(
    st.tuples(st.just("store"), names, st.integers(0, NUM_BLOCKS - 1)),
    st.tuples(st.just("remove"), st.integers(0, NUM_BLOCKS - 1)),
)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.lists(calls, max_size=60))
def test_entries_that_want_the_same_slot_are_found_and_removed(steps):
    arrays, blocks = Arrays(), {}
    for call, *arguments in steps:
        if call == "store":
            (group, start, number), block = arguments
            name, parent = digest(start, number), digest(0, 9)
            known = blocks.get((group, name))
            if known is None and block in blocks.values():
                with pytest.raises(ValueError, match=f"blocks: {block} has other content"):
                    arrays.index.store(group, parent, [name], 0, np.array([block], np.int32))
                continue
            fresh, twins = arrays.index.store(group, parent, [name], 0, np.array([block], np.int32))
            assert fresh == ([0] if known is None else [])
            assert twins == ([] if known in (None, block) else [(0, known)])
            if known is None:
                blocks[group, name] = block
                assert arrays.digests[block].tobytes() == name
                assert arrays.parents[block].tobytes() == parent
                assert arrays.groups[block] == group
        elif arguments[0] in blocks.values():
            arrays.index.remove(np.array(arguments, np.int32))
            blocks = {name: block for name, block in blocks.items() if block != arguments[0]}
        else:
            with pytest.raises(ValueError, match=f"blocks: {arguments[0]} is not cached"):
                arrays.index.remove(np.array(arguments, np.int32))
        for group in range(2):
            for start in (0, 1, 14, 15):
                for number in range(4):
                    name = digest(start, number)
                    assert arrays.index.get(group, name) == blocks.get((group, name))
        assert set(np.flatnonzero(arrays.cached)) == set(blocks.values())
        assert np.count_nonzero(arrays.slots) == len(blocks)


def test_a_run_is_stored_and_found_up_to_what_is_missing():
    arrays = Arrays()
    chain = [digest(i, 0) for i in range(6)]
    fresh, twins = arrays.index.store(0, bytes(32), chain, 1, np.array([4, 5, 7, 2], np.int32))
    assert (fresh, twins) == ([1, 2, 3, 4], [])
    assert arrays.parents[[4, 5, 7, 2]].tobytes() == bytes(32) + b"".join(chain[1:4])
    assert arrays.index.find(0, chain, 1, 6) == [4, 5, 7, 2]
    assert arrays.index.find(0, chain, 2, 4) == [5, 7]
    assert arrays.index.find(0, chain, 0, 6) == []
    assert arrays.index.find(1, chain, 1, 6) == []
    assert arrays.index.store(0, chain[0], chain, 1, np.array([4, 3], np.int32)) == ([], [(2, 5)])


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(ValueError, match="slots: expected a power of two above the number of blocks, got 12"):
        Arrays(num_slots=12)
    with pytest.raises(ValueError, match="slots: expected a power of two above the number of blocks, got 8"):
        Arrays(num_slots=8)
    arrays = Arrays()
    with pytest.raises(ValueError, match=f"blocks: expected 0 to {NUM_BLOCKS - 1}, got {NUM_BLOCKS}"):
        arrays.index.remove(np.array([NUM_BLOCKS], np.int32))
    with pytest.raises(ValueError, match="blocks: expected 0 to 11, got -1"):
        arrays.index.store(0, bytes(32), [bytes(32)], 0, np.array([-1], np.int32))
    with pytest.raises(ValueError, match="digests: expected one for each block"):
        arrays.index.store(0, bytes(32), [bytes(32)], 0, np.array([1, 2], np.int32))
    assert not arrays.cached.any()


def rows(num_blocks=1):
    """Two rows of tables of two blocks of four slots in one group; each has used its first block up."""
    fields = [np.full(2, value, np.int64) for value in (0, 4 * num_blocks, num_blocks)]
    return RowArrays(*fields, np.zeros((1, 2), np.int64), np.array([[[5, 0], [6, 0]]], np.int32))


def test_rows_without_room_ask_and_go_on_with_a_block():
    table, both = rows(), np.array([0, 1])
    assert table.advance(both) is None
    asking, all_full, last = table.asking(both, 4)
    assert (asking.tolist(), all_full, last) == ([0, 1], True, [[5, 6]])
    table.add_blocks(both, [[7, 3]], 4)
    assert [table.advance(both).tolist() for _ in range(2)] == [[[28, 12]], [[29, 13]]]
    assert table.slots(0, 0, 2, 6, 4).tolist() == [22, 23, 28, 29]
    assert table.asking(both, 4)[0].tolist() == []


def test_rows_and_blocks_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="rows: expected 0 to 1, got 2"):
        rows().advance(np.array([0, 2]))
    with pytest.raises(ValueError, match="rows: expected 0 to 1, got -1"):
        rows().asking(np.array([-1]), 4)
    with pytest.raises(ValueError, match="rows: a table is full"):
        rows(num_blocks=2).add_blocks(np.array([1]), [[3]], 4)
    with pytest.raises(ValueError, match=r"taken: expected \[groups, rows\]"):
        rows().add_blocks(np.array([0, 1]), [[3]], 4)
    with pytest.raises(ValueError, match="slots: no such positions"):
        rows().slots(0, 0, 0, 9, 4)
    with pytest.raises(ValueError, match="slots: no such positions"):
        rows().slots(0, 0, 0, 0, 0)
    refs, cached, queue = np.ones(3, np.int32), np.zeros(3, np.uint8), np.zeros(6, np.int32)
    pool = PoolArrays(refs, cached, queue, np.full(3, -1, np.int64))
    with pytest.raises(ValueError, match="ids: expected 0 to 2, got 3"):
        pool.drop([0, 3], 0)
    with pytest.raises(ValueError, match="tail: no room behind it"):
        pool.drop([0, 1], 5)
    assert refs.tolist() == [1, 1, 1]
    assert pool.drop([0, 1], 0) == (0, 0, [0, 1])
    for head in (-1, 7):
        with pytest.raises(ValueError, match="head: no such place of the queue"):
            pool.take_oldest(head, 1)
    with pytest.raises(ValueError, match="count: the queue has fewer than 1 true entries"):
        pool.take_oldest(0, 1)
