"""Export and import: a file holds a sequence or a prefix cache, and a cache that differs refuses it by name."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from paged_kv import PagedKVCache, ops
from paged_kv.errors import DuplicateSequenceError, OutOfBlocksError, TransferMismatchError
from paged_kv.manager import ContentKey, PagedKVCacheManager
from paged_kv.transfer import (
    export_prefix_cache,
    export_sequence,
    import_prefix_cache,
    import_sequence,
)

TOKENS = list(range(40, 54))


def pair(num_blocks=16, dtype=torch.float32, identity="model a", **options):
    manager = PagedKVCacheManager(num_blocks, 4, identity=identity, **options)
    return manager, PagedKVCache(2, 2, 8, dtype, 4, num_blocks=num_blocks)


def serve(manager, cache, seq_id, tokens, keys=()):
    """Admits, appends, writes random keys and values, commits."""
    cached = manager.admit(seq_id, tokens, keys=keys).num_cached_tokens
    step = manager.append([seq_id], [tokens[cached:]])
    for slots in step.slot_mappings:
        for layer in range(2):
            key = torch.randn(len(slots), 2, 8)
            key, value = (
                (key, -key) if cache.scales == "token" else (key.to(cache.dtype), -key.to(cache.dtype))
            )
            cache.write(layer, key, value, torch.from_numpy(slots))
    manager.commit([seq_id])


def content(manager, cache, seq_id, group=0, start=0):
    table = torch.from_numpy(manager.block_tables([seq_id], group))
    seq_lens = torch.from_numpy(manager.seq_lens([seq_id]))
    gathered = [
        ops.gather_kv(layer.key, layer.value, table, seq_lens, k_scale=layer.k_scale, v_scale=layer.v_scale)
        for layer in cache
    ]
    return torch.stack([torch.stack(kv) for kv in gathered])[:, :, start:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_a_sequence_comes_back_as_it_was(tmp_path, dtype):
    manager, cache = pair(dtype=dtype)
    serve(manager, cache, "a", TOKENS)
    export_sequence(tmp_path / "a.safetensors", manager, cache, "a")
    other, other_cache = pair(dtype=dtype, num_blocks=9)
    import_sequence(tmp_path / "a.safetensors", other, other_cache, "b")
    other.check()
    assert torch.equal(content(other, other_cache, "b"), content(manager, cache, "a"))
    assert other.admit("c", TOKENS).num_cached_tokens == 12  # it is published
    other.append(["b"], [[1, 2, 3]])
    other.commit(["b"])
    other.check()


def test_what_is_cached_already_is_held_again(tmp_path):
    manager, cache = pair()
    serve(manager, cache, "a", TOKENS)
    export_sequence(tmp_path / "a", manager, cache, "a")
    import_sequence(tmp_path / "a", manager, cache, "b")
    assert manager.stats().num_used_blocks == 5  # 3 shared ones and the partial last block twice
    assert torch.equal(content(manager, cache, "b"), content(manager, cache, "a"))
    manager.check()


def test_only_the_computed_part_and_the_held_window_are_exported(tmp_path):
    manager, cache = pair(windows=(None, 5))
    serve(manager, cache, "a", TOKENS)
    manager.append(["a"], [[1, 2, 3, 4]])
    export_sequence(tmp_path / "a", manager, cache, "a")
    other, other_cache = pair(windows=(None, 5))
    import_sequence(tmp_path / "a", other, other_cache, "b")
    other.check()
    assert other.seq_len("b") == 14
    manager.rollback(["a"], [14])
    for group, start in ((0, 0), (1, 10)):
        assert torch.equal(
            content(other, other_cache, "b", group, start), content(manager, cache, "a", group, start)
        )


def test_tokens_without_ids_travel_and_stay_unpublished(tmp_path):
    manager, cache = pair()
    manager.admit("a", 9)
    manager.append(["a"], [9])
    manager.commit(["a"])
    export_sequence(tmp_path / "a", manager, cache, "a")
    other, other_cache = pair()
    import_sequence(tmp_path / "a", other, other_cache, "a")
    other.append(["a"], [[1, 2, 3]])
    other.commit(["a"])
    assert (other.seq_len("a"), other.stats().counters.stored) == (12, 0)
    other.check()


@pytest.mark.parametrize("windows", [(5,), (None, 5)])
def test_a_window_travels_without_digests(tmp_path, windows):
    """Those of a manager without a prefix cache, of tokens without ids, and of what a reset made forget."""
    for options, tokens in (({"prefix_cache": False}, TOKENS), ({}, 14), ({}, TOKENS)):
        manager, cache = pair(windows=windows, **options)
        if isinstance(tokens, int):
            manager.admit("a", tokens)
            manager.append(["a"], [tokens])
            manager.commit(["a"])
        else:
            serve(manager, cache, "a", tokens)
        manager.reset_prefix_cache()
        export_sequence(tmp_path / "a", manager, cache, "a")
        other, other_cache = pair(windows=windows, **options)
        import_sequence(tmp_path / "a", other, other_cache, "b")
        other.append(["b"], [[1, 2, 3, 4]])
        other.commit(["b"])
        assert (other.seq_len("b"), other.stats().counters.stored) == (18, 0)
        other.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_nothing_of_former_holders_is_written(tmp_path, dtype):
    manager, cache = pair(dtype=dtype, windows=(None, 5))
    serve(manager, cache, "secret", [77] * 32)
    manager.free("secret")
    manager.admit("a", 14)
    for slots in manager.append(["a"], [14]).slot_mappings:
        for layer in range(2):
            zeros = torch.zeros(14, 2, 8)
            zeros = zeros if cache.scales == "token" else zeros.to(dtype)
            cache.write(layer, zeros, zeros, torch.from_numpy(slots))
    manager.commit(["a"])
    export_sequence(tmp_path / "a", manager, cache, "a")
    tensors = load_file(tmp_path / "a")
    assert not tensors["tokens"].any()
    for name, tensor in tensors.items():
        if name.endswith(("key", "value")):
            assert not tensor.float().any(), name


def test_keys_travel_with_the_sequence(tmp_path):
    keys = [ContentKey("salt", "s"), ContentKey("media", b"\xff", 2, 7), ContentKey("media", "text", 8, 9)]
    manager, cache = pair()
    serve(manager, cache, "a", TOKENS, keys)
    export_sequence(tmp_path / "a", manager, cache, "a")
    other, other_cache = pair()
    import_sequence(tmp_path / "a", other, other_cache, "a")
    assert other.admit("b", TOKENS, keys=keys).num_cached_tokens == 12
    assert other.admit("c", TOKENS).num_cached_tokens == 0


def test_a_prefix_cache_comes_back_and_hits(tmp_path):
    manager, cache = pair()
    serve(manager, cache, "a", TOKENS)
    serve(manager, cache, "b", TOKENS[:6] + TOKENS)
    serve(manager, cache, "k", TOKENS, [ContentKey("media", "cat", 5, 6)])
    manager.free("a")
    assert (
        export_prefix_cache(tmp_path / "cache", manager, cache) == 8
    )  # all but the one that has the cat in it
    other, other_cache = pair()
    assert import_prefix_cache(tmp_path / "cache", other, other_cache) == 8
    other.check()
    assert other.admit("a", TOKENS).num_cached_tokens == 12
    manager.admit("a", TOKENS)
    assert torch.equal(content(other, other_cache, "a"), content(manager, cache, "a"))
    assert import_prefix_cache(tmp_path / "cache", other, other_cache) == 0  # all there


def test_an_import_evicts_nothing_and_leaves_out_the_ends_of_chains(tmp_path):
    manager, cache = pair()
    serve(manager, cache, "a", TOKENS)
    manager.free("a")
    export_prefix_cache(tmp_path / "cache", manager, cache)
    other, other_cache = pair(num_blocks=5)
    serve(other, other_cache, "x", list(range(12)))
    other.free("x")
    assert import_prefix_cache(tmp_path / "cache", other, other_cache) == 2
    assert other.stats().counters.evicted == 0
    other.check()
    assert other.admit("a", TOKENS).num_cached_tokens == 8


@pytest.mark.parametrize(
    ("name", "options", "other_cache"),
    [
        ("identity", {"identity": "model b"}, None),
        ("block_size", {}, PagedKVCache(2, 2, 8, torch.float32, 8, num_blocks=16)),
        ("windows", {"windows": (8,)}, None),
        ("dtype", {}, PagedKVCache(2, 2, 8, torch.bfloat16, 4, num_blocks=16)),
        ("num_layers", {}, PagedKVCache(3, 2, 8, torch.float32, 4, num_blocks=16)),
        ("num_kv_heads", {}, PagedKVCache(2, 1, 8, torch.float32, 4, num_blocks=16)),
        ("head_dim", {}, PagedKVCache(2, 2, 16, torch.float32, 4, num_blocks=16)),
    ],
)
def test_a_mismatch_is_refused_by_name(tmp_path, name, options, other_cache):
    manager, cache = pair()
    serve(manager, cache, "a", TOKENS)
    export_sequence(tmp_path / "a", manager, cache, "a")
    export_prefix_cache(tmp_path / "cache", manager, cache)
    other, same_cache = pair(**options)
    if name == "block_size":
        other = PagedKVCacheManager(16, 8, identity="model a")
    for call in (
        lambda: import_sequence(tmp_path / "a", other, other_cache or same_cache, "a"),
        lambda: import_prefix_cache(tmp_path / "cache", other, other_cache or same_cache),
    ):
        with pytest.raises(TransferMismatchError, match=name) as error:
            call()
        assert error.value.name == name
    assert other.stats().num_free_blocks == 16


def test_a_cache_of_other_blocks_than_the_manager_s_is_refused(tmp_path):
    manager, cache = pair()
    serve(manager, cache, "a", TOKENS)
    export_sequence(tmp_path / "a", manager, cache, "a")
    export_prefix_cache(tmp_path / "cache", manager, cache)
    larger = PagedKVCache(2, 2, 8, torch.float32, 8, num_blocks=16)
    fewer = PagedKVCache(2, 2, 8, torch.float32, 4, num_blocks=15)
    for wrong, message in (
        (larger, r"^cache: expected block_size 4 as of manager, got 8$"),
        (fewer, r"^cache: expected the 16 blocks of manager, got 15$"),
    ):
        for call in (
            lambda wrong=wrong: export_sequence(tmp_path / "b", manager, wrong, "a"),
            lambda wrong=wrong: export_prefix_cache(tmp_path / "b", manager, wrong),
            lambda wrong=wrong: import_sequence(tmp_path / "a", manager, wrong, "b"),
            lambda wrong=wrong: import_prefix_cache(tmp_path / "cache", manager, wrong),
        ):
            with pytest.raises(ValueError, match=message):
                call()
    assert not (tmp_path / "b").exists()
    assert "b" not in manager


def test_manager_and_cache_stand_in_their_order(tmp_path):
    manager, cache = pair()
    for call in (
        lambda: export_sequence(tmp_path / "a", cache, manager, "a"),
        lambda: import_prefix_cache(tmp_path / "a", cache, manager),
    ):
        with pytest.raises(TypeError, match=r"^manager: expected a PagedKVCacheManager, got PagedKVCache$"):
            call()
    with pytest.raises(TypeError, match=r"^cache: expected a PagedKVCache, got LayerCache$"):
        import_sequence(tmp_path / "a", manager, cache[0], "a")


def test_static_scales_must_be_the_same(tmp_path):
    def scaled(value):
        cache = PagedKVCache(2, 2, 8, torch.int8, 4, num_blocks=16, scales="head")
        for layer in cache:
            layer.k_scale.fill_(value)
            layer.v_scale.fill_(value)
        return cache

    manager, _ = pair()
    serve(manager, PagedKVCache(2, 2, 8, torch.int8, 4, num_blocks=16), "a", TOKENS)
    export_sequence(tmp_path / "a", manager, scaled(0.5), "a")
    with pytest.raises(TransferMismatchError, match=r"layers\.0\.k_scale"):
        import_sequence(tmp_path / "a", pair()[0], scaled(0.25), "a")
    import_sequence(tmp_path / "a", pair()[0], scaled(0.5), "a")


def test_tokens_that_are_not_those_of_the_digests_are_refused(tmp_path):
    manager, cache = pair()
    serve(manager, cache, "a", TOKENS)
    export_sequence(tmp_path / "a", manager, cache, "a")
    export_prefix_cache(tmp_path / "cache", manager, cache)
    for path in (tmp_path / "a", tmp_path / "cache"):
        tensors = load_file(path)
        tensors["tokens"].view(-1)[2] += 1
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        save_file(tensors, path, metadata)
    other, other_cache = pair()
    with pytest.raises(TransferMismatchError, match="digests"):
        import_sequence(tmp_path / "a", other, other_cache, "a")
    with pytest.raises(TransferMismatchError, match="digests"):
        import_prefix_cache(tmp_path / "cache", other, other_cache)
    assert other.stats().num_free_blocks == 16


def test_an_import_that_cannot_be_changes_nothing(tmp_path):
    manager, cache = pair()
    serve(manager, cache, "a", TOKENS)
    export_sequence(tmp_path / "a", manager, cache, "a")
    with pytest.raises(DuplicateSequenceError):
        import_sequence(tmp_path / "a", manager, cache, "a")
    other, other_cache = pair(num_blocks=3)
    with pytest.raises(OutOfBlocksError) as error:
        import_sequence(tmp_path / "a", other, other_cache, "a")
    assert (error.value.needed, error.value.free) == (4, 3)
    with pytest.raises(ValueError, match="expected a prefix cache exported by paged_kv"):
        import_prefix_cache(tmp_path / "a", other, other_cache)
    with pytest.raises(ValueError, match="prefix_cache=True"):
        import_prefix_cache(tmp_path / "a", PagedKVCacheManager(3, 4, prefix_cache=False), other_cache)
    save_file({"x": torch.zeros(1)}, tmp_path / "foreign", {"paged_kv": json.dumps({"kind": "other"})})
    with pytest.raises(ValueError, match="expected a sequence exported by paged_kv"):
        import_sequence(tmp_path / "foreign", other, other_cache, "a")
    assert other.stats().num_free_blocks == 3


DAMAGE = [
    ("a", {}, {"layers.1.value": None}),
    ("a", {}, {"layers.1.value": torch.zeros(3, 2, 4, 8)}),
    ("a", {}, {"layers.1.value": torch.zeros(4, 2, 4, 8, dtype=torch.float16)}),
    ("a", {}, {"tokens": torch.arange(40, 54)}),
    ("a", {}, {"tokens": torch.arange(40, 57, dtype=torch.int32)}),
    ("a", {"known_len": -1}, {}),
    ("a", {"known_len": 15}, {}),
    ("a", {"first_block": [5]}, {}),
    ("a", {"first_block": [0, 0]}, {}),
    ("cache", {}, {"layers.0.key": torch.zeros(2, 2, 4, 8)}),
    ("cache", {}, {"groups": torch.ones(3, dtype=torch.uint8)}),
    ("cache", {}, {"groups": torch.zeros(2, dtype=torch.uint8)}),
]


@pytest.mark.parametrize(("file", "meta", "changed"), DAMAGE)
def test_a_file_whose_parts_do_not_fit_together_changes_nothing(tmp_path, file, meta, changed):
    manager, cache = pair()
    serve(manager, cache, "a", TOKENS)
    export_sequence(tmp_path / "a", manager, cache, "a")
    export_prefix_cache(tmp_path / "cache", manager, cache)
    with safe_open(tmp_path / file, "pt") as opened:
        header = {**json.loads(opened.metadata()["paged_kv"]), **meta}
    tensors = {k: t for k, t in {**load_file(tmp_path / file), **changed}.items() if t is not None}
    save_file(tensors, tmp_path / file, {"paged_kv": json.dumps(header)})
    other, other_cache = pair()
    with pytest.raises(ValueError, match="the parts of this file do not fit together"):
        if file == "a":
            import_sequence(tmp_path / file, other, other_cache, "b")
        else:
            import_prefix_cache(tmp_path / file, other, other_cache)
    assert "b" not in other
    assert other.stats().num_free_blocks == 16
    other.check()


def test_a_sequence_travels_between_managers_with_and_without_a_prefix_cache(tmp_path):
    keys = [ContentKey("salt", "s"), ContentKey("media", "cat", 1, 3)]
    for there in (False, True):
        for here in (False, True):
            manager, cache = pair(prefix_cache=there)
            serve(manager, cache, "a", TOKENS, keys)
            export_sequence(tmp_path / "a", manager, cache, "a")
            other, other_cache = pair(prefix_cache=here)
            import_sequence(tmp_path / "a", other, other_cache, "b")
            assert torch.equal(content(other, other_cache, "b"), content(manager, cache, "a"))
            other.rollback(["b"], [0])
            other.append(["b"], [TOKENS])
            other.commit(["b"])
            for tried, found in ((keys, 12 * here), ((), 0)):
                assert other.admit("c", TOKENS, keys=tried).num_cached_tokens == found
                other.free("c")
            other.check()
