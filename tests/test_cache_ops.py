"""reshape_and_cache, reshape_and_cache_dynamic, gather_kv, copy_blocks, swap_blocks: the reference's bits.

Every tensor that an op may write is compared whole, from the first byte of its storage to the last: what lies
between strided rows, in other blocks and beside them must stay as it was. What may not be read is poison.
"""

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import ceil, inf, nan, prod

import pytest
import torch
from cases import FLOATS, LARGEST, QUANTISED, UNUSED_TABLE_IDS, cache_views, row_view
from compare import assert_same_bits
from torch import Tensor

import paged_kv
from paged_kv import reference

pytestmark = pytest.mark.usefixtures("one_thread")

LAYOUTS = ("nhd", "hnd", "interleaved", "head_major", "padded")
ROWS = ("packed", "fused", "head_first", "padded")
POISONS = ("nan", "inf", "1e4")
# Block size and head size.
SIZES = ((1, 1), (3, 7), (16, 64), (1024, 7), (16, 256), (3, 64), (1, 80), (16, 7), (3, 256), (16, 1))
NUM_BLOCKS = 6  # N; the tests leave at least one block untouched


@dataclass(frozen=True, repr=False)
class CacheCase:
    """A cache and the tokens for it. Its repr, the fields that are not default, is the test id."""

    stored_dtype: torch.dtype  # of the cache
    scales: str = "none"  # none, tensor, head, token; dynamic: per token, chosen by the op
    block_size: int = 16
    head_dim: int = 64
    cache_layout: str = "nhd"  # see cases.cache_views
    row_dtype: torch.dtype | None = None  # of new tokens; None: that of the cache
    row_layout: str = "packed"  # see cases.row_view
    heads: tuple[int, int] = (3, 3)
    poison: str = "nan"

    def __repr__(self) -> str:
        parts = [str(self.stored_dtype).removeprefix("torch.")]
        for f in fields(self)[1:]:
            value = getattr(self, f.name)
            if value != f.default:
                parts.append(f"{f.name}={str(value).removeprefix('torch.')}")
        return ",".join(parts)


def every_case() -> list[CacheCase]:
    """All dtypes x scales x layouts; sizes, the dtype and layout of the tokens, and the poison take turns."""
    sizes, row_dtypes, row_layouts, poisons = map(itertools.cycle, (SIZES, FLOATS, ROWS, POISONS))
    return [
        CacheCase(
            dtype,
            scales,
            *next(sizes),
            layout,
            next(row_dtypes) if dtype in QUANTISED else dtype,
            next(row_layouts),
            poison=next(poisons),
        )
        for dtype in (*FLOATS, *QUANTISED)
        for scales in (("none", "tensor", "head", "token", "dynamic") if dtype in QUANTISED else ("none",))
        for layout in LAYOUTS
        for _ in range(3)
    ]


def generator_for(case: CacheCase) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(repr(case).encode()))


def random_rows(case: CacheCase, num_tokens: int, device: str, generator: torch.Generator) -> Tensor:
    """New tokens [num_tokens, Hkv, D] over the whole range of the cache's dtype and beyond."""
    shape = (num_tokens, case.heads[1], case.head_dim)
    magnitude = 10.0 ** torch.randint(-4, 4, (num_tokens, 1, 1), generator=generator)
    specials = torch.tensor([inf, -inf, 0.0, -0.0, 1e-8, -1e-8, 60000.0, 0.5, 1.5, -2.5, 126.5, 127.5])
    special = specials[torch.randint(len(specials), shape, generator=generator)]
    values = torch.randn(shape, generator=generator) * magnitude
    values = torch.where(torch.rand(shape, generator=generator) < 0.1, special, values)
    return row_view(shape, case.row_dtype or case.stored_dtype, case.row_layout, nan, device).copy_(values)


