"""Rollback, lookahead slots, sliding windows, and groups of layers."""

import numpy as np
import pytest

from paged_kv.errors import OutOfBlocksError, RollbackError
from paged_kv.manager import AdmissionStatus, PagedKVCacheManager


def opened(length, num_blocks=16, block_size=4, **options):
    m = PagedKVCacheManager(num_blocks, block_size, **options)
    m.admit("a", list(range(length)))
    m.append(["a"], [list(range(length))])
    m.commit(["a"])
    return m


def test_rollback_gives_back_the_blocks_beyond():
    m = opened(6)
    table = m.block_tables(["a"])[0].tolist()
    m.append(["a"], [[90] * 9])
    assert m.stats().num_used_blocks == 4
    m.rollback(["a"], [7])
    assert m.stats().num_used_blocks == 2
    assert m.block_tables(["a"])[0].tolist() == table
    assert m.append(["a"], [[1, 2]]).slot_mapping.tolist() == [
        table[1] * 4 + 3,
        m.block_tables(["a"])[0, 2] * 4,
    ]
    m.check()


def test_rollback_of_a_batch_is_all_or_nothing_and_never_grows():
    m = opened(6)
    m.fork("a", "b")
    for lengths in ([5, 7], [5, -1]):
        with pytest.raises(RollbackError) as error:
            m.rollback(["a", "b"], lengths)
        assert (error.value.seq_id, error.value.lowest, error.value.highest) == ("b", 0, 6)
        assert m.seq_lens(["a", "b"]).tolist() == [6, 6]
    with pytest.raises(ValueError, match="one integer for each of the 2 sequences"):
        m.rollback(["a", "b"], [5])
    m.rollback(["a", "b"], np.array([0, 6]))
    assert m.seq_lens(["a", "b"]).tolist() == [0, 6]
    m.check()


def test_a_siblings_blocks_never_change_on_rollback():
    m = opened(10)
    m.fork("a", "b")
    before = m.block_tables(["b"])[0].tolist()
    m.rollback(["a"], [5])
    step = m.append(["a"], [[7, 7]])
    assert m.block_tables(["b"])[0].tolist() == before
    assert step.block_copies == [(before[1], m.block_tables(["a"])[0, 1])]
    assert not set(step.slot_mapping // 4) & set(before)
    m.check()


def test_lookahead_over_several_blocks_survives_until_rollback():
    m = opened(3)
    m.append(["a"], [[5]], lookahead=9)
    assert m.block_tables(["a"]).shape == (1, 4)
    assert m.append(["a"], [[6] * 9]).block_copies == []
    assert m.stats().num_used_blocks == 4
    m.rollback(["a"], [4])
    assert m.stats().num_used_blocks == 1
    m.append(["a"], [[5]], lookahead=9)
    m.rollback(["a"], [5])  # takes nothing back but the lookahead
    assert m.stats().num_used_blocks == 2
    with pytest.raises(ValueError, match="at least 0, got -1"):
        m.append(["a"], [[1]], lookahead=-1)


def test_blocks_behind_the_window_go_once_their_last_reader_is_computed():
    m = opened(0, windows=(6,))
    held = []
    for token in range(20):
        m.append(["a"], [[token]])
        m.commit(["a"])
        held.append(m.stats().num_used_blocks)
        m.check()
    # After n tokens the next one sees positions n - 5 to n: at most 5 of those held, in at most 3 blocks with n's.
    assert held == [len(range(max(0, n - 5) // 4, -(-n // 4))) for n in range(1, 21)]


def test_a_rollback_can_always_undo_what_is_not_committed():
    m = opened(9, windows=(5,))
    m.append(["a"], [[1] * 8])
    assert m.stats().num_used_blocks == 4  # positions 5 and later, and nothing is let go for drafts
    with pytest.raises(RollbackError) as error:
        m.rollback(["a"], [7])
    assert error.value.lowest == 8
    m.rollback(["a"], [9])
    m.commit(["a"])
    assert m.stats().num_used_blocks == 2
    m.check()


def test_groups_have_tables_of_their_own_in_one_pool():
    m = opened(14, windows=(None, 5), num_blocks=12)
    tables = [m.block_tables(["a"], group)[0].tolist() for group in (0, 1)]
    assert m.stats().num_used_blocks == 4 + 2
    assert not set(tables[0]) & set(tables[1][2:])
    step = m.append(["a"], [[7]])
    assert step.slot_mappings.shape == (2, 1)
    assert step.slot_mappings[:, 0].tolist() == [tables[0][3] * 4 + 2, tables[1][3] * 4 + 2]
    assert (step.slot_mapping == step.slot_mappings[0]).all()
    assert m.slots(["a"], 1)[-1] == step.slot_mappings[1, 0]
    m.check()


def test_a_hit_needs_what_every_group_still_sees():
    m = opened(17, windows=(None, 5), num_blocks=20)
    m.free("a")
    assert m.admit("b", list(range(17))).num_cached_tokens == 16
    assert m.block_tables(["b"], 1).shape == (1, 4)
    m.free("b")
    # Blocks behind the window were let go first, and are the first to be recycled.
    m.admit("x", 8)
    m.append(["x"], [7])
    m.free("x")
    assert m.admit("c", list(range(17))).num_cached_tokens == 16
    m.check()


def test_a_window_alone_finds_the_end_without_the_beginning():
    m = opened(17, windows=(5,), num_blocks=5)
    m.free("a")
    m.admit("x", 8)
    m.append(["x"], [8])
    m.free("x")
    admission = m.admit("b", list(range(17)))
    assert admission.num_cached_tokens == 16
    assert m.stats().num_used_blocks == 1
    m.check()


def test_admission_counts_a_window_and_a_chunk_where_the_prompt_comes_in_chunks():
    m = PagedKVCacheManager(6, 4, windows=(8,))
    assert m.admit("a", list(range(100))).status is AdmissionStatus.NEVER
    assert m.admit("a", list(range(100)), chunk_size=12).status is AdmissionStatus.ADMITTED
    for start in range(0, 100, 12):
        m.append(["a"], [list(range(start, min(100, start + 12)))])
        m.commit(["a"])
        m.check()
    assert m.seq_len("a") == 100


def test_lookahead_that_does_not_fit_is_refused_whole():
    m = opened(3, num_blocks=2)
    with pytest.raises(OutOfBlocksError) as error:
        m.append(["a"], [[1]], lookahead=5)
    assert (error.value.needed, error.value.free) == (2, 1)
    assert m.seq_len("a") == 3


@pytest.mark.parametrize("lengths", [[5], [3]])
def test_commit_takes_lengths_between_computed_and_appended(lengths):
    m = opened(4)
    with pytest.raises(ValueError, match=r"^seq_lens: expected 4 for sequence 'a', got"):
        m.commit(["a"], lengths)
    m.append(["a"], [[5, 6]])
    with pytest.raises(
        ValueError, match=r"^seq_lens: expected an integer from 4 to 6 for sequence 'a', got 3"
    ):
        m.commit(["a"], [3])
