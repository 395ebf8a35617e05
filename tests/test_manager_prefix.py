"""The prefix cache, rule by rule."""

import subprocess
import sys
from hashlib import sha256

import numpy as np
import pytest
import torch

from paged_kv.errors import OutOfBlocksError, PinBudgetError
from paged_kv.manager import AdmissionStatus, ContentKey, PagedKVCacheManager, chain

TOKENS = list(range(100, 120))


def manager(num_blocks=16, block_size=4, **options):
    return PagedKVCacheManager(num_blocks, block_size, **options)


def serve(m, seq_id, tokens, keys=(), commit=True):
    """Admits and appends; returns how many tokens were cached."""
    admission = m.admit(seq_id, tokens, keys=keys)
    assert admission.admitted
    m.append([seq_id], [tokens[admission.num_cached_tokens :]])
    if commit:
        m.commit([seq_id])
    m.check()
    return admission.num_cached_tokens


def test_a_prompt_finds_what_another_computed_but_for_one_token():
    m = manager()
    assert serve(m, "a", TOKENS) == 0
    assert (
        serve(m, "b", TOKENS) == 16
    )  # 20 tokens are 5 blocks; the last one has the token that must be computed
    assert serve(m, "c", TOKENS[:17]) == 16
    assert serve(m, "d", TOKENS[:16]) == 12
    assert m.block_tables(["a"])[0, :4].tolist() == m.block_tables(["b"])[0, :4].tolist()


def test_only_full_and_computed_blocks_are_found():
    m = manager()
    serve(m, "a", TOKENS[:10], commit=False)
    assert m.admit("b", TOKENS).num_cached_tokens == 0
    m.commit(["a"], [7])
    assert m.admit("c", TOKENS).num_cached_tokens == 4
    m.commit(["a"])
    assert m.admit("d", TOKENS).num_cached_tokens == 8


def test_generated_tokens_are_found_too():
    m = manager()
    serve(m, "a", TOKENS[:7])
    for token in TOKENS[7:]:
        m.append(["a"], [[token]])
        m.commit(["a"])
    assert m.admit("b", [*TOKENS, 1]).num_cached_tokens == 20


def test_drafts_are_found_only_once_accepted():
    m = manager()
    serve(m, "a", TOKENS[:6])
    m.append(["a"], [TOKENS[6:15]])
    assert m.admit("b", TOKENS).num_cached_tokens == 4
    m.rollback(["a"], [9])
    m.commit(["a"])
    assert m.admit("c", TOKENS).num_cached_tokens == 8


def test_tokens_without_ids_are_never_published():
    m = manager()
    m.admit("a", 8)
    m.append(["a"], [4])
    m.append(["a"], [TOKENS[4:8]])
    m.commit(["a"])
    assert m.stats().counters.stored == 0


@pytest.mark.parametrize(
    "form",
    [list, tuple, np.array, lambda t: np.array(t, np.uint16), lambda t: np.array(t, ">i4"), torch.tensor],
)
def test_the_container_of_tokens_does_not_matter(form):
    m = manager()
    serve(m, "a", TOKENS)
    assert m.admit("b", form(TOKENS)).num_cached_tokens == 16


@pytest.mark.parametrize("value", [7, None, "\ud800"])
def test_a_key_that_cannot_be_hashed_is_refused_at_once(value):
    with pytest.raises((TypeError, ValueError)):
        ContentKey("media", value, 0, 4)


def test_keys_and_their_kinds_keep_contents_apart():
    keys = [
        (),
        (ContentKey("salt", "x"),),
        (ContentKey("adapter", "x"),),
        (ContentKey("adapter", "x"), ContentKey("salt", "x")),
        (ContentKey("salt", b"y"),),
        (ContentKey("media", "x", 0, 4),),
        (ContentKey("media", "x", 1, 4),),
        (ContentKey("media", "x", 0, 5),),
    ]
    m = manager(num_blocks=64)
    for seq_id, entry in enumerate(keys):
        assert serve(m, seq_id, TOKENS, entry) == 0
    for seq_id, entry in enumerate(keys, 100):
        assert serve(m, seq_id, TOKENS, entry[::-1]) == 16


def test_a_key_of_later_tokens_leaves_the_blocks_before_them_shared():
    m = manager()
    serve(m, "a", TOKENS, [ContentKey("media", "cat", 9, 12)])
    assert m.admit("b", TOKENS, keys=[ContentKey("media", "dog", 9, 12)]).num_cached_tokens == 8


