"""What callers give: a wrong kind raises TypeError, a value out of range ValueError, by name, and nothing changes."""

import re

import numpy as np
import pytest
import torch
from manager_machine import snapshot

from paged_kv.manager import ContentKey, PagedKVCacheManager, Pin


@pytest.fixture
def m():
    m = PagedKVCacheManager(16, 4, windows=(None, 6), num_host_blocks=8, partial_hits=True)
    for seq_id, tokens in (("a", range(7)), ("b", range(9)), ("away", range(5))):
        found = m.admit(seq_id, list(tokens)).num_cached_tokens
        m.append([seq_id], [list(tokens)[found:]])
        m.commit([seq_id])
    m.pin(list(range(4)))
    m.swap_out(["away"])
    return m


# (name of the argument and what was expected, what came, the call)
WRONG_KINDS = [
    ("tokens: expected the token ids of a sequence or their number", "5.0", lambda m: m.admit("new", 5.0)),
    ("tokens: expected an integer of at least 0", "True", lambda m: m.admit("new", True)),
    (
        "tokens: expected the token ids of a sequence or their number",
        "'abc'",
        lambda m: m.admit("new", "abc"),
    ),
    ("tokens: expected the token ids of a sequence or their number", "{1}", lambda m: m.admit("new", {1})),
    ("tokens: expected the token ids of a sequence or their number", "None", lambda m: m.admit("new", None)),
    ("tokens: expected ids that are integers", "bool", lambda m: m.admit("new", [True, False])),
    ("tokens: expected ids that are integers", "float64", lambda m: m.admit("new", [1.0] * 100)),
    ("seq_id: expected a hashable id", "['new']", lambda m: m.admit(["new"], 5)),
    ("seq_id: expected a hashable id", "('new', [])", lambda m: m.admit(("new", []), 5)),
    ("seq_id: expected a hashable id", "[]", lambda m: m.fork([], "new")),
    ("seq_id: expected a hashable id", "[]", lambda m: m.free([])),
    ("seq_id: expected a hashable id", "[]", lambda m: m.preempt([])),
    ("seq_id: expected a hashable id", "[]", lambda m: m.reorder(["a", "b"], ["a", []])),
    ("seq_id: expected a hashable id", "{}", lambda m: m.append(["a", {}], [[1], [2]])),
    ("seq_id: expected a hashable id", "array([0., 0.])", lambda m: m.commit([np.zeros(2)])),
    ("seq_id: expected a hashable id", "[]", lambda m: m.rollback(["a", []], [1, 2])),
    ("seq_id: expected a hashable id", "[]", lambda m: m.allocate_token_slot([], 1)),
    ("seq_id: expected a hashable id", "[]", lambda m: m.swap_out(["a", []])),
    ("seq_id: expected a hashable id", "[]", lambda m: m.swap_in([[], "away"])),
    ("seq_id: expected a hashable id", "[]", lambda m: m.seq_len([])),
    ("seq_id: expected a hashable id", "[]", lambda m: [] in m),
    ("chunk_size: expected an integer of at least 1", "2.5", lambda m: m.admit("new", 5, chunk_size=2.5)),
    ("chunk_size: expected an integer of at least 1", "True", lambda m: m.admit("new", 5, chunk_size=True)),
    ("keys: expected a sequence of ContentKey", "'salt'", lambda m: m.admit("new", [1, 2], keys="salt")),
    (
        "keys: expected a sequence of ContentKey",
        "[('salt', 'x')]",
        lambda m: m.pin([1], keys=[("salt", "x")]),
    ),
    (
        "keys: expected a sequence of ContentKey",
        repr(ContentKey("salt", "x")),
        lambda m: m.admit("new", [1, 2], keys=ContentKey("salt", "x")),
    ),
    ("child_id: expected a hashable id", "{}", lambda m: m.fork("a", {})),
    ("parents: expected a sequence of ids", "'ba'", lambda m: m.reorder(["a", "b"], "ba")),
    ("seq_ids: expected a sequence of ids", "'ab'", lambda m: m.reorder("ab", ["b", "a"])),
    ("seq_ids: expected a sequence of ids", "'a'", lambda m: m.append("a", [[1]])),
    ("seq_ids: expected a sequence of ids", "b'a'", lambda m: m.append(b"a", [[1]])),
    ("seq_ids: expected a sequence of ids", "{'a'}", lambda m: m.append({"a"}, [[1]])),
    ("seq_ids: expected a sequence of ids", "3", lambda m: m.append(3, [[1]])),
    ("tokens: expected one entry for each of the 1 sequences", "5", lambda m: m.append(["a"], 5)),
    ("tokens: expected one entry for each of the 1 sequences", "{5}", lambda m: m.append(["a"], {5})),
    ("tokens: expected one entry for each of the 1 sequences", "'5'", lambda m: m.append(["a"], "5")),
    ("tokens: expected the token ids of a sequence or their number", "1.0", lambda m: m.append(["a"], [1.0])),
    ("tokens: expected an integer of at least 0", "True", lambda m: m.append(["a", "b"], [[1, 2], True])),
    ("tokens: expected ids that are integers", "float64", lambda m: m.append(["a"], np.ones((1, 1)))),
    ("tokens: expected ids that are integers", "bool", lambda m: m.append(["a"], np.ones((1, 1), bool))),
    ("tokens: expected ids that are integers", "float32", lambda m: m.append(["a"], torch.ones(1, 1))),
    ("lookahead: expected an integer of at least 0", "0.5", lambda m: m.append(["a"], [[1]], lookahead=0.5)),
    (
        "lookahead: expected an integer of at least 0",
        "True",
        lambda m: m.append(["a"], [[1]], lookahead=True),
    ),
    ("seq_ids: expected a sequence of ids", "'a'", lambda m: m.commit("a")),
    ("seq_ids: expected a sequence of ids", "dict_keys(['a'])", lambda m: m.commit({"a": 1}.keys())),
    ("seq_ids: expected a sequence of ids", "'a'", lambda m: m.rollback("a", [3])),
    (
        "current_seq_len of 'a': expected an integer from 1 to 8",
        "8.0",
        lambda m: m.allocate_token_slot("a", 8.0),
    ),
    (
        "current_seq_len of 'new': expected an integer from 1 to 1",
        "True",
        lambda m: m.allocate_token_slot("new", True),
    ),
    ("seconds: expected a number of at least 0", "'9'", lambda m: m.pin([0, 1, 2, 3], seconds="9")),
    ("seconds: expected a number of at least 0", "True", lambda m: m.pin([0, 1, 2, 3], seconds=True)),
    ("tokens: expected the token ids of a sequence or their number", "5.0", lambda m: m.pin(5.0)),
    ("pin: expected a Pin", "0", lambda m: m.unpin(0)),
    ("seq_ids: expected a sequence of ids", "'a'", lambda m: m.swap_out("a")),
    ("seq_ids: expected a sequence of ids", "'away'", lambda m: m.swap_in("away")),
    ("seq_ids: expected a sequence of ids", "'a'", lambda m: m.seq_lens("a")),
    ("seq_ids: expected a sequence of ids", "'a'", lambda m: m.slots("a")),
    ("group: expected an integer from 0 to 1", "True", lambda m: m.block_tables(["a"], group=True)),
    ("group: expected an integer from 0 to 1", "0.0", lambda m: m.slots(["a"], group=0.0)),
    ("subscriber: expected a function", "[]", lambda m: m.subscribe([])),
    ("seq_lens: expected one integer for each of the 1 sequences", "[1.0]", lambda m: m.commit(["a"], [1.0])),
    (
        "seq_lens: expected one integer for each of the 1 sequences",
        "[True]",
        lambda m: m.rollback(["a"], [True]),
    ),
    (
        "seq_lens: expected one integer for each of the 2 sequences",
        "[7, True]",
        lambda m: m.commit(["a", "b"], [7, True]),
    ),
    ("seq_lens: expected one integer for each of the 1 sequences", "3", lambda m: m.rollback(["a"], 3)),
    ("seq_lens: expected one integer for each of the 1 sequences", "None", lambda m: m.rollback(["a"], None)),
]