def random_scale(case: CacheCase, used: Tensor, device: str, generator: torch.Generator) -> Tensor | None:
    """[1], [Hkv], or a strided [N, Hkv, B] that is NaN but for the `used` slots [N, B]."""
    match case.scales:
        case "none":
            return None
        case "tensor":
            return torch.rand(1, generator=generator).add(0.1).to(device)
        case "head":
            return torch.rand(case.heads[1], generator=generator).add(0.1).to(device)
    storage = torch.full((NUM_BLOCKS, case.block_size, case.heads[1] + 1), nan, device=device)
    scale = storage[..., 1:].transpose(1, 2)
    if case.scales == "token":
        scale.copy_(torch.where(used[:, None], torch.rand(scale.shape, generator=generator) + 0.1, nan))
    return scale


def random_slots(case: CacheCase, num_tokens: int, generator: torch.Generator) -> Tensor:
    """Slots beyond the first block: the last, a run over a block's end, neighbours swapped, skipped ones."""
    num_slots = (NUM_BLOCKS - 1) * case.block_size
    start = case.block_size - 2
    wanted = [num_slots - 1, *range(start, start + 5), start + 6, start + 5, -1, 0]
    wanted += torch.randperm(num_slots, generator=generator).tolist()
    slots = list(dict.fromkeys(slot for slot in wanted if -1 <= slot < num_slots))[:num_tokens]
    slots = torch.tensor(slots + [-7] * (num_tokens - len(slots)))
    return torch.where(slots >= 0, slots + case.block_size, slots)


def fill_with_random_bits(tensor: Tensor, generator: torch.Generator) -> None:
    """Every kind of bits, NaN with payloads among them."""
    shape = (*tensor.shape[:-1], tensor.shape[-1] * tensor.itemsize)
    tensor.copy_(torch.randint(256, shape, generator=generator).to(torch.uint8).view(tensor.dtype))


def twins(tensors: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """The same views of copies of the same storages."""
    storages: dict[int, torch.UntypedStorage] = {}
    result = {}
    for name, tensor in tensors.items():
        if tensor is None:
            result[name] = None
            continue
        storage = tensor.untyped_storage()
        copy = storages.setdefault(storage.data_ptr(), storage.clone())
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        result[name] = empty.set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())
    return result