@pytest.mark.parametrize("span", [(3, 3), (5, 2), (1, None)])
def test_a_key_needs_tokens(span):
    with pytest.raises(ValueError, match="start: expected less than stop"):
        ContentKey("media", "x", *span)


def test_digests_are_equal_in_every_process_and_tell_caches_apart():
    code = (
        "from paged_kv.manager.chain import ContentKey, TokenChain, root_digest\n"
        "import numpy as np\n"
        "root = root_digest('model, bfloat16', 4, [ContentKey('salt', 'x')])\n"
        "c = TokenChain(root, 4, np.arange(8, dtype=np.int32).tobytes(), [ContentKey('media', 'cat', 1, 6)])\n"
        "c.extend_from_prompt(2)\n"
        "print(root.hex(), *(d.hex() for d in c.digests))\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(outputs) == 1
    root, first, second = (bytes.fromhex(word) for word in outputs.pop().split())

    def field(value):
        return len(value).to_bytes(4, "little") + value

    def number(value):
        return value.to_bytes(8, "little", signed=True)

    header = field(b"paged_kv") + field(b"model, bfloat16") + number(4)
    assert root == sha256(header + field(b"salt") + field(b"x")).digest()
    media = field(b"media") + field(b"cat")
    tokens = [np.arange(4, dtype="<i4").tobytes(), np.arange(4, 8, dtype="<i4").tobytes()]
    assert first == sha256(root + tokens[0] + media + number(1) + number(6)).digest()
    assert second == sha256(first + tokens[1] + media + number(-3) + number(2)).digest()
    assert chain.root_digest("other", 4, ()) != chain.root_digest("model", 4, ())
    assert chain.root_digest("model", 8, ()) != chain.root_digest("model", 4, ())


@pytest.mark.parametrize("windows", [(None,), (6,)])
def test_a_hit_is_verified_against_the_tokens(monkeypatch, windows):
    monkeypatch.setattr(
        chain, "hash_blocks", lambda parent, tokens, start, count, size: [b"same" * 8] * count
    )
    m = manager(windows=windows)
    m.admit("a", TOKENS[:4])
    m.append(["a"], [TOKENS[:4]])
    m.commit(["a"])
    assert m.admit("b", [*TOKENS[:4], 5]).num_cached_tokens == 4
    assert m.admit("c", [*TOKENS[4:8], 5]).num_cached_tokens == 0


def test_each_full_block_is_hashed_once_ever(monkeypatch):
    hashed = []

    def counting(parent, tokens, start, count, block_bytes):
        digests = hash_blocks(parent, tokens, start, count, block_bytes)
        parents = [parent, *digests]
        hashed.extend(
            (parents[i], tokens[start + i * block_bytes : start + (i + 1) * block_bytes])
            for i in range(count)
        )
        return digests

    hash_blocks = chain.hash_blocks
    monkeypatch.setattr(chain, "hash_blocks", counting)
    m = manager(num_blocks=10)
    m.admit("filler", 24)
    m.append(["filler"], [24])
    for _ in range(3):
        assert m.admit("a", TOKENS).status is AdmissionStatus.LATER
    m.free("filler")
    m.admit("a", TOKENS)
    m.append(["a"], [TOKENS])
    m.commit(["a"])
    m.append(["a"], [[1, 2, 3, 4, 5]])
    m.commit(["a"])
    m.fork("a", "b")
    m.commit(["a", "b"])
    m.preempt("b")
    m.admit("b", [*TOKENS, 1, 2, 3, 4, 5, 6])
    assert len(hashed) == len(set(hashed)) == 6


def test_a_recycled_block_is_not_found_any_more():
    m = manager(num_blocks=6)
    serve(m, "a", TOKENS)
    m.free("a")
    m.admit("b", 24)
    m.append(["b"], [24])
    m.free("b")
    assert m.stats().counters.evicted == 5
    assert m.admit("c", TOKENS).num_cached_tokens == 0


def test_the_end_of_the_chain_used_longest_ago_goes_first():
    m = manager(num_blocks=12)
    serve(m, "old", TOKENS)
    serve(m, "new", TOKENS[::-1])
    m.free("old")
    m.free("new")
    m.admit("x", 16)
    m.append(["x"], [16])  # 2 free blocks and 2 evicted ones
    assert m.admit("old", [*TOKENS, 1]).num_cached_tokens == 12
    m.free("old")
    assert m.admit("new", [*TOKENS[::-1], 1]).num_cached_tokens == 20


def test_a_hit_makes_blocks_recent_again():
    m = manager(num_blocks=12)
    serve(m, "old", TOKENS)
    serve(m, "new", TOKENS[::-1])
    m.free("old")
    m.free("new")
    m.admit("again", TOKENS)
    m.free("again")
    m.admit("x", 16)
    m.append(["x"], [16])
    m.free("x")
    assert (
        m.admit("old", [*TOKENS, 1]).num_cached_tokens == 16
    )  # the last block was not held, so it was older
    assert m.admit("new", [*TOKENS[::-1], 1]).num_cached_tokens == 16


def test_several_prompts_of_one_step_hit_the_same_blocks():
    m = manager()
    serve(m, "a", TOKENS)
    m.free("a")
    assert m.stats().num_evictable_blocks == 5
    for seq_id in "bcd":
        assert m.admit(seq_id, TOKENS).num_cached_tokens == 16
    m.append(list("bcd"), [TOKENS[16:]] * 3)
    assert m.stats().num_saved_blocks == 8
    m.commit(list("bcd"))
    assert m.num_available_blocks == 16 - 5  # equal content meets in one block
    assert m.stats().num_used_blocks == 5
    m.check()


def test_a_partial_block_is_reused_through_a_copy():
    m = manager(partial_hits=True)
    serve(m, "a", TOKENS)
    admission = m.admit("b", [*TOKENS[:10], 1, 2, 3])
    assert admission.num_cached_tokens == 10
    step = m.append(["b"], [[1, 2, 3]])
    source, destination = step.block_copies[0]
    assert source == m.block_tables(["a"])[0, 2]
    assert destination == m.block_tables(["b"])[0, 2]
    assert step.slot_mapping.tolist()[0] == destination * 4 + 2
    m.commit(["b"])
    m.check()
    assert m.admit("c", [*TOKENS[:10], 1, 2, 3]).num_cached_tokens == 12


def test_without_being_asked_a_partial_block_is_not_reused():
    m = manager()
    serve(m, "a", TOKENS)
    assert m.admit("b", [*TOKENS[:10], 1, 2, 3]).num_cached_tokens == 8


def test_admission_counts_the_blocks_it_would_take_from_the_evictable():
    m = manager(num_blocks=8)
    serve(m, "a", TOKENS[:16])
    m.free("a")  # 4 evictable, 4 free
    serve(m, "b", list(range(12)))  # 3 of the free ones
    # 4 blocks are cached, but 1 that is free is not enough for the other 4, though 5 could be handed out.
    assert m.admit("c", [*TOKENS[:16], *range(16)]).status is AdmissionStatus.LATER
    assert m.stats().num_evictable_blocks == 4
    assert m.admit("c", [*TOKENS[:16], 1]).num_cached_tokens == 16


def test_pins_keep_to_their_budget_and_expire():
    now = [0.0]
    m = manager(num_blocks=8, pin_budget=5, clock=lambda: now[0])
    serve(m, "a", TOKENS)
    m.free("a")
    pin = m.pin(TOKENS, seconds=10)
    assert pin.num_tokens == 20
    assert m.pin(TOKENS[:8]).num_tokens == 8  # pinned already: needs no more of the budget
    serve(m, "b", list(range(8)))
    with pytest.raises(PinBudgetError) as error:
        m.pin(list(range(8)))
    assert (error.value.needed, error.value.left) == (2, 0)
    m.free("b")
    assert m.admit("big", 16).status is AdmissionStatus.LATER
    now[0] = 10.0
    assert m.admit("big", 24).admitted  # all but the 2 blocks of the pin that does not expire
    m.append(["big"], [24])
    assert m.stats().num_pinned_blocks == 2
    m.free("big")
    assert m.admit("c", TOKENS).num_cached_tokens == 8
    m.unpin(pin)
    m.check()


def test_what_is_not_cached_cannot_be_pinned():
    m = manager()
    assert m.pin(TOKENS).num_tokens == 0


def test_reset_forgets_everything_and_publishes_nothing_old():
    m = manager()
    serve(m, "running", TOKENS[:10])
    serve(m, "done", TOKENS[::-1])
    m.free("done")
    m.pin(TOKENS[:8])
    m.reset_prefix_cache()
    m.check()
    stats = m.stats()
    assert (stats.num_evictable_blocks, stats.num_pinned_blocks, stats.num_used_blocks) == (0, 0, 3)
    m.append(["running"], [TOKENS[10:]])
    m.commit(["running"])
    assert m.admit("new", TOKENS).num_cached_tokens == 0
    m.append(["new"], [TOKENS])
    m.commit(["new"])
    assert m.admit("newer", TOKENS).num_cached_tokens == 16
    m.check()


def test_retries_and_recomputed_tokens_are_not_counted():
    m = manager(num_blocks=8)
    serve(m, "a", TOKENS)
    for _ in range(3):
        assert m.admit("b", [*TOKENS, *TOKENS]).status is not AdmissionStatus.ADMITTED
    assert m.stats().counters.prompt_tokens == 20
    m.preempt("a")
    assert m.admit("a", [*TOKENS, 7]).num_cached_tokens == 20
    counters = m.stats().counters
    assert (counters.prompt_tokens, counters.cached_tokens, counters.preempted) == (20, 0, 1)
    m.free("a")
    assert m.admit("b", TOKENS).num_cached_tokens == 16
    assert m.stats().hit_rate == pytest.approx(16 / 40)


def test_a_cached_block_is_copied_before_it_is_written_and_forgotten_only_where_there_is_no_room():
    m = manager(num_blocks=3)
    serve(m, "a", TOKENS[:8])
    m.rollback(["a"], [6])
    step = m.append(["a"], [[1]])
    assert len(step.block_copies) == 1
    assert m.stats().counters.evicted == 0
    m.rollback(["a"], [3])
    m.admit("b", 8)
    m.append(["b"], [8])
    assert m.append(["a"], [[1]]).block_copies == []
    m.check()
    assert m.stats().counters.evicted == 2


def test_without_a_prefix_cache_nothing_is_kept():
    m = manager(prefix_cache=False)
    serve(m, "a", TOKENS)
    m.free("a")
    assert m.stats().num_free_blocks == 16
    assert serve(m, "b", TOKENS) == 0
    m.reset_prefix_cache()
    assert m.pin(TOKENS).num_tokens == 0


@pytest.mark.parametrize(
    ("tokens", "error", "match"),
    [
        ([1.5], TypeError, "ids that are integers, got float64"),
        ([2**31], ValueError, "ids that fit into 32 bits, got 2147483648"),
        (np.array([True]), TypeError, "ids that are integers, got bool"),
    ],
)
def test_token_ids_are_checked(tokens, error, match):
    m = manager()
    with pytest.raises(error, match=match):
        m.admit("a", tokens)
    m.admit("a", 1)
    with pytest.raises(error, match=match):
        m.append(["a"], [tokens])
    assert m.seq_len("a") == 0


def test_equal_blocks_that_meet_when_room_is_short_are_not_written():
    m = manager(num_blocks=3)
    m.admit("a", TOKENS[:9])
    m.append(["a"], [TOKENS[:4]])
    m.fork("a", "b")
    m.append(["a", "b"], [TOKENS[4:8]] * 2)
    m.commit(["a"])
    m.rollback(["a"], [6])  # into a block that the cache finds, and so far only a holds
    m.commit(["b"])
    with pytest.raises(OutOfBlocksError) as error:
        m.append(["a"], [[1, 2, 3]])  # b lets go of its own block for a's, which then is no longer a's alone
    assert (error.value.needed, error.value.free) == (2, 1)
    m.check()
    assert m.block_tables(["b"])[0].tolist() == m.block_tables(["a"])[0].tolist()


def test_a_preempted_sequence_is_not_counted_again_after_a_reset():
    m = PagedKVCacheManager(8, 4)
    for seq_id in ("a", "b"):
        m.admit(seq_id, [1] * 9)
        m.append([seq_id], [[1] * (9 - m.seq_len(seq_id))])
        m.commit([seq_id])
    m.preempt("a")
    m.reset_prefix_cache()
    assert m.admit("a", [1] * 9).num_cached_tokens == 0
    assert m.stats().counters.prompt_tokens == 18
    m.append(["a"], [[1] * 9])
    m.commit(["a"])
    m.check()


def test_tokens_that_were_rolled_back_name_nothing_after_a_preemption():
    m = manager()
    serve(m, "a", TOKENS[:8])
    m.rollback(["a"], [4])
    m.append(["a"], [[1, 2, 3, 4]])
    m.preempt("a")
    assert serve(m, "a", [*TOKENS[:4], 1, 2, 3, 4, 5]) == 4
    assert m.admit("b", [*TOKENS[:8], 5]).num_cached_tokens == 8
    assert m.admit("c", [*TOKENS[:4], 1, 2, 3, 4, 5]).num_cached_tokens == 8
