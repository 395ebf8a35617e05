"""Swap: what moves, what stays shared, and what need not move at all."""

import pytest

from paged_kv.errors import (
    DuplicateSequenceError,
    OutOfBlocksError,
    OutOfHostBlocksError,
    ResidentSequenceError,
    SwappedSequenceError,
    UnknownSequenceError,
)
from paged_kv.manager import PagedKVCacheManager

TOKENS = list(range(10))


def opened(num_blocks=8, num_host_blocks=8, **options):
    m = PagedKVCacheManager(num_blocks, 4, num_host_blocks=num_host_blocks, **options)
    m.admit("a", TOKENS)
    m.append(["a"], [TOKENS])
    return m


def test_there_and_back():
    m = opened()
    table = m.block_tables(["a"])[0].tolist()
    out = m.swap_out(["a"])
    assert [source for source, _ in out] == table
    stats = m.stats()
    assert (stats.num_used_blocks, stats.num_used_host_blocks, stats.num_swapped_sequences) == (0, 3, 1)
    m.admit("x", 4)
    m.append(["x"], [4])
    back = m.swap_in(["a"])
    assert [source for source, _ in back] == [destination for _, destination in out]
    assert [destination for _, destination in back] == m.block_tables(["a"])[0].tolist()
    assert m.seq_len("a") == 10
    assert m.stats().num_used_host_blocks == 0
    m.check()


def test_what_is_shared_is_copied_once_and_stays_shared():
    m = opened()
    m.fork("a", "b")
    assert len(m.swap_out(["a", "b"])) == 3
    m.admit("x", 32)
    m.append(["x"], [32])
    m.free("x")
    assert len(m.swap_in(["a", "b"])) == 3
    assert m.stats().num_saved_blocks == 3
    m.check()


@pytest.mark.parametrize("tokens", [[10], [10, 11], [10, 11, 12]])
def test_a_block_that_was_written_to_since_its_twin_left_is_copied_again(tokens):
    m = opened()
    m.fork("a", "b")
    m.swap_out(["a"])
    assert m.append(["b"], [tokens]).block_copies == []
    last = m.block_tables(["b"])[0, 2:].tolist()
    assert [source for source, _ in m.swap_out(["b"])] == last
    m.check()
    assert len(m.swap_in(["a", "b"])) == 2 + 1 + len(last)
    m.check()


def test_what_a_rollback_takes_back_stays_shared_until_it_is_written_over():
    m = opened()
    m.fork("a", "b")
    m.swap_out(["a"])
    m.rollback(["b"], [9])
    assert m.swap_in(["a"]) == []
    left = dict(m.swap_out(["a"]))
    last = int(m.block_tables(["b"])[0, 2])
    assert m.append(["b"], [[77]]).slot_mapping.tolist() == [last * 4 + 1]
    assert [source for source, _ in m.swap_in(["a"])] == [left[last]]
    assert m.block_tables(["a"])[0, :2].tolist() == m.block_tables(["b"])[0, :2].tolist()
    assert m.block_tables(["a"])[0, 2] != last
    m.check()


def test_a_shorter_sequence_writes_over_what_a_longer_one_that_left_had_there():
    m = opened()
    m.fork("a", "b")
    m.swap_out(["a"])
    m.append(["b"], [[10]])
    assert m.swap_in(["a"]) == []  # b's last block has all of a's tokens, and one more
    (last,) = {int(m.block_tables([seq_id])[0, 2]) for seq_id in "ab"}
    left = dict(m.swap_out(["b"]))
    assert m.append(["a"], [[11]]).slot_mapping.tolist() == [last * 4 + 2]  # over b's token 10
    assert [source for source, _ in m.swap_in(["b"])] == [left[last]]
    assert m.block_tables(["b"])[0, 2] != last
    m.check()


def test_sequences_that_leave_one_after_the_other_share_too():
    m = opened()
    m.fork("a", "b")
    assert len(m.swap_out(["a"])) == 3
    assert len(m.swap_out(["b"])) == 0
    assert m.stats().num_used_host_blocks == 3
    assert len(m.swap_in(["b"])) == 3
    assert len(m.swap_in(["a"])) == 0
    assert m.stats().num_saved_blocks == 3
    m.check()