def whole(tensor: Tensor) -> Tensor:
    """All elements of a tensor's storage, those that the tensor does not show too."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


def assert_same_storages(actual: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    for name, tensor in actual.items():
        if tensor is not None:
            assert_same_bits(whole(tensor), whole(expected[name]), str(name))


# ------------------------------------------------------------------------------------------------------------
# Tokens in and out


@pytest.mark.parametrize("case", every_case(), ids=repr)
def test_reshape_and_cache(backend, case):
    generator = generator_for(case)
    slots = random_slots(case, 24, generator)
    key, value = (random_rows(case, len(slots) + 2, backend.device, generator) for _ in "kv")
    for rows in key, value:  # a skipped token, and those beyond slot_mapping
        rows[: len(slots)][slots.to(backend.device) < 0] = nan
        rows[len(slots) :] = nan
    key_cache, value_cache = cache_views(case, NUM_BLOCKS, backend.device, case.poison)
    used = torch.zeros(NUM_BLOCKS, case.block_size, dtype=torch.bool)
    used.view(-1)[slots[slots >= 0]] = True
    args = {
        "key": key,
        "value": value,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "slot_mapping": slots.to(backend.device),
        "k_scale": random_scale(case, used, backend.device, generator),
        "v_scale": random_scale(case, used, backend.device, generator),
    }
    expected = twins(args)
    op = "reshape_and_cache_dynamic" if case.scales == "dynamic" else "reshape_and_cache"
    getattr(reference, op)(**expected)
    getattr(backend.ops, op)(**args)
    assert_same_storages(args, expected)


@pytest.mark.parametrize("case", [case for case in every_case() if case.scales != "dynamic"], ids=repr)
def test_gather_kv(backend, case):
    generator = generator_for(case)
    b = case.block_size
    lens = torch.tensor([b + 1, 0, b, 2 * b - 1, 0], dtype=torch.int32)
    tables = torch.tensor(UNUSED_TABLE_IDS, dtype=torch.int32).repeat(len(lens), 2)[:, :5]
    key_cache, value_cache = cache_views(case, NUM_BLOCKS, backend.device, case.poison)
    used = torch.zeros(NUM_BLOCKS, b, dtype=torch.bool)
    free = iter(torch.randperm(NUM_BLOCKS, generator=generator).tolist())
    for seq, length in enumerate(lens.tolist()):
        for entry in range(ceil(length / b)):
            block, count = next(free), min(b, length - entry * b)
            tables[seq, entry] = block
            used[block, :count] = True
            for cache in key_cache, value_cache:
                fill_with_random_bits(cache[block, :, :count], generator)
    scales = {name: random_scale(case, used, backend.device, generator) for name in ("k_scale", "v_scale")}
    args = [key_cache, value_cache, tables.to(backend.device), lens.to(backend.device)]
    expected = reference.gather_kv(*args, **scales)
    results = backend.ops.gather_kv(*args, **scales)
    given = {
        name: row_view(t.shape, t.dtype, case.row_layout, 0.0, backend.device)
        for name, t in zip(("key", "value"), expected, strict=True)
    }
    given_expected = twins(given)
    backend.ops.gather_kv(*args, **scales, **given)
    for name, exact, result in zip(("key", "value"), expected, results, strict=True):
        assert result.is_contiguous()
        if case.scales == "none":
            assert_same_bits(result, exact, name)
        else:  # a NaN's bits are its own
            assert torch.equal(result.isnan(), exact.isnan())
            assert_same_bits(result.nan_to_num(nan=0.0), exact.nan_to_num(nan=0.0), name)
        given_expected[name].copy_(result)
    assert_same_storages(given, given_expected)


# ------------------------------------------------------------------------------------------------------------
# Quantisation


def quantise(backend, x: Tensor, dtype: torch.dtype, scale: float | None = None) -> Tensor:
    """x, a multiple of 64 numbers, through a cache."""
    rows = x.reshape(-1, 1, 64)
    caches = [torch.zeros(len(rows), 1, 1, 64, device=backend.device).to(dtype) for _ in "kv"]
    given = None if scale is None else torch.tensor([scale], device=backend.device)
    slots = torch.arange(len(rows), device=backend.device)
    backend.ops.reshape_and_cache(rows, rows, *caches, slots, k_scale=given, v_scale=given)
    assert_same_bits(caches[1], caches[0], "value_cache")
    return caches[0].reshape(x.shape)


def assert_quantised(actual: Tensor, quotient: Tensor, dtype: torch.dtype) -> None:
    """`actual` is `quotient`, float32, as PyTorch's own casts round it once it is clamped."""
    quotient = quotient.clamp(-LARGEST[dtype], LARGEST[dtype])
    if dtype == torch.int8:
        assert_same_bits(actual, quotient.round().nan_to_num(nan=0.0).to(dtype), "int8")
    else:
        isnan = quotient.isnan()
        assert torch.equal(actual.float().isnan(), isnan)
        assert_same_bits(actual.float()[~isnan], quotient[~isnan].to(dtype).float(), str(dtype))


@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
@pytest.mark.parametrize("row_dtype", (torch.float16, torch.bfloat16), ids=str)
def test_every_16_bit_float_is_quantised_as_pytorch_casts_it(backend, row_dtype, dtype):
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(row_dtype).to(backend.device)
    assert_quantised(quantise(backend, x, dtype), x.float(), dtype)
    for scale in (1.0, 0.037, 3.0, 2.0**-9, 1e-30, 1e30):
        assert_quantised(quantise(backend, x, dtype, scale), x.float() / scale, dtype)


