"""PagedKVCache: shapes, memory order, sizes by blocks and by bytes, scales, copies, swaps, errors."""

import copy
import gc
import io
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from compare import assert_same_bits
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from paged_kv import PagedKVCache, _memory, reference

DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
)
QUANTISED = DTYPES[3:]
LAYOUTS = ("HND", "NHD", "head_major")


def make(dtype=torch.float32, **kwargs):
    kwargs = {"num_blocks": 9, "block_size": 4} | kwargs
    if "memory" in kwargs:
        del kwargs["num_blocks"]
    return PagedKVCache(2, kwargs.pop("num_kv_heads", 3), kwargs.pop("head_dim", 8), dtype, **kwargs)


def tensors(cache):
    return [t for at in cache for t in (at.key, at.value, at.k_scale, at.v_scale) if t is not None]


def fill(cache, seed=0):
    """Random numbers in every slot of every layer."""
    torch.manual_seed(seed)
    slots = torch.arange(cache.num_blocks * cache.block_size)
    for layer in range(cache.num_layers):
        shape = (2, len(slots), cache.num_kv_heads[layer], cache.head_dim[layer])
        rows = torch.randn(shape).to(torch.float32 if cache.dtype in QUANTISED else cache.dtype)
        cache.write(layer, *rows, slots)
    return cache


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_lie_in_the_order_asked_for(layout, interleaved, dtype):
    cache = make(dtype, layout=layout, interleaved=interleaved)
    n, h, b, d = 9, 3, 4, 8
    kv = 2 if interleaved else 1
    strides = {
        "HND": (kv * h * b * d, b * d, d, 1),
        "NHD": (kv * b * h * d, d, h * d, 1),
        "head_major": (kv * b * d, kv * n * b * d, d, 1),
    }[layout]
    for at in cache:
        for view in at.key, at.value:
            assert view.shape == (n, h, b, d)
            assert view.dtype == dtype
            assert view.stride() == strides
            assert view.storage_offset() == 0  # inductor is wrong about others, see _memory.apart
        apart = (at.value.data_ptr() - at.key.data_ptr()) // dtype.itemsize
        if not interleaved:
            assert apart == n * h * b * d
        else:
            assert apart == (b * d if layout == "head_major" else h * b * d)
        assert at.key.data_ptr() % 64 == 0
    starts = [at.key.data_ptr() for at in cache]
    memory = cache._memory
    assert all(memory.data_ptr() <= start < memory.data_ptr() + memory.nbytes for start in starts)
    assert starts[1] - starts[0] >= 2 * n * h * b * d * dtype.itemsize


@pytest.mark.parametrize("scales", ("token", "head", "tensor", "none", None))
@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
def test_scales_of_a_quantised_cache(dtype, scales):
    cache = make(dtype, scales=scales)
    expected = {"token": (9, 3, 4), "head": (3,), "tensor": (1,), "none": None}[scales or "token"]
    for at in cache:
        for scale in at.k_scale, at.v_scale:
            if expected is None:
                assert scale is None
                continue
            assert scale.shape == expected
            assert scale.dtype == torch.float32
            if scale.dim() == 1:
                assert scale.eq(1).all()
    assert cache.scales == (scales or "token")


def test_layers_that_differ():
    cache = make(torch.float16, num_kv_heads=[1, 5], head_dim=(256, 7))
    assert [at.key.shape for at in cache] == [(9, 1, 4, 256), (9, 5, 4, 7)]
    assert cache.bytes_per_block == 2 * 4 * 2 * (256 + 5 * 7)
    assert cache.num_kv_heads == (1, 5)
    assert cache.head_dim == (256, 7)


@pytest.mark.parametrize("num_blocks", [3, 10_000], ids=["small", "beyond_a_huge_page"])
def test_a_cache_can_be_pretended(num_blocks):
    with FakeTensorMode():
        cache = PagedKVCache(2, 2, 16, torch.float8_e4m3fn, num_blocks=num_blocks)
    for layer in cache:
        assert isinstance(layer.key, FakeTensor)
        assert layer.value.shape == (num_blocks, 2, 16, 16)
        assert layer.v_scale.shape == (num_blocks, 2, 16)
    assert not cache.huge_pages


