"""The beam step: one call in which every beam goes on from the parent that survived for it."""

import pytest

from paged_kv.errors import DuplicateSequenceError, UnknownSequenceError
from paged_kv.manager import PagedKVCacheManager


def beams(width=4, length=6):
    m = PagedKVCacheManager(32, 4)
    m.admit(0, length)
    m.append([0], [length])
    for beam in range(1, width):
        m.fork(0, beam)
    m.append(list(range(width)), [1] * width)
    return m


def test_tables_follow_the_parents_and_dropped_beams_are_free():
    m = beams()
    before = m.block_tables([0, 1, 2, 3])
    assert m.stats().num_used_blocks == 5
    m.reorder([0, 1, 2, 3], [2, 2, 2, 0])
    after = m.block_tables([0, 1, 2, 3])
    assert after.tolist() == before[[2, 2, 2, 0]].tolist()
    assert m.stats().num_used_blocks == 3  # the shared first block, and the last ones of old 2 and old 0
    copies = m.append([0, 1, 2, 3], [1] * 4).block_copies
    assert [source for source, _ in copies] == [before[2, 1]] * 2
    m.check()


def test_beams_may_swap_places():
    m = beams(2)
    before = m.block_tables([0, 1])
    m.reorder([0, 1], [1, 0])
    assert m.block_tables([0, 1]).tolist() == before[::-1].tolist()
    m.check()


def test_a_beam_may_continue_from_a_sequence_that_is_no_beam():
    m = beams(2)
    m.admit("other", 3)
    m.append(["other"], [3])
    m.reorder([0, 1], ["other", 1])
    assert m.seq_lens([0, 1]).tolist() == [3, 7]
    assert m.block_tables([0])[0, 0] == m.block_tables(["other"])[0, 0]
    m.check()


def test_a_beam_step_that_cannot_be_changes_nothing():
    m = beams(2)
    before = m.block_tables([0, 1]).tolist(), m.stats()
    with pytest.raises(UnknownSequenceError):
        m.reorder([0, 1], [1, 7])
    with pytest.raises(DuplicateSequenceError):
        m.reorder([0, 0], [1, 1])
    with pytest.raises(ValueError, match="one entry for each of the 2 seq_ids, got 1"):
        m.reorder([0, 1], [1])
    assert (m.block_tables([0, 1]).tolist(), m.stats()) == before
    m.check()
