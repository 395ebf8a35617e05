"""The block manager, call by call."""

import numpy as np
import pytest

from paged_kv.errors import (
    DuplicateSequenceError,
    OutOfBlocksError,
    SharedBlockError,
    UnknownSequenceError,
)
from paged_kv.manager import AdmissionStatus, PagedKVCacheManager


def opened(num_blocks=8, block_size=4, **lengths):
    m = PagedKVCacheManager(num_blocks, block_size)
    for seq_id, length in lengths.items():
        assert m.admit(seq_id, length).admitted
        m.append([seq_id], [length])
    return m


def test_a_sequence_grows_one_block_at_a_time():
    m = opened(a=0)
    used = []
    for _ in range(9):
        m.append(["a"], [1])
        used.append(m.stats().num_used_blocks)
    assert used == [1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert m.stats().num_held_tokens == 9
    m.check()


def test_slots_are_those_of_the_table():
    m = opened(a=5, b=3)
    step = m.append(["a", "b"], [[1, 2], [3]])
    tables = m.block_tables(["a", "b"])
    assert step.slot_mapping.dtype == np.int64
    assert tables.dtype == np.int32
    assert step.slot_mapping.tolist() == [tables[0, 1] * 4 + 1, tables[0, 1] * 4 + 2, tables[1, 0] * 4 + 3]
    expected = [tables[s, p // 4] * 4 + p % 4 for s, n in ((0, 7), (1, 4)) for p in range(n)]
    assert m.slots(["a", "b"]).tolist() == expected
    assert m.seq_lens(["a", "b"]).tolist() == [7, 4]


def test_tokens_as_ids_counts_and_arrays_give_the_same_slots():
    forms = [[1, 1], [[7], [8]], np.array([[7], [8]])]
    slots = [opened(a=2, b=2).append(["a", "b"], tokens).slot_mapping.tolist() for tokens in forms]
    assert slots[0] == slots[1] == slots[2]


def test_admission_says_later_or_never_and_changes_nothing():
    m = opened(a=17)
    before = m.stats()
    assert m.admit("b", 13).status is AdmissionStatus.LATER
    assert m.admit("c", 33).status is AdmissionStatus.NEVER
    assert m.stats() == before
    assert "b" not in m and "c" not in m
    assert m.admit("b", 12).admitted


def test_append_beyond_the_pool_tells_the_numbers_and_changes_no_sequence():
    m = opened(a=15, b=12)
    with pytest.raises(OutOfBlocksError) as error:
        m.append(["b", "a"], [4, 2])
    assert (error.value.needed, error.value.free) == (2, 1)
    assert m.seq_lens(["a", "b"]).tolist() == [15, 12]
    m.check()


def test_free_gives_every_block_back_and_only_once():
    m = opened(a=9, b=3)
    m.free("a")
    assert m.stats().num_free_blocks == 7
    with pytest.raises(UnknownSequenceError):
        m.free("a")
    assert m.stats().num_free_blocks == 7
    m.check()


def test_unknown_and_repeated_sequences_are_refused():
    m = opened(a=3)
    with pytest.raises(UnknownSequenceError, match="no sequence 'b'"):
        m.append(["a", "b"], [1, 1])
    with pytest.raises(DuplicateSequenceError, match="'a' is named twice"):
        m.append(["a", "a"], [1, 1])
    with pytest.raises(DuplicateSequenceError, match="'a' is admitted already"):
        m.admit("a", 1)
    with pytest.raises(ValueError, match="one entry for each of the 1 sequences, got 2"):
        m.append(["a"], [1, 1])
    with pytest.raises(ValueError, match="at least 0, got -1"):
        m.append(["a"], [-1])
    assert m.seq_len("a") == 3


def test_fork_shares_and_all_but_the_last_writer_copy():
    m = opened(a=6)
    m.fork("a", "b")
    m.fork("a", "c")
    shared = m.block_tables(["a"])[0].tolist()
    assert m.stats().num_used_blocks == 2
    assert m.stats().num_saved_blocks == 4
    step = m.append(["a", "b", "c"], [1, 1, 1])
    assert [source for source, _ in step.block_copies] == [shared[1], shared[1]]
    tables = m.block_tables(["a", "b", "c"])
    assert (tables[:, 0] == shared[0]).all()
    assert sorted(tables[:, 1]) == sorted([shared[1], *(d for _, d in step.block_copies)])
    assert m.append(["a", "b", "c"], [1, 1, 1]).block_copies == []
    m.check()


def test_append_at_a_block_boundary_copies_nothing():
    m = opened(a=8)
    m.fork("a", "b")
    assert m.append(["a", "b"], [1, 1]).block_copies == []
    m.check()


def test_allocate_token_slot_counts_up():
    m = PagedKVCacheManager(4, 2)
    blocks = [m.allocate_token_slot("a", n) for n in range(1, 6)]
    assert blocks[0] == blocks[1] != blocks[2] == blocks[3] != blocks[4]
    assert m.allocate_token_slot("a", 3) == blocks[2]
    with pytest.raises(ValueError, match="from 1 to 6, got 7"):
        m.allocate_token_slot("a", 7)
    with pytest.raises(ValueError, match="from 1 to 6, got 0"):
        m.allocate_token_slot("a", 0)
    m.fork("a", "b")
    with pytest.raises(SharedBlockError, match="use append"):
        m.allocate_token_slot("b", 6)
    m.check()


def test_allocate_token_slot_never_hides_a_copy():
    m = PagedKVCacheManager(4, 4)
    m.admit("a", [1] * 8)
    m.append(["a"], [[1] * 8])
    m.commit(["a"])
    m.rollback(["a"], [6])  # the cache still finds the second block, whole
    with pytest.raises(SharedBlockError, match="block 1, which others hold or the prefix cache finds"):
        m.allocate_token_slot("a", 7)
    assert (m.seq_len("a"), m.stats().counters.copied) == (6, 0)
    m.admit("b", 8)
    m.append(["b"], [8])
    assert m.num_available_blocks == 0
    assert m.allocate_token_slot("a", 7) == 1  # written in place, as there is no block for a copy
    assert m.stats().counters.copied == 0
    m.check()


def test_blocks_come_in_runs_even_when_sequences_grow_in_turn():
    m = PagedKVCacheManager(256, 4)
    for seq_id in "abcd":
        m.admit(seq_id, 0)
    for _ in range(64):
        m.append(list("abcd"), [1] * 4)
    assert (np.diff(m.block_tables(list("abcd"))) == 1).all()


def test_waste_counts_a_shared_block_once():
    m = opened(a=6)
    m.fork("a", "b")
    assert m.stats().waste == pytest.approx(2 / 8)
    m.append(["a"], [1])  # a copies its last block: 7 + 2 tokens in 3 blocks
    assert m.stats().waste == pytest.approx(3 / 12)


def test_lookahead_slots_are_ready_but_hold_no_token():
    m = opened(a=3)
    m.append(["a"], [1], lookahead=5)
    assert m.seq_len("a") == 4
    assert m.stats().num_used_blocks == 3
    assert m.append(["a"], [5]).slot_mapping.shape == (5,)
    assert m.stats().num_used_blocks == 3
    m.check()


def test_holders_tells_free_evictable_and_how_often_a_block_is_held():
    m = opened(a=6)
    m.fork("a", "b")
    first, last = m.block_tables(["a"])[0].tolist()
    assert m.holders()[[first, last]].tolist() == [2, 2]
    assert (m.holders() == -1).sum() == m.num_blocks - 2
    m.admit("c", [1, 2, 3, 4, 5])
    m.append(["c"], [[1, 2, 3, 4, 5]])
    m.commit(["c"])
    cached, tail = m.block_tables(["c"])[0].tolist()
    m.free("c")
    assert m.holders()[[cached, tail]].tolist() == [0, -1]