def test_no_two_tensors_share_memory():
    cache = make(torch.int8, head_dim=[7, 5], interleaved=True)
    seen = torch.zeros(cache._memory.numel(), dtype=torch.int32)
    for view in tensors(cache):
        size = view.element_size()
        begin = view.data_ptr() - cache._memory.data_ptr()
        at = begin + size * sum(
            torch.arange(n).reshape([-1 if i == j else 1 for j in range(view.dim())]) * s
            for i, (n, s) in enumerate(zip(view.shape, view.stride(), strict=True))
        )
        for byte in range(size):
            seen[at.flatten() + byte] += 1
    assert seen.max() == 1
    assert seen.sum() == cache.nbytes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sized_by_bytes(dtype):
    per_block = make(dtype).bytes_per_block
    scale_bytes = 4 if dtype in QUANTISED else 0
    assert per_block == 2 * 2 * 3 * 4 * (8 * dtype.itemsize + scale_bytes)
    for memory, num_blocks in (
        (per_block, 1),
        (2 * per_block - 1, 1),
        (2 * per_block, 2),
        (10**5, 10**5 // per_block),
    ):
        cache = make(dtype, memory=memory)
        assert cache.num_blocks == num_blocks
        assert cache.nbytes == num_blocks * per_block <= memory
    with pytest.raises(ValueError, match=rf"memory: expected at least .* {per_block}, got {per_block - 1}"):
        make(dtype, memory=per_block - 1)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_blocks": None}, "num_blocks, memory: expected one of them, got none"),
        ({"num_blocks": 0}, "num_blocks: expected an integer of at least 1, got 0"),
        ({"block_size": 0}, "block_size: expected an integer from 1 to 1024, got 0"),
        ({"block_size": 1025}, "block_size: expected an integer from 1 to 1024, got 1025"),
        ({"head_dim": 257}, "head_dim: expected an integer from 1 to 256, got 257"),
        ({"head_dim": [8, 0]}, "head_dim: expected an integer from 1 to 256, got 0"),
        ({"num_kv_heads": 0}, "num_kv_heads: expected an integer of at least 1, got 0"),
        ({"num_kv_heads": [3]}, "num_kv_heads: expected one number, or one for each of 2 layers, got 1"),
        (
            {"dtype": torch.float64},
            r"dtype: expected torch\.float32 or torch\.float16 or .*, got torch\.float64",
        ),
        ({"device": "gpu"}, "device: expected a device that torch has, got 'gpu'"),
        ({"device": "cuda:99"}, "device: expected a device that torch has, got 'cuda:99'"),
        ({"layout": "DHN"}, "layout: expected 'HND' or 'NHD' or 'head_major', got 'DHN'"),
        ({"scales": "token"}, "scales: expected 'none', got 'token'"),
        ({"scales": "row", "dtype": torch.int8}, r"scales: expected 'token' or .* or 'none', got 'row'"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(kwargs, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        make(**kwargs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_blocks": 2.0}, "num_blocks: expected an integer of at least 1, got 2.0"),
        ({"num_blocks": True}, "num_blocks: expected an integer of at least 1, got True"),
        ({"memory": 1e9}, "memory: expected an integer of at least 1, got 1000000000.0"),
        ({"num_kv_heads": 2.0}, r"num_kv_heads: expected an integer of at least 1, got 2\.0"),
        ({"num_kv_heads": "33"}, "num_kv_heads: expected an integer of at least 1, got '33'"),
        ({"num_kv_heads": [3, 3.0]}, r"num_kv_heads: expected an integer of at least 1, got 3\.0"),
        ({"num_kv_heads": b"33"}, "num_kv_heads: expected an integer of at least 1, got b'33'"),
        (
            {"num_kv_heads": torch.tensor(3)},
            r"num_kv_heads: expected an integer of at least 1, got tensor\(3\)",
        ),
        ({"block_size": None}, "block_size: expected an integer from 1 to 1024, got None"),
        ({"interleaved": "no"}, "interleaved: expected True or False, got 'no'"),
        ({"dtype": "float32"}, r"dtype: expected torch\.float32 or .* or torch\.int8, got 'float32'"),
        ({"dtype": np.zeros(2)}, r"dtype: expected torch\.float32 or .*, got array\(\[0\., 0\.\]\)"),
        ({"layout": 1}, "layout: expected 'HND' or 'NHD' or 'head_major', got 1"),
        ({"scales": 5}, "scales: expected 'none', got 5"),
        ({"scales": ["token"], "dtype": torch.int8}, r"scales: expected 'token' or .*, got \['token'\]"),
        ({"device": None}, "device: expected a device that torch has, got None"),
        ({"device": 5}, "device: expected a device that torch has, got 5"),
    ],
    ids=str,
)
def test_arguments_of_another_type_are_named(kwargs, message):
    with pytest.raises(TypeError, match=f"^{message}$"):
        make(**kwargs)


@pytest.mark.parametrize("layer", [2, -3])
def test_a_layer_that_is_not_there(layer):
    cache = PagedKVCache(2, 1, 8, torch.float32, 4, num_blocks=2)
    with pytest.raises(IndexError, match=f"layer: expected 0 to 1, got {layer}"):
        cache[layer]


@pytest.mark.parametrize("layer", [None, "0", 0.0, slice(2), np.zeros(2)])
def test_a_layer_is_an_integer(layer):
    cache = PagedKVCache(2, 1, 8, torch.float32, 4, num_blocks=2)
    with pytest.raises(TypeError, match=f"^layer: expected 0 to 1, got {re.escape(repr(layer))}$"):
        cache[layer]


def test_what_is_written_is_a_tensor():
    cache = make()
    with pytest.raises(
        TypeError, match=r"^paged_kv::reshape_and_cache: value: expected a tensor, got ndarray$"
    ):
        cache.write(0, torch.zeros(2, 3, 8), np.zeros((2, 3, 8)), torch.tensor([0, 1]))


def test_integers_of_numpy_do_as_well():
    i = np.int32
    cache = PagedKVCache(i(2), [i(1), 2], np.uint8(8), torch.float32, i(4), num_blocks=np.int64(3))
    assert cache[1].key.shape == (3, 2, 4, 8)
    sizes = (cache.num_layers, cache.block_size, cache.num_blocks, *cache.num_kv_heads, *cache.head_dim)
    assert {type(size) for size in sizes} == {int}
    assert PagedKVCache(1, 1, 8, torch.float32, memory=np.int64(1 << 20)).num_blocks == 1024


def test_blocks_and_bytes_together_are_refused():
    with pytest.raises(ValueError, match=r"^num_blocks, memory: expected one of them, got both$"):
        PagedKVCache(1, 1, 8, torch.float32, num_blocks=1, memory=1 << 20)
    with pytest.raises(ValueError, match=r"^num_layers: expected an integer of at least 1, got 0$"):
        PagedKVCache(0, 1, 8, torch.float32, num_blocks=1)


@pytest.mark.parametrize("scales", ("token", "head", "none"))
def test_write_quantises_with_the_cache_s_scales(scales):
    cache = make(torch.int8, scales=scales)
    if scales == "head":
        cache[1].k_scale.copy_(torch.tensor([0.1, 0.2, 0.3]))
        cache[1].v_scale.fill_(0.5)
    torch.manual_seed(0)
    key, value = torch.randn(2, 5, 3, 8) * 3
    slots = torch.tensor([3, 4, -1, 35, 0])
    expected = [torch.zeros(9, 3, 4, 8, dtype=torch.int8) for _ in "kv"]
    given = [cache[1].k_scale, cache[1].v_scale]
    if scales == "token":
        given = [torch.zeros(9, 3, 4) for _ in "kv"]
        reference.reshape_and_cache_dynamic(key, value, *expected, slots, *given)
    else:
        reference.reshape_and_cache(key, value, *expected, slots, *given)
    cache.write(1, key, value, slots)
    written = slots[slots >= 0]
    blocks, offsets = written // 4, written % 4
    for actual, exact in zip((cache[1].key, cache[1].value), expected, strict=True):
        assert_same_bits(actual[blocks, :, offsets], exact[blocks, :, offsets], "written slots")
    if scales == "token":
        for actual, exact in zip((cache[1].k_scale, cache[1].v_scale), given, strict=True):
            assert_same_bits(actual[blocks, :, offsets], exact[blocks, :, offsets], "their scales")


@pytest.mark.parametrize("as_tensor", (False, True))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float8_e4m3fn), ids=str)
def test_copy_blocks_takes_scales_along(dtype, layout, as_tensor):
    cache = fill(make(dtype, layout=layout, num_kv_heads=[1, 3]))
    before = [t.clone() for t in tensors(cache)]
    pairs = [(0, 5), (0, 6), (8, 7)]
    cache.copy_blocks(torch.tensor(pairs) if as_tensor else pairs)
    for now, then in zip(tensors(cache), before, strict=True):
        for source, destination in pairs:
            then[destination] = then[source].clone()
        assert_same_bits(now, then, "copied")
    cache.copy_blocks([])