OUT_OF_RANGE = [
    ("tokens: expected an integer of at least 0", "-1", lambda m: m.admit("new", -1)),
    ("tokens: expected an integer of at least 0", "-3", lambda m: m.append(["a"], [-3])),
    (
        "tokens: expected one row of ids for a sequence",
        "[[1], [1, 2]]",
        lambda m: m.admit("new", [[1], [1, 2]]),
    ),
    ("tokens: expected ids that fit into 32 bits", f"1 to {2**40}", lambda m: m.admit("new", [1, 2**40])),
    ("tokens: expected ids that fit into 32 bits", f"1 to {2**63}", lambda m: m.admit("new", [1, 2**63])),
    (
        "tokens: expected ids that fit into 32 bits",
        f"{2**70} to {2**70}",
        lambda m: m.append(["a"], [[2**70]]),
    ),
    ("chunk_size: expected an integer of at least 1", "0", lambda m: m.admit("new", 5, chunk_size=0)),
    ("lookahead: expected an integer of at least 0", "-1", lambda m: m.append(["a"], [[1]], lookahead=-1)),
    ("seconds: expected a number of at least 0", "nan", lambda m: m.pin([0, 1, 2, 3], seconds=float("nan"))),
    ("seconds: expected a number of at least 0", "-1", lambda m: m.pin([0, 1, 2, 3], seconds=-1)),
    (
        "seq_lens: expected one integer for each of the 1 sequences",
        "[[1], 2]",
        lambda m: m.commit(["a"], [[1], 2]),
    ),
    ("seq_lens: expected one integer for each of the 1 sequences", "[]", lambda m: m.rollback(["a"], [])),
    (
        "seq_lens: expected one integer for each of the 1 sequences",
        f"[{2**70}]",
        lambda m: m.commit(["a"], [2**70]),
    ),
    ("seq_lens: expected 7 for sequence 'a'", "-1", lambda m: m.commit(["a"], [-1])),
    ("seq_lens: expected 9 for sequence 'b'", "10", lambda m: m.commit(["a", "b"], [7, 10])),
    ("seconds: expected a number of at least 0", f"{10**400}", lambda m: m.pin([0], seconds=10**400)),
    ("group: expected an integer from 0 to 1", "2", lambda m: m.block_tables(["a"], group=2)),
    ("group: expected an integer from 0 to 1", "-1", lambda m: m.slots(["a"], group=-1)),
]