def test_what_others_still_hold_on_the_device_is_not_copied_back():
    m = opened()
    m.fork("a", "b")
    m.swap_out(["a"])
    m.append(["b"], [[50]])  # b is the last holder of the partial block and writes behind a's tokens
    assert m.swap_in(["a"]) == []
    m.check()
    assert m.stats().num_saved_blocks == 3
    assert len(m.append(["a"], [[60]]).block_copies) == 1
    m.check()


def test_a_block_that_was_rewritten_is_copied_back():
    m = opened()
    m.fork("a", "b")
    m.swap_out(["a"])
    m.rollback(["b"], [9])
    m.append(["b"], [[50]])
    pairs = m.swap_in(["a"])
    assert len(pairs) == 1
    assert pairs[0][1] == m.block_tables(["a"])[0, 2] != m.block_tables(["b"])[0, 2]
    m.check()


def test_what_the_prefix_cache_still_finds_is_not_copied_back():
    m = opened()
    m.commit(["a"])
    m.swap_out(["a"])
    assert m.stats().num_evictable_blocks == 2
    assert len(m.swap_in(["a"])) == 1  # the partial block
    m.swap_out(["a"])
    m.admit("x", 32)
    m.append(["x"], [32])
    m.free("x")
    assert len(m.swap_in(["a"])) == 3
    m.check()
    m.admit("b", TOKENS)
    assert m.seq_len("b") == 8  # published again


def test_a_swap_that_does_not_fit_tells_the_numbers_and_changes_nothing():
    m = opened(num_host_blocks=2)
    with pytest.raises(OutOfHostBlocksError) as error:
        m.swap_out(["a"])
    assert (error.value.needed, error.value.free) == (3, 2)
    assert m.seq_len("a") == 10

    m = opened()
    m.swap_out(["a"])
    m.admit("x", 24)
    m.append(["x"], [24])
    with pytest.raises(OutOfBlocksError) as error:
        m.swap_in(["a"])
    assert (error.value.needed, error.value.free) == (3, 2)
    assert m.stats().num_swapped_sequences == 1
    m.check()


def test_a_swapped_sequence_can_only_come_back_or_go():
    m = opened()
    m.swap_out(["a"])
    assert "a" in m
    for call in (
        lambda: m.append(["a"], [[1]]),
        lambda: m.commit(["a"]),
        lambda: m.rollback(["a"], [1]),
        lambda: m.fork("a", "b"),
        lambda: m.reorder(["a"], ["a"]),
        lambda: m.swap_out(["a"]),
        lambda: m.preempt("a"),
        lambda: m.block_tables(["a"]),
        lambda: m.seq_len("a"),
    ):
        with pytest.raises(SwappedSequenceError, match="'a' is swapped out; swap it in first"):
            call()
    with pytest.raises(DuplicateSequenceError):
        m.admit("a", TOKENS)
    with pytest.raises(DuplicateSequenceError, match="named twice"):
        m.swap_in(["a", "a"])
    with pytest.raises(UnknownSequenceError):
        m.swap_in(["b"])
    m.swap_in(["a"])
    with pytest.raises(ResidentSequenceError, match="'a' is on the device already"):
        m.swap_in(["a"])
    m.swap_out(["a"])
    m.free("a")
    assert "a" not in m
    assert m.stats().num_used_host_blocks == 0
    m.check()


def test_lookahead_blocks_do_not_move():
    m = opened()
    m.append(["a"], [[1]], lookahead=8)
    assert len(m.swap_out(["a"])) == 3
    m.check()


def test_a_window_moves_what_it_holds():
    m = PagedKVCacheManager(12, 4, windows=(None, 5), num_host_blocks=12)
    tokens = list(range(14))
    m.admit("a", tokens)
    m.append(["a"], [tokens])
    m.commit(["a"])
    held = m.stats().num_used_blocks
    assert held == 6
    assert len(m.swap_out(["a"])) == held
    m.reset_prefix_cache()
    assert len(m.swap_in(["a"])) == held
    m.check()
    m.append(["a"], [[1]])
    m.commit(["a"])
    m.check()


def test_what_was_away_while_the_cache_was_reset_is_not_found_again():
    m = opened()
    m.commit(["a"])
    m.swap_out(["a"])
    m.reset_prefix_cache()
    m.swap_in(["a"])
    m.commit(["a"])
    assert m.admit("b", TOKENS).num_cached_tokens == 0
    m.check()