@pytest.mark.parametrize("dtype", (torch.float16, torch.int8), ids=str)
def test_swap_out_and_in_through_another_layout(dtype):
    cache = fill(make(dtype, layout="NHD", interleaved=True))
    host = make(dtype, num_blocks=4)
    before = [t.clone() for t in tensors(cache)]
    cache.swap_blocks(host, [(2, 0), (3, 1), (8, 3)])
    for here, there in zip(before, tensors(host), strict=True):
        assert_same_bits(there[[0, 1, 3]], here[[2, 3, 8]], "swapped out")
    fill(cache, seed=1)
    host.swap_blocks(cache, [(0, 6), (1, 7), (3, 0)])
    for then, now in zip(before, tensors(cache), strict=True):
        assert_same_bits(now[[6, 7, 0]], then[[2, 3, 8]], "swapped in")


@pytest.mark.parametrize("scales", ("head", "tensor"))
def test_scales_of_no_token_stay_where_they_are(scales):
    cache, host = (make(torch.int8, scales=scales) for _ in range(2))
    cache[0].k_scale.fill_(0.5)
    cache.copy_blocks([(0, 1)])
    cache.swap_blocks(host, [(0, 1)])
    assert cache[0].k_scale.eq(0.5).all()
    assert host[0].k_scale.eq(1).all()