@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
def test_ties_and_their_neighbours_in_float32(backend, dtype):
    codes = torch.arange(-128, 128).to(torch.int8).view(dtype).float()
    codes = codes[codes.isfinite()].sort().values
    ties = (codes[1:] + codes[:-1]) / 2
    around = [torch.nextafter(ties, torch.full_like(ties, toward)) for toward in (-inf, inf)]
    x = torch.cat([codes, ties, *around, torch.tensor([inf, -inf, nan, 1e38, -1e38, 1e-45, -1e-45])])
    x = torch.cat([x, x[: -len(x) % 64]]).to(backend.device)
    assert_quantised(quantise(backend, x, dtype), x, dtype)


@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
def test_dynamic_scales_of_odd_vectors(backend, dtype):
    largest, float32 = LARGEST[dtype], torch.finfo(torch.float32)
    vectors = torch.zeros(7, 1, 67)
    vectors[1, 0, 66] = -3.0  # the largest magnitude last, and negative
    vectors[2] = torch.tensor([inf, -inf, nan, 2.0] + [0.5] * 63)  # the largest finite one counts
    vectors[3] = inf  # there is none
    vectors[4, 0, :2] = torch.tensor([1e-44, -1e-43])  # below float32's normal range
    vectors[5] = float32.max
    vectors[6] = nan
    vectors = vectors.to(backend.device)
    caches = [torch.zeros(7, 1, 1, 67, device=backend.device).to(dtype) for _ in "kv"]
    scales = [torch.full((7, 1, 1), nan, device=backend.device) for _ in "kv"]
    slots = torch.arange(7, device=backend.device)
    backend.ops.reshape_and_cache_dynamic(vectors, vectors, *caches, slots, *scales)
    expected = [1.0, 3.0 / largest, 2.0 / largest, 1.0, float32.tiny, float32.max / largest, 1.0]
    for scale, cache in zip(scales, caches, strict=True):
        assert_same_bits(scale.flatten(), torch.tensor(expected), "scale")
        stored = cache.flatten(1).float().cpu()
        assert stored[0].eq(0).all()
        assert stored[1, 66] == -largest
        assert stored[2, :2].tolist() == [largest, -largest]
        assert stored[2, 2].isnan() if dtype != torch.int8 else stored[2, 2] == 0
        assert stored[2, 3] == largest
        assert stored[3].eq(largest).all()
        assert_same_bits(cache[4, 0, 0], reference.quantise(vectors[4, 0], dtype, float32.tiny), "subnormals")
        assert stored[5].eq(largest).all()
        assert stored[6].isnan().all() if dtype != torch.int8 else stored[6].eq(0).all()


# ------------------------------------------------------------------------------------------------------------
# Blocks