@pytest.mark.parametrize(
    ("error", "expected", "got", "call"),
    [(TypeError, *row) for row in WRONG_KINDS] + [(ValueError, *row) for row in OUT_OF_RANGE],
)
def test_a_wrong_argument_is_named_and_nothing_changes(m, error, expected, got, call):
    before = snapshot(m)
    with pytest.raises(error, match=f"^{re.escape(expected)}, got {re.escape(got)}$"):
        call(m)
    assert snapshot(m) == before
    m.check()


@pytest.mark.parametrize(
    ("error", "argument", "value", "expected"),
    [
        (TypeError, "num_blocks", 8.0, "an integer from 1 to 2147483647"),
        (TypeError, "num_blocks", True, "an integer from 1 to 2147483647"),
        (TypeError, "num_blocks", "8", "an integer from 1 to 2147483647"),
        (ValueError, "num_blocks", 0, "an integer from 1 to 2147483647"),
        (ValueError, "num_blocks", 2**40, "an integer from 1 to 2147483647"),
        (TypeError, "block_size", np.float64(4), "an integer from 1 to 2147483647"),
        (ValueError, "block_size", -4, "an integer from 1 to 2147483647"),
        (ValueError, "block_size", 2**70, "an integer from 1 to 2147483647"),
        (TypeError, "num_host_blocks", False, "an integer from 0 to 2147483647"),
        (ValueError, "num_host_blocks", -1, "an integer from 0 to 2147483647"),
        (ValueError, "num_host_blocks", 2**40, "an integer from 0 to 2147483647"),
        (TypeError, "pin_budget", 0.5, "an integer of at least 0"),
        (ValueError, "pin_budget", np.int8(-1), "an integer of at least 0"),
        (TypeError, "windows", 4, "None or an integer of at least 1 for each group of layers"),
        (TypeError, "windows", "4", "None or an integer of at least 1 for each group of layers"),
        (ValueError, "windows", (), "None or an integer of at least 1 for each group of layers"),
        (TypeError, "prefix_cache", "no", "True or False"),
        (TypeError, "partial_hits", 1, "True or False"),
        (TypeError, "identity", b"x", "text"),
        (TypeError, "identity", None, "text"),
        (TypeError, "clock", 0.0, "a function"),
    ],
)
def test_a_manager_is_not_made_of_wrong_arguments(error, argument, value, expected):
    with pytest.raises(error, match=f"^{argument}: expected {expected}, got {re.escape(repr(value))}$"):
        PagedKVCacheManager(**{"num_blocks": 8, "block_size": 4, argument: value})


@pytest.mark.parametrize(
    ("error", "window"), [(TypeError, 2.5), (TypeError, True), (TypeError, "4"), (ValueError, 0)]
)
def test_a_window_is_an_integer(error, window):
    message = rf"^windows\[1\]: expected an integer of at least 1, got {window!r}$"
    with pytest.raises(error, match=message):
        PagedKVCacheManager(8, 4, windows=(None, window))