def test_swap_refuses_a_cache_of_another_model():
    for other in make(torch.float32, head_dim=16), make(torch.float16), make(block_size=8):
        with pytest.raises(ValueError, match=r"^destination: expected a cache of \{.*\}, got one of \{.*\}$"):
            make().swap_blocks(other, [(0, 0)])


def test_swap_refuses_what_is_no_cache():
    cache = make()
    with pytest.raises(TypeError, match=r"^destination: expected a PagedKVCache, got LayerCache$"):
        cache.swap_blocks(cache[0], [(0, 0)])


@pytest.mark.parametrize("mapping", ([(0, 9)], [(9, 0)], [(-1, 0)], [(0, 1), (2, 1)], [(0, 1), (1, 2)]))
def test_wrong_copies_raise_and_copy_nothing(mapping):
    cache = fill(make())
    before = [t.clone() for t in tensors(cache)]
    with pytest.raises(ValueError, match="block_mapping: expected"):
        cache.copy_blocks(mapping)
    for now, then in zip(tensors(cache), before, strict=True):
        assert_same_bits(now, then, "untouched")


@pytest.mark.parametrize(
    ("error", "mappings"),
    [
        (ValueError, ([0, 1], [(0, 1, 2)], [(0, 1), (2,)], [(2**70, 1)], [(0, 2**63)], np.array([0, 1]))),
        (TypeError, (None, 3, "01", {0: 1}, {(0, 1)}, iter([(0, 1)]), np.int64(1), b"01")),
        (TypeError, ([(0.5, 1)], [(True, False)], [(0, 1), (True, 2)], [(0, None)], ["01"], [None])),
        (TypeError, (np.ones((1, 2)), np.ones((1, 2), bool), np.array([(0, None)]))),
    ],
)
def test_what_are_no_pairs_is_not_taken_for_some(error, mappings):
    cache = fill(make())
    before = [t.clone() for t in tensors(cache)]
    for mapping in mappings:
        message = f"^block_mapping: expected pairs of block ids, got {re.escape(repr(mapping))}$"
        for call in (cache.copy_blocks, lambda pairs: cache.swap_blocks(make(), pairs)):
            with pytest.raises(error, match=message):
                call(mapping)
    for now, then in zip(tensors(cache), before, strict=True):
        assert_same_bits(now, then, "untouched")


def test_pairs_may_be_an_array():
    cache = fill(make())
    cache.copy_blocks(np.array([(0, 1)], np.int32))
    assert_same_bits(cache[1].key[1], cache[1].key[0], "copied")
    cache.copy_blocks(np.zeros((0, 2)))


def test_like_has_the_same_geometry():
    cache = make(
        torch.float8_e5m2, num_kv_heads=[1, 2], head_dim=[5, 6], layout="NHD", interleaved=True, scales="head"
    )
    twin = cache.like(3)
    assert twin.num_blocks == 3
    for name in (
        "num_kv_heads",
        "head_dim",
        "dtype",
        "block_size",
        "layout",
        "interleaved",
        "scales",
        "num_layers",
    ):
        assert getattr(twin, name) == getattr(cache, name)
    assert twin.bytes_per_block == cache.bytes_per_block


