"""Valid calls of every op, and every way to get one argument wrong, with the error that it must raise.

One row per error message and argument that can raise it, by the stages in which ops check them:
dtype, layout, shape, range. (Devices have a test of their own.)
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

# Sizes of the valid calls, in the words of paged_kv.ops.
T, HQ, HKV, D, N, B = 5, 4, 2, 8, 6, 4
FLOATS = "float32, float16 or bfloat16"
ALL = "float32, float16, bfloat16, float8_e4m3fn, float8_e5m2 or int8"
QUANTISED = "float8_e4m3fn, float8_e5m2 or int8"

Arguments = dict[str, object]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def caches(dtype: torch.dtype = torch.float32) -> Arguments:
    """Views of one buffer: the layout in which a false alarm about overlap is likely."""
    both = torch.randn(N, 2, HKV, B, D).to(dtype)
    return {"key_cache": both[:, 0], "value_cache": both[:, 1]}


def rows() -> Arguments:
    return {"key": torch.randn(T, HKV, D), "value": torch.randn(T, HKV, D)}


def slots() -> Arguments:
    return {"slot_mapping": torch.tensor([0, 23, -1, 9, 8])}


def scales(*shape: int) -> Arguments:
    return {name: torch.rand(shape) + 0.5 for name in ("k_scale", "v_scale")}


def sequences() -> Arguments:
    """Lengths 10 and 5 over tables whose unused entry is no block's id."""
    return {"block_tables": torch.tensor([[5, 0, 2], [1, 4, 99]], dtype=torch.int32), "seq_lens": ints(10, 5)}


def attention(dtype: torch.dtype = torch.float32) -> Arguments:
    return {
        "query": torch.randn(T, HQ, D),
        **caches(dtype),
        **sequences(),
        "query_start_loc": ints(0, 4, 5),
        "max_query_len": 4,
        "max_seq_len": 10,
        "scale": 0.3,
    }


def states() -> Arguments:
    return {
        "out_a": torch.randn(T, HQ, D),
        "lse_a": torch.randn(T, HQ),
        "out_b": torch.randn(T, HQ, D),
        "lse_b": torch.randn(T, HQ),
    }


def results() -> Arguments:
    return {"out": torch.zeros(T, HQ, D), "lse": torch.zeros(T, HQ)}