def pairs(*rows: tuple[int, int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 2)


MAPPINGS = {
    "none": pairs(),
    "one": pairs((0, 4)),
    "run": pairs((0, 3), (1, 4), (2, 5)),
    "source of several": pairs((1, 5), (1, 0), (1, 2)),
    "backwards": pairs((2, 5), (1, 4), (0, 3)),
    "run and others": pairs((4, 0), (5, 1), (3, 2)),
}
every_mapping = pytest.mark.parametrize("mapping", MAPPINGS.values(), ids=MAPPINGS.keys())


@every_mapping
@pytest.mark.parametrize("dtype", (*FLOATS, *QUANTISED), ids=str)
def test_copy_blocks_of_layers_that_differ(backend, dtype, mapping):
    """Every layout and several sizes in one call, per-token scales and a number for each block among them."""
    generator = torch.Generator().manual_seed(len(mapping))
    keys, values = [], []
    for layout, (block_size, head_dim) in zip(LAYOUTS, SIZES[:5], strict=True):
        case = CacheCase(dtype, "token", block_size, head_dim, layout)
        used = torch.ones(NUM_BLOCKS, block_size, dtype=torch.bool)
        for tensors, cache in zip(
            (keys, values), cache_views(case, NUM_BLOCKS, backend.device, "nan"), strict=True
        ):
            fill_with_random_bits(cache, generator)
            tensors += [cache, random_scale(case, used, backend.device, generator)]
    values.append(torch.randn(NUM_BLOCKS, generator=generator).to(backend.device))
    args = dict(enumerate(keys + values))
    expected = twins(args)
    twin = list(expected.values())
    reference.copy_blocks(twin[: len(keys)], twin[len(keys) :], mapping)
    backend.ops.copy_blocks(keys, values, mapping.to(backend.device))
    assert_same_storages(args, expected)


def test_copy_blocks_without_layers(backend):
    backend.ops.copy_blocks([], [], pairs((0, 1)).to(backend.device))


@every_mapping
@pytest.mark.parametrize("src_layout", LAYOUTS)
@pytest.mark.parametrize("dst_layout", LAYOUTS)
def test_swap_blocks_between_layouts(backend, src_layout, dst_layout, mapping):
    """From the device to host memory and back."""
    generator = torch.Generator().manual_seed(len(mapping))
    for dtype, (block_size, head_dim), devices in (
        (torch.bfloat16, (16, 7), (backend.device, "cpu")),
        (torch.int8, (3, 64), ("cpu", backend.device)),
    ):
        src_case = CacheCase(dtype, "none", block_size, head_dim, src_layout)
        dst_case = CacheCase(dtype, "none", block_size, head_dim, dst_layout)
        src, _ = cache_views(src_case, NUM_BLOCKS, devices[0], "nan")
        dst, _ = cache_views(dst_case, NUM_BLOCKS + 1, devices[1], "inf")
        fill_with_random_bits(src, generator)
        args = {"src": src, "dst": dst}
        expected = twins(args)
        reference.swap_blocks(expected["src"], expected["dst"], mapping)
        backend.ops.swap_blocks(src, dst, mapping)
        assert_same_storages(args, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_swap_blocks_within_one_buffer(backend, layout):
    """Keys and values of an interleaved cache, or halves of another: they share a buffer and no element."""
    case = CacheCase(torch.float16, cache_layout=layout)
    src, dst = cache_views(case, 2 * NUM_BLOCKS, backend.device, "nan")
    fill_with_random_bits(src, torch.Generator().manual_seed(1))
    if layout != "interleaved":
        src, dst = src[:NUM_BLOCKS], src[NUM_BLOCKS:]
    args = {"src": src, "dst": dst}
    expected = twins(args)
    mapping = pairs((0, 0), (1, 1), (2, 2), (5, 4))
    reference.swap_blocks(expected["src"], expected["dst"], mapping)
    backend.ops.swap_blocks(src, dst, mapping)
    assert_same_storages(args, expected)


# ------------------------------------------------------------------------------------------------------------
# Nothing, much, and far


def test_no_tokens_and_no_sequences(backend):
    case = CacheCase(torch.float32)
    caches = cache_views(case, NUM_BLOCKS, backend.device, "nan")
    args = dict(enumerate(caches))
    expected = twins(args)
    rows = torch.full((4, case.heads[1], case.head_dim), inf, device=backend.device)
    no_slots = torch.empty(0, dtype=torch.int64, device=backend.device)
    backend.ops.reshape_and_cache(rows[:0], rows[:0], *caches, no_slots)
    backend.ops.reshape_and_cache(rows, rows, *caches, no_slots)
    backend.ops.reshape_and_cache(rows, rows, *caches, torch.full((4,), -1, device=backend.device))
    assert_same_storages(args, expected)
    for num_seqs, width in ((0, 0), (0, 3), (2, 0), (2, 3)):
        tables = torch.full((num_seqs, width), -1, dtype=torch.int32, device=backend.device)
        lens = torch.zeros(num_seqs, dtype=torch.int32, device=backend.device)
        for gathered in backend.ops.gather_kv(*caches, tables, lens):
            assert gathered.shape == (0, case.heads[1], case.head_dim)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float8_e4m3fn), ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_enough_work_for_many_threads(backend, layout, dtype):
    """Tokens in, blocks copied and swapped, tokens out: every thread's piece in its place."""
    torch.set_num_threads(4)
    generator = torch.Generator().manual_seed(7)
    case = CacheCase(dtype, "head", cache_layout=layout)
    num_blocks, lens = 130, torch.tensor([1500, 3, 0, 517], dtype=torch.int32)
    key_cache, value_cache = cache_views(case, 2 * num_blocks, backend.device, "nan")
    order = torch.randperm(num_blocks, generator=generator)
    order[10:70] = order[10:70].sort().values  # neighbours, in part
    tables = torch.full((len(lens), 100), -1, dtype=torch.int32)
    slots, first = [], 0
    for seq, length in enumerate(lens.tolist()):
        width = ceil(length / case.block_size)
        tables[seq, :width] = order[first : first + width]
        block_slots = order[first : first + width, None] * case.block_size + torch.arange(case.block_size)
        slots.append(block_slots.flatten()[:length])
        first += width
    shape = (2, int(lens.sum()), case.heads[1], case.head_dim)
    key, value = torch.randn(shape, generator=generator).to(torch.bfloat16).to(backend.device)
    scales = {}
    if dtype in QUANTISED:
        scales = {name: torch.rand(3, generator=generator).add(0.5).to(backend.device) for name in ("k", "v")}
        scales = {f"{name}_scale": scale for name, scale in scales.items()}
    tables, slots, lens = (t.to(backend.device) for t in (tables, torch.cat(slots), lens))

    backend.ops.reshape_and_cache(key, value, key_cache, value_cache, slots, **scales)
    away = torch.stack([order, order + num_blocks], dim=1)
    backend.ops.copy_blocks([key_cache], [], away.to(backend.device))
    same = torch.stack([order, order], dim=1)
    backend.ops.swap_blocks(value_cache[:num_blocks], value_cache[num_blocks:], same)
    for offset in (0, num_blocks):
        gathered = backend.ops.gather_kv(key_cache, value_cache, tables + offset, lens)
        for name, rows, result in zip("kv", (key, value), gathered, strict=True):
            if scales:
                rows = reference.quantise(rows, dtype, scales[f"{name}_scale"][:, None])
            assert_same_bits(result, rows, f"{name}, blocks from {offset}")


@pytest.fixture(params=paged_kv.build_info().isas_supported)
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each instruction set of the CPU's kernels in turn."""
    before = paged_kv.build_info().isa
    paged_kv.set_isa(request.param)
    yield
    paged_kv.set_isa(before)


@pytest.mark.parametrize("order", ("NHBD", "NBHD"))
@pytest.mark.parametrize("head_dim, offset", ((64, 0), (64, 4), (44, 0)))
def test_more_than_caches_hold(isa, order, head_dim, offset):
    """From 16 MiB on the CPU's kernels store past its caches, where rows and blocks are whole cache lines."""
    torch.set_num_threads(2)
    generator = torch.Generator().manual_seed(11)
    num_heads, block_size, num_blocks = 8, 16, 18_000 // head_dim
    num_tokens = num_blocks * block_size - 5
    assert 2 * num_tokens * num_heads * head_dim * 4 > 16 << 20
    sizes = {"N": 2 * num_blocks, "H": num_heads, "B": block_size, "D": head_dim}

    def cache() -> Tensor:  # [2 * num_blocks, num_heads, block_size, head_dim]
        flat = torch.full((prod(sizes.values()) + 64,), nan)
        first = -(flat.data_ptr() // 4) % 16 + offset  # `offset` elements into a cache line
        ordered = flat[first:][: prod(sizes.values())].view([sizes[name] for name in order])
        return ordered.permute([order.index(name) for name in "NHBD"])

    storages = {name: cache() for name in ("key", "value", "swapped")}
    expected = twins(storages)
    slots = torch.randperm(num_blocks, generator=generator)[:, None] * block_size + torch.arange(block_size)
    slots = slots.flatten()[:num_tokens]
    rows = torch.randn(2, num_tokens, num_heads, head_dim, generator=generator)

    paged_kv.ops.reshape_and_cache(*rows, storages["key"], storages["value"], slots)
    mapping = torch.stack([torch.arange(num_blocks), torch.randperm(num_blocks, generator=generator)], dim=1)
    away = mapping + torch.tensor([0, num_blocks])
    paged_kv.ops.copy_blocks([storages["key"]], [storages["value"]], away)
    paged_kv.ops.swap_blocks(storages["value"], storages["swapped"], away)
    for name, tensor in zip(("key", "value"), rows, strict=True):
        expected[name][slots // block_size, :, slots % block_size] = tensor
        expected[name][away[:, 1]] = expected[name][away[:, 0]]
    expected["swapped"][away[:, 1]] = expected["value"][away[:, 0]]
    assert_same_storages(storages, expected)

    tables = (slots[::block_size] // block_size).int()[None]
    lens = torch.tensor([num_tokens], dtype=torch.int32)
    gathered = paged_kv.ops.gather_kv(storages["key"], storages["value"], tables, lens)
    for result, tensor in zip(gathered, rows, strict=True):
        assert_same_bits(result, tensor, "gather_kv")


def far_apart(num_blocks: int, num_heads: int, num_slots: int, far: str, device: str) -> Tensor:
    """An int8 cache [N, Hkv, B, 8] whose steps along `far` are so long that the last lies at 2^32.

    In host memory next to nothing of it is ever backed by pages.
    """
    sizes = {"block": num_blocks, "head": num_heads, "slot": num_slots}
    strides, unit = {far: 2**32 // (sizes[far] - 1)}, 8
    for dim in sizes.keys() - {far}:
        strides[dim] = unit
        unit *= sizes[dim]
    flat = torch.empty(strides[far] * (sizes[far] - 1) + unit, dtype=torch.int8, device=device)
    return flat.as_strided((*sizes.values(), 8), (*(strides[dim] for dim in sizes), 1))


@pytest.mark.parametrize("far", ("block", "head", "slot"))
def test_offsets_beyond_32_bits(backend, far):
    key_cache, value_cache = (far_apart(7, 3, 5, far, backend.device) for _ in "kv")
    generator = torch.Generator().manual_seed(3)
    key, value = torch.randint(-100, 100, (2, 35, 3, 8), generator=generator).float().to(backend.device)
    slots = torch.randperm(35, generator=generator).to(backend.device)
    backend.ops.reshape_and_cache(key, value, key_cache, value_cache, slots)
    tables = torch.arange(7, dtype=torch.int32, device=backend.device)[None]
    lens = torch.tensor([35], dtype=torch.int32, device=backend.device)
    gathered = backend.ops.gather_kv(key_cache, value_cache, tables, lens)
    for rows, result in zip((key, value), gathered, strict=True):
        assert_same_bits(result[slots], rows.to(torch.int8), "gather_kv")
    for cache in key_cache, value_cache:
        before = cache.contiguous()
        backend.ops.copy_blocks([cache], [], pairs((6, 0), (1, 5)).to(backend.device))
        assert_same_bits(cache.contiguous(), before[[6, 1, 2, 3, 4, 1, 6]], "copy_blocks")
        host = torch.zeros(7, 3, 5, 8, dtype=torch.int8)
        backend.ops.swap_blocks(cache, host, pairs((6, 1), (5, 0)))
        backend.ops.swap_blocks(host, cache, pairs((1, 5), (0, 6)))
        assert_same_bits(cache.contiguous(), before[[6, 1, 2, 3, 4, 6, 1]], "swap_blocks")