def test_sequence_protocol_and_repr():
    cache = make(torch.bfloat16)
    assert len(cache) == cache.num_layers == 2
    assert list(cache) == [cache[0], cache[1]]
    assert cache[-1] is cache[1]
    with pytest.raises(IndexError):
        cache[2]
    assert repr(cache) == (
        "PagedKVCache(2 layers, 9 blocks of 4 slots, Hkv 3, D 8, torch.bfloat16, HND, cpu, 0.0 MiB)"
    )


def flags_of_mapping(address):
    """What the kernel notes about the mapping around an address (proc(5), VmFlags)."""
    for text in re.split(r"\n(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text()):
        first, last = (int(x, 16) for x in text.split(maxsplit=1)[0].split("-"))
        if first <= address < last:
            return re.search("VmFlags:(.*)", text).group(1).split()
    raise AssertionError(f"no mapping around {address:x}")


def test_huge_pages_where_the_system_has_them():
    cache = PagedKVCache(2, 8, 64, torch.bfloat16, memory=64 << 20)
    assert cache.huge_pages == _memory.huge_pages_on_request()
    if cache.huge_pages:
        assert cache._memory.data_ptr() % _memory.HUGE_PAGE == 0
        assert "hg" in flags_of_mapping(cache._memory.data_ptr())
    for view in tensors(cache):
        view.fill_(1)
    assert 0 <= cache.huge_page_bytes <= cache.nbytes
    assert sum(int(view.sum()) for view in tensors(cache)) == cache.nbytes // 2


def test_a_small_cache_asks_for_no_huge_pages():
    cache = make()
    assert not cache.huge_pages
    assert cache.huge_page_bytes == 0


def test_memory_is_committed_when_written_and_given_back():
    def resident():
        return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text()).group(1)) << 10

    before = resident()
    cache = PagedKVCache(4, 8, 64, torch.bfloat16, memory=256 << 20)
    assert resident() - before < 64 << 20
    view = cache[0].key
    del cache
    view.fill_(0)  # a view keeps the memory alive
    assert resident() - before > 16 << 20
    del view
    gc.collect()
    assert resident() - before < 16 << 20


def test_refused_memory_is_a_memory_error():
    with pytest.raises((MemoryError, RuntimeError), match="memory"):
        PagedKVCache(1, 1, 256, torch.float32, memory=1 << 60)


def through_pickle(cache):
    return pickle.loads(pickle.dumps(cache))


def through_a_file(cache):
    file = io.BytesIO()
    torch.save(cache, file)
    assert file.tell() < cache.nbytes + 8192, "the memory is in it more than once"
    file.seek(0)
    with torch.serialization.safe_globals([PagedKVCache]):
        return torch.load(file)


@pytest.mark.parametrize("copy_of", [copy.deepcopy, through_pickle, through_a_file])
@pytest.mark.parametrize(
    ("dtype", "scales"),
    [(dtype, None) for dtype in DTYPES]
    + [(dtype, kind) for dtype in QUANTISED for kind in ("head", "tensor")],
    ids=str,
)
def test_a_copy_has_the_same_bits_in_a_memory_of_its_own(dtype, scales, copy_of):
    cache = make(dtype, scales=scales, layout="NHD", interleaved=True, num_blocks=200)
    if scales is not None:
        for number, at in enumerate(cache, 1):
            at.k_scale.fill_(number)
            at.v_scale.fill_(number / 4)
    fill(cache)
    twin = copy_of(cache)
    assert repr(twin) == repr(cache)
    assert (twin.scales, twin.huge_pages) == (cache.scales, cache.huge_pages)
    before = [tensor.clone() for tensor in tensors(cache)]
    for mine, theirs in zip(before, tensors(twin), strict=True):
        assert_same_bits(theirs, mine, "the copy")
    assert [t.stride() for t in tensors(twin)] == [t.stride() for t in tensors(cache)]
    fill(twin, seed=1)
    for mine, now in zip(before, tensors(cache), strict=True):
        assert_same_bits(now, mine, "the original, after a write to the copy")


@pytest.mark.parametrize("copy_of", [copy.deepcopy, through_pickle, through_a_file])
def test_a_copy_of_a_large_cache_lies_on_huge_pages_too(copy_of):
    cache = fill(make(num_blocks=20_000))
    twin = copy_of(cache)
    assert twin.huge_pages == cache.huge_pages
    assert torch.equal(twin[1].value, cache[1].value)
    assert len({t.untyped_storage().data_ptr() for t in tensors(twin)}) == len(tensors(twin))


def test_a_shallow_copy_shares_the_memory():
    cache = make()
    assert [t.data_ptr() for t in tensors(copy.copy(cache))] == [t.data_ptr() for t in tensors(cache)]