def pairs(*values: tuple[int, int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).reshape(-1, 2)


# Valid calls by name. What follows a blank names a variant of the op.
VALID: dict[str, Callable[[], Arguments]] = {
    "reshape_and_cache": lambda: {**rows(), **caches(), **slots()},
    "reshape_and_cache quantised": lambda: {**rows(), **caches(torch.int8), **slots(), **scales(N, HKV, B)},
    "reshape_and_cache_dynamic": lambda: {**rows(), **caches(torch.int8), **slots(), **scales(N, HKV, B)},
    "paged_attention": attention,
    "paged_attention quantised": lambda: {**attention(torch.float8_e4m3fn), **scales(HKV)},
    "paged_attention heads": lambda: {
        **attention(),
        "alibi_slopes": torch.rand(HQ),
        "sinks": torch.rand(HQ),
    },
    "paged_attention window": lambda: {**attention(), "window": 2},
    "paged_attention out": lambda: {**attention(), **results()},
    "copy_blocks": lambda: {
        "key_caches": [torch.randn(N, HKV, B, D), torch.randn(N, B, HKV, D)],
        "value_caches": [torch.randn(N, 7)],
        "block_mapping": pairs((0, 1), (0, 2), (3, 5)),
    },
    "swap_blocks": lambda: {
        "src": torch.randn(N, HKV, B, D),
        "dst": torch.randn(3, HKV, B, D),
        "block_mapping": pairs((0, 2), (0, 1), (5, 0)),
    },
    "swap_blocks ragged": lambda: {
        "src": torch.randn(N, 2, 2, 2, 2, 2),
        "dst": torch.randn(N, 2, 2, 2, 2, 2),
        "block_mapping": pairs((0, 2)),
    },
    "gather_kv": lambda: {**caches(torch.int8), **sequences()},
    "gather_kv scaled": lambda: {**caches(torch.int8), **sequences(), **scales(1)},
    "gather_kv out": lambda: {
        **caches(),
        **sequences(),
        "key": torch.zeros(15, HKV, D),
        "value": torch.zeros(15, HKV, D),
    },
    "merge_attention_states": states,
    "merge_attention_states out": lambda: {**states(), **results()},
}


@dataclass(frozen=True)
class Mistake:
    """One wrong argument of a valid call, and the error it raises."""

    stage: str  # of the checks: dtype, layout, shape or range
    call: str  # a key of VALID
    argument: str
    change: Callable[[Arguments], object]  # gives the wrong argument
    message: str

    def __str__(self) -> str:
        return f"{self.call}-{self.message}".replace(" ", "_")

    @property
    def op(self) -> str:
        return self.call.split()[0]

    def arguments(self) -> Arguments:
        arguments = VALID[self.call]()
        return {**arguments, self.argument: self.change(arguments)}


MISTAKES: list[Mistake] = []


def wrong(
    stage: str,
    call: str,
    argument: str,
    change: torch.dtype | Callable[[Arguments], object],
    words: str,
    named: str | None = None,
) -> None:
    """Adds a row; `words` follow "expected"; `named`: the argument in the error, if not `argument`."""
    if isinstance(change, torch.dtype):
        dtype = change
        change = lambda a: a[argument].to(dtype)  # noqa: E731
    message = f"paged_kv::{call.split()[0]}: {named or argument}: expected {words}"
    MISTAKES.append(Mistake(stage, call, argument, change, message))


def every_other(name: str) -> Callable[[Arguments], Tensor]:
    """The same values, with a stride of 2 in the last dimension."""
    return lambda a: torch.stack([a[name]] * 2, dim=-1)[..., 0]


def one_more(name: str, dim: int) -> Callable[[Arguments], Tensor]:
    return lambda a: torch.cat([a[name], a[name].narrow(dim, 0, 1)], dim=dim)


def changed(name: str, index: object, value: float) -> Callable[[Arguments], Tensor]:
    def change(a: Arguments) -> Tensor:
        tensor = a[name].clone()
        tensor[index] = value
        return tensor

    return change


def give(value: object) -> Callable[[Arguments], object]:
    return lambda a: value


# --- dtype ------------------------------------------------------------

dtype = partial(wrong, "dtype")
for call in "reshape_and_cache", "reshape_and_cache_dynamic":
    dtype(call, "key", torch.float64, f"dtype {FLOATS}, got float64")
    dtype(call, "value", torch.float16, "the dtype of key, float32, got float16")
    dtype(call, "slot_mapping", torch.int32, "dtype int64, got int32")
dtype("reshape_and_cache", "key_cache", torch.float64, f"dtype {ALL}, got float64")
dtype(
    "reshape_and_cache", "key_cache", torch.bfloat16, "the dtype of key_cache, bfloat16, got float32", "key"
)
dtype("reshape_and_cache", "value_cache", torch.bfloat16, "the dtype of key_cache, float32, got bfloat16")
for name in "k_scale", "v_scale":
    dtype(
        "reshape_and_cache",
        name,
        lambda a: torch.ones(1),
        "None, since key_cache is not quantised (float32), got a tensor",
    )
    dtype(
        "paged_attention",
        name,
        lambda a: torch.ones(1),
        "None, since key_cache is not quantised (float32), got a tensor",
    )
    dtype(
        "gather_kv out",
        name,
        lambda a: torch.ones(1),
        "None, since key_cache is not quantised (float32), got a tensor",
    )
    for call in (
        "reshape_and_cache quantised",
        "reshape_and_cache_dynamic",
        "paged_attention quantised",
        "gather_kv scaled",
    ):
        dtype(call, name, torch.float64, "dtype float32, got float64")
dtype("reshape_and_cache_dynamic", "key_cache", torch.float32, f"dtype {QUANTISED}, got float32")
dtype("reshape_and_cache_dynamic", "value_cache", torch.float32, "the dtype of key_cache, int8, got float32")
dtype("paged_attention", "query", torch.int32, f"dtype {FLOATS}, got int32")
dtype("paged_attention", "query", torch.float16, "the dtype of key_cache, float32, got float16")
dtype("paged_attention", "key_cache", torch.int32, f"dtype {ALL}, got int32")
dtype("paged_attention", "value_cache", torch.float16, "the dtype of key_cache, float32, got float16")
for name in "block_tables", "seq_lens", "query_start_loc":
    dtype("paged_attention", name, torch.int64, "dtype int32, got int64")
for name in "alibi_slopes", "sinks":
    dtype("paged_attention heads", name, torch.bfloat16, "dtype float32, got bfloat16")
dtype("paged_attention out", "out", torch.float16, "the dtype of query, float32, got float16")
dtype("paged_attention out", "lse", torch.float64, "dtype float32, got float64")
for call in "copy_blocks", "swap_blocks":
    dtype(call, "block_mapping", torch.int32, "dtype int64, got int32")
dtype("swap_blocks", "dst", torch.float16, "the dtype of src, float32, got float16")
dtype("gather_kv", "key_cache", torch.int32, f"dtype {ALL}, got int32")
dtype("gather_kv", "value_cache", torch.float32, "the dtype of key_cache, int8, got float32")
for name in "block_tables", "seq_lens":
    dtype("gather_kv", name, torch.int64, "dtype int32, got int64")
dtype("gather_kv scaled", "k_scale", give(None), "a tensor, as v_scale is one, got None")
dtype("gather_kv scaled", "v_scale", give(None), "a tensor, as k_scale is one, got None")
for name in "key", "value":
    dtype("gather_kv out", name, torch.float16, "dtype float32, got float16")
dtype("merge_attention_states", "out_a", torch.int32, f"dtype {FLOATS}, got int32")
dtype("merge_attention_states", "out_b", torch.float16, "the dtype of out_a, float32, got float16")
for name in "lse_a", "lse_b":
    dtype("merge_attention_states", name, torch.float16, "dtype float32, got float16")
dtype("merge_attention_states out", "out", torch.float16, "the dtype of out_a, float32, got float16")
dtype("merge_attention_states out", "lse", torch.float16, "dtype float32, got float16")

# --- layout ------------------------------------------------------------

layout = partial(wrong, "layout")
STRIDED = {
    "reshape_and_cache": ("key", "value", "key_cache", "value_cache"),
    "reshape_and_cache_dynamic": ("key", "value", "key_cache", "value_cache"),
    "paged_attention": ("query", "key_cache", "value_cache"),
    "paged_attention out": ("out",),
    "gather_kv": ("key_cache", "value_cache"),
    "gather_kv out": ("key", "value"),
    "merge_attention_states": ("out_a", "out_b"),
    "merge_attention_states out": ("out",),
}
for call, names in STRIDED.items():
    for name in names:
        strides = list(every_other(name)(VALID[call]()).stride())
        layout(
            call, name, every_other(name), f"a contiguous last dimension (stride 1), got strides {strides}"
        )
CONTIGUOUS = {
    "reshape_and_cache": ("slot_mapping",),
    "reshape_and_cache_dynamic": ("slot_mapping",),
    "paged_attention heads": ("seq_lens", "query_start_loc", "alibi_slopes", "sinks"),
    "copy_blocks": ("block_mapping",),
    "swap_blocks": ("block_mapping",),
    "gather_kv": ("seq_lens",),
}
for call, names in CONTIGUOUS.items():
    for name in names:
        strides = list(every_other(name)(VALID[call]()).stride())
        layout(call, name, every_other(name), f"a contiguous tensor, got strides {strides}")
# Of a written tensor, no element may be written twice, nor be another argument's.
WRITTEN = {
    "reshape_and_cache": ("key_cache", "value_cache"),
    "reshape_and_cache_dynamic": ("key_cache", "value_cache", "k_scale", "v_scale"),
    "paged_attention out": ("out", "lse"),
    "swap_blocks": ("dst",),
    "gather_kv out": ("key", "value"),
    "merge_attention_states out": ("out", "lse"),
}
for call, names in WRITTEN.items():
    for name in names:
        tensor = VALID[call]()[name]
        wide = tensor[:1].expand(tensor.shape)
        layout(
            call,
            name,
            lambda a, name=name: a[name][:1].expand(a[name].shape),
            "every element at an address of its own, as it is written, "
            f"got shape {list(wide.shape)} with strides {list(wide.stride())}",
        )


def shares(call: str, argument: str, written: str, other: str, change: Callable[[Arguments], Tensor]) -> None:
    words = f"memory apart from {other}, as it is written, got tensors that share elements"
    layout(call, argument, change, words, written)


def over(cache: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Rows of which each begins where a block of the cache does."""
    return cache.as_strided(shape, (cache.stride(0), D, 1), cache.storage_offset())


shares("reshape_and_cache", "value_cache", "key_cache", "value_cache", lambda a: a["key_cache"])
shares("reshape_and_cache", "value", "key_cache", "value", lambda a: a["key_cache"][:T, :, 0])
shares("reshape_and_cache", "key", "value_cache", "key", lambda a: a["value_cache"][:T, :, 3])
shares("reshape_and_cache_dynamic", "v_scale", "k_scale", "v_scale", lambda a: a["k_scale"])
shares(
    "reshape_and_cache_dynamic",
    "key",
    "k_scale",
    "key",
    lambda a: a["k_scale"].as_strided((T, HKV, D), (1, 2, 1)),
)
shares("paged_attention out", "out", "out", "query", lambda a: a["query"])
for name in "key_cache", "value_cache":
    shares("paged_attention out", "out", "out", name, lambda a, name=name: over(a[name], (T, HQ, D)))
shares("paged_attention out", "lse", "out", "lse", lambda a: a["out"][..., D - 1])
shares("swap_blocks", "dst", "dst", "src", lambda a: a["src"][2:5])
shares(
    "swap_blocks",
    "block_mapping",
    "dst",
    "block_mapping",
    lambda a: a["dst"].view(torch.int64).flatten()[:6].view(3, 2),
)
shares("gather_kv out", "value", "key", "value", lambda a: a["key"])
shares(
    "gather_kv out",
    "key",
    "key",
    "key_cache",
    lambda a: a["key_cache"].as_strided((15, HKV, D), (HKV * D, D, 1)),
)
shares("merge_attention_states out", "out", "out", "out_b", lambda a: a["out_b"])
shares("merge_attention_states out", "lse", "lse", "lse_a", lambda a: a["lse_a"])
layout(
    "copy_blocks",
    "key_caches",
    lambda a: [a["value_caches"][0][:, :1].expand(N, 3)],
    "every element at an address of its own, as it is written, got shape [6, 3] with strides [7, 0]",
    "key_caches[0]",
)
layout(
    "copy_blocks",
    "value_caches",
    lambda a: [a["key_caches"][1][:, 1:]],
    "memory apart from value_caches[0], as it is written, got tensors that share elements",
    "key_caches[1]",
)

# --- shape ------------------------------------------------------------

shape = partial(wrong, "shape")
for call in "reshape_and_cache", "paged_attention", "gather_kv":
    shape(call, "key_cache", lambda a: a["key_cache"][0], "shape [N, Hkv, B, D], got [2, 4, 8]")
    shape(
        call,
        "key_cache",
        lambda a: a["key_cache"][:, :0],
        "at least 1 head in [N, Hkv, B, D], got [6, 0, 4, 8]",
    )
    shape(
        call,
        "key_cache",
        lambda a: a["key_cache"][:, :, :0],
        "a block size B from 1 to 1024 in [N, Hkv, B, D], got [6, 2, 0, 8]",
    )
    shape(
        call,
        "key_cache",
        lambda a: torch.zeros(N, HKV, 1025, D, dtype=a["key_cache"].dtype),
        "a block size B from 1 to 1024 in [N, Hkv, B, D], got [6, 2, 1025, 8]",
    )
    shape(
        call,
        "key_cache",
        lambda a: a["key_cache"][..., :0],
        "a head size D from 1 to 256 in [N, Hkv, B, D], got [6, 2, 4, 0]",
    )
    shape(
        call,
        "key_cache",
        lambda a: torch.zeros(N, HKV, B, 257, dtype=a["key_cache"].dtype),
        "a head size D from 1 to 256 in [N, Hkv, B, D], got [6, 2, 4, 257]",
    )
for call in "reshape_and_cache", "reshape_and_cache_dynamic", "paged_attention", "gather_kv":
    shape(
        call,
        "value_cache",
        lambda a: a["value_cache"][1:],
        "shape of key_cache [N, Hkv, B, D] = [6, 2, 4, 8], got [5, 2, 4, 8]",
    )
for call in "reshape_and_cache", "reshape_and_cache_dynamic":
    shape(call, "slot_mapping", lambda a: a["slot_mapping"][None], "shape [T], got [1, 5]")
    shape(call, "key", lambda a: a["key"][0], "shape [T, Hkv, D], got [2, 8]")
    shape(call, "key", one_more("key", 1), "shape [T or more, Hkv, D] = [5, 2, 8], got [5, 3, 8]")
    shape(call, "key", lambda a: a["key"][..., 1:], "shape [T or more, Hkv, D] = [5, 2, 8], got [5, 2, 7]")
    shape(
        call,
        "slot_mapping",
        lambda a: torch.arange(6),
        "shape [T or more, Hkv, D] = [6, 2, 8], got [5, 2, 8]",
        "key",
    )
    shape(call, "value", one_more("value", 0), "shape of key [T or more, Hkv, D] = [5, 2, 8], got [6, 2, 8]")
for name in "k_scale", "v_scale":
    for call in "reshape_and_cache quantised", "paged_attention quantised", "gather_kv scaled":
        for sizes in (3,), (1, 1), (N, HKV, B + 1):
            shape(
                call,
                name,
                lambda a, sizes=sizes: torch.ones(sizes),
                f"shape [1], [Hkv] = [2] or [N, Hkv, B] = [6, 2, 4], got {list(sizes)}",
            )
    shape(
        "reshape_and_cache_dynamic", name, lambda a: torch.ones(1), "shape [N, Hkv, B] = [6, 2, 4], got [1]"
    )
shape("paged_attention", "query", lambda a: a["query"][0], "shape [T, Hq, D], got [4, 8]")
shape(
    "paged_attention", "query", lambda a: a["query"][..., :7], "shape [T, Hq, D] = [5, 4, 8], got [5, 4, 7]"
)
shape(
    "paged_attention",
    "query",
    lambda a: a["query"][:, :3],
    "a multiple of Hkv = 2 heads in [T, Hq, D], got [5, 3, 8]",
)
shape(
    "paged_attention",
    "query",
    lambda a: a["query"][:, :0],
    "a multiple of Hkv = 2 heads in [T, Hq, D], got [5, 0, 8]",
)
for call in "paged_attention", "gather_kv":
    shape(call, "seq_lens", lambda a: a["seq_lens"][None], "shape [S], got [1, 2]")
    shape(call, "block_tables", lambda a: a["block_tables"][0], "shape [S, M], got [3]")
    shape(call, "block_tables", one_more("block_tables", 0), "shape [S, M] = [2, 3], got [3, 3]")
shape(
    "paged_attention", "query_start_loc", lambda a: a["query_start_loc"][1:], "shape [S + 1] = [3], got [2]"
)
for name in "alibi_slopes", "sinks":
    shape("paged_attention heads", name, lambda a: torch.rand(HKV), "shape [Hq] = [4], got [2]")
shape(
    "paged_attention out", "out", one_more("out", 0), "shape of query [T, Hq, D] = [5, 4, 8], got [6, 4, 8]"
)
shape("paged_attention out", "lse", lambda a: a["lse"].T, "shape [T, Hq] = [5, 4], got [4, 5]")
shape(
    "copy_blocks",
    "value_caches",
    lambda a: [torch.zeros(N + 1, 2)],
    "a first dimension of N = 6 blocks, as key_caches[0], got shape [7, 2]",
    "value_caches[0]",
)
shape(
    "copy_blocks",
    "key_caches",
    lambda a: [torch.zeros(())],
    "a first dimension of N blocks, got shape []",
    "key_caches[0]",
)
shape("swap_blocks", "src", lambda a: torch.zeros(()), "a first dimension of N blocks, got shape []")
shape("swap_blocks", "dst", lambda a: a["dst"][..., :7], "blocks of src's shape, [2, 4, 8], got [2, 4, 7]")
for call in "copy_blocks", "swap_blocks":
    shape(call, "block_mapping", lambda a: torch.arange(4), "shape [K, 2], got [4]")
    shape(
        call,
        "block_mapping",
        lambda a: torch.zeros(2, 3, dtype=torch.int64),
        "shape [K, 2] = [2, 2], got [2, 3]",
    )
for name in "key", "value":
    shape("gather_kv out", name, lambda a, name=name: a[name][0], "shape [sum(seq_lens), Hkv, D], got [2, 8]")
    shape(
        "gather_kv out", name, one_more(name, 1), "shape [sum(seq_lens), Hkv, D] = [15, 2, 8], got [15, 3, 8]"
    )
shape("merge_attention_states", "out_a", lambda a: a["out_a"][0], "shape [T, Hq, D], got [4, 8]")
shape(
    "merge_attention_states",
    "out_b",
    one_more("out_b", 0),
    "shape of out_a [T, Hq, D] = [5, 4, 8], got [6, 4, 8]",
)
for name in "lse_a", "lse_b":
    shape("merge_attention_states", name, one_more(name, 1), "shape [T, Hq] = [5, 4], got [5, 5]")
shape(
    "merge_attention_states out",
    "out",
    one_more("out", 0),
    "shape of out_a [T, Hq, D] = [5, 4, 8], got [6, 4, 8]",
)
shape("merge_attention_states out", "lse", one_more("lse", 0), "shape [T, Hq] = [5, 4], got [6, 4]")

# --- range ------------------------------------------------------------

range_ = partial(wrong, "range")
for call in "reshape_and_cache", "reshape_and_cache_dynamic":
    name = "slot_mapping"
    range_(call, name, changed(name, 1, N * B), "slots below N * B = 24, got 24 for token 1")
    range_(call, name, changed(name, 4, 23), "a slot for one token only, got 23 for two tokens")
    range_(
        call, name, give(torch.tensor([7, 8, 9, 10, 8])), "a slot for one token only, got 8 for two tokens"
    )
for name in "k_scale", "v_scale":
    for value, text in {0.0: "0", -1.0: "-1", float("inf"): "inf", float("nan"): "nan"}.items():
        for call in "reshape_and_cache quantised", "paged_attention quantised", "gather_kv scaled":
            range_(call, name, give(torch.tensor([1, value])), f"finite scales above 0, got {text} at [1]")
            range_(call, name, give(torch.tensor([value])), f"finite scales above 0, got {text} at [0]")
        words = f"finite scales above 0 in the slots written, got {text} at [5, 1, 3]"
        range_("reshape_and_cache quantised", name, changed(name, (5, 1, 3), value), words)
for value, text in {float("inf"): "inf", float("nan"): "nan", 1e300: "1e+300"}.items():
    for name in "scale", "softcap":
        range_("paged_attention", name, give(value), f"a finite float32, got {text}")
for value, text in {-1.0: "-1", 1e-60: "1e-60"}.items():
    range_("paged_attention", "softcap", give(value), f"0 (none) or a float32 above, got {text}")
for value in 0, -2:
    range_("paged_attention", "window", give(value), f"-1 (none) or at least 1, got {value}")
name = "query_start_loc"
range_("paged_attention", name, give(ints(1, 4, 5)), "0 first, got 1")
range_("paged_attention", name, give(ints(0, 6, 5)), "numbers that never fall, got 5 after 6")
range_("paged_attention", name, give(ints(0, 4, 4)), "T = 5 last, the number of rows of query, got 4")
for call in "paged_attention", "gather_kv":
    words = "lengths from 0 to 12 (block_tables has 3 entries a sequence, a block 4 slots)"
    range_(call, "seq_lens", give(ints(10, -1)), f"{words}, got -1 for sequence 1")
    range_(call, "seq_lens", give(ints(13, 5)), f"{words}, got 13 for sequence 0")
    for value in -1, N:
        words = f"ids from 0 to 5 in the entries in use, got {value} in entry 2 of sequence 0"
        range_(call, "block_tables", changed("block_tables", (0, 2), value), words)
range_("paged_attention", "max_query_len", give(3), "at least the longest query, 4, got 3")
range_("paged_attention", "max_seq_len", give(9), "at least the longest sequence, 10, got 9")
# Rows at positions 6 to 9 with a window of 2 see keys 5 to 9: entries 1 and 2 are used, entry 0 is not.
words = "ids from 0 to 5 in the entries in use, got 6 in entry 1 of sequence 0"
range_("paged_attention window", "block_tables", changed("block_tables", (0, 1), N), words)
name = "block_mapping"
for call, blocks in ("copy_blocks", N), ("swap_blocks", 3):
    for value in -1, N:
        range_(call, name, changed(name, (1, 0), value), f"source ids from 0 to 5, got {value} in row 1")
    for value in -1, blocks:
        words = f"destination ids from 0 to {blocks - 1}, got {value} in row 2"
        range_(call, name, changed(name, (2, 1), value), words)
    range_(call, name, changed(name, (2, 1), 2), "a destination once only, got 2 twice")
for block in 1, 5:
    words = f"destinations that are no sources, got {block} as both"
    range_("copy_blocks", name, changed(name, (2, 0), block), words)
for name in "key", "value":
    words = "shape [sum(seq_lens), Hkv, D] = [15, 2, 8], got [16, 2, 8]"
    range_("gather_kv out", name, one_more(name, 0), words)
# A block of five dimensions, of which none continues another: found once the shapes are known to agree.
words = "blocks of at most 4 dimensions besides contiguous ones, "
words += "got shape [6, 2, 2, 2, 2, 2] with strides [1024, 512, 128, 32, 8, 2]"


def ragged() -> Tensor:
    return torch.zeros(N, 4, 4, 4, 4, 4)[:, ::2, ::2, ::2, ::2, ::2]


range_("copy_blocks", "value_caches", lambda a: [ragged()], words, "value_caches[0]")
range_("swap_blocks ragged", "dst", lambda a: ragged(), words)