def test_there_are_at_most_256_groups():
    with pytest.raises(ValueError, match=r"^windows: expected at most 256 entries, got 257$"):
        PagedKVCacheManager(600, 4, windows=(None,) * 257)
    m = PagedKVCacheManager(600, 4, windows=(None,) * 256)
    for seq_id in "ab":
        m.admit(seq_id, [1] * 6)
        m.append([seq_id], [[1] * (6 - m.seq_len(seq_id))])
        m.commit([seq_id])
        m.free(seq_id)
    assert m.stats().counters.cached_tokens == 4
    m.reset_prefix_cache()
    assert m.stats().num_free_blocks == 600
    m.check()


def test_a_window_may_be_wider_than_any_length():
    m = PagedKVCacheManager(8, 4, windows=(2**63, 10**30))
    m.admit("a", 9)
    m.append(["a"], [9])
    m.commit(["a"])
    m.rollback(["a"], [3])
    assert m.seq_len("a") == 3
    m.check()


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (TypeError, ("salt", 5), "value: expected text or bytes, got 5"),
        (TypeError, (b"salt", "x"), "kind: expected text, got b'salt'"),
        (TypeError, ("media", "x", 1.0, 4), "start: expected an integer of at least 0, got 1.0"),
        (TypeError, ("media", "x", 1, True), "stop: expected an integer of at least 1, got True"),
        (ValueError, ("media", "x", -1, 4), "start: expected an integer of at least 0, got -1"),
        (
            ValueError,
            ("media", "x", 4, 4),
            "start: expected less than stop, or 0 without a stop, got 4 and 4",
        ),
        (ValueError, ("salt", "x", 4), "start: expected less than stop, or 0 without a stop, got 4 and None"),
    ],
)
def test_a_content_key_is_not_made_of_wrong_arguments(error, arguments, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        ContentKey(*arguments)


def test_memory_that_is_not_there_is_told(monkeypatch):
    def refused(num_blocks):
        raise MemoryError

    monkeypatch.setattr("paged_kv.manager.manager.BlockPool", refused)
    words = (
        "num_blocks, block_size, num_host_blocks: expected what memory can keep account of, got 8, 4 and 0"
    )
    with pytest.raises(MemoryError, match=f"^{words}$"):
        PagedKVCacheManager(8, 4)


def test_integers_of_numpy_do_as_well():
    i = np.int64
    m = PagedKVCacheManager(
        i(16), np.uint8(4), windows=[None, i(6)], num_host_blocks=i(8), pin_budget=np.int32(2)
    )
    plain = PagedKVCacheManager(16, 4, windows=[None, 6], num_host_blocks=8, pin_budget=2)
    for manager, number in ((m, np.int16), (plain, int)):
        assert manager.admit(number(3), number(5), chunk_size=number(2)).admitted
        key = ContentKey("media", "cat", number(1), number(3))
        assert manager.admit("b", [1, 2, 3, 4, 5], keys=[key]).admitted
        manager.append((number(3), "b"), [number(5), np.arange(1, 6)], lookahead=number(3))
        manager.commit(np.array([3]), [number(5)])
        manager.commit(["b"])
        manager.rollback([number(3)], (number(4),))
        assert manager.allocate_token_slot(number(3), number(5)) == manager.block_tables([3], number(0))[0, 1]
        assert manager.pin([1, 2, 3, 4], keys=[key], seconds=np.float32(9)).num_tokens == 4
        manager.check()
    assert (m.num_blocks, m.block_size, m.windows) == (16, 4, (None, 6))
    assert {type(size) for size in (m.num_blocks, m.block_size, m.windows[1])} == {int}
    assert m.block_tables([3, "b"]).tolist() == plain.block_tables([3, "b"]).tolist()
    assert m.stats() == plain.stats()


def test_ids_are_opaque():
    """Whatever fits into 32 bits is an id: which of them a model has is for its caller to know."""
    m, ids = PagedKVCacheManager(16, 4), [-1, -(2**31), 2**31 - 1, 0, 7]
    for seq_id in "ab":
        num_cached = m.admit(seq_id, ids).num_cached_tokens
        m.append([seq_id], [ids[num_cached:]])
        m.commit([seq_id])
    assert num_cached == 4
    assert m.admit("c", [1, *ids[1:]]).num_cached_tokens == 0


def test_a_pin_may_last_for_ever(m):
    pin = m.pin([0, 1, 2, 3], seconds=float("inf"))
    assert isinstance(pin, Pin) and pin.num_tokens == 4
