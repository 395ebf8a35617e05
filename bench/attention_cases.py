"""What paged_attention is measured on: shapes, and the same random inputs for every contender."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import paged_kv
from paged_kv import reference

from .common import slots_of

F32, BF16 = torch.float32, torch.bfloat16
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
QUANTISED_SCALE = 1 / 32  # of fp8 and int8 caches, for standard normal keys and values


@dataclass(frozen=True)
class Group:
    """So many sequences, alike."""

    num_seqs: int
    query_len: int
    seq_len: int

    @property
    def kind(self) -> str:
        return "decode" if self.query_len == 1 else "prefill" if self.query_len == self.seq_len else "chunk"

    def __str__(self) -> str:
        length = f"{self.query_len} on {self.seq_len}" if self.kind == "chunk" else str(self.seq_len)
        return f"{self.kind} {self.num_seqs} x {length}"


@dataclass(frozen=True)
class Shape:
    num_seqs: int
    seq_len: int
    query_len: int = 1
    heads: tuple[int, int] = (32, 8)  # query heads, key/value heads
    head_dim: int = 128
    block_size: int = 16
    dtype: torch.dtype = BF16  # of queries
    stored: torch.dtype | None = None  # of a quantised cache; None: `dtype`
    tables: str = "scattered"  # or runs: a sequence's blocks lie one after the other; or a placement's name
    layout: str = "HND"
    window: int = -1
    others: tuple[Group, ...] = ()  # in the same batch

    @property
    def groups(self) -> tuple[Group, ...]:
        return (Group(self.num_seqs, self.query_len, self.seq_len), *self.others)

    @property
    def kind(self) -> str:
        kinds = {group.kind for group in self.groups}
        return kinds.pop() if len(kinds) == 1 else "mixed"

    @property
    def cache_dtype(self) -> torch.dtype:
        return self.stored or self.dtype

    @property
    def lens(self) -> list[tuple[int, int]]:
        """Query length and seq_len of each sequence."""
        return [(g.query_len, g.seq_len) for g in self.groups for _ in range(g.num_seqs)]

    def __str__(self) -> str:
        dtype = str(self.cache_dtype).removeprefix("torch.")
        groups = " + ".join(map(str, self.groups))
        if self.kind == "decode" and self.others:
            lengths = [seq_len for _, seq_len in self.lens]
            groups = f"decode {len(lengths)} x {min(lengths)}-{max(lengths)}"
        parts = [groups, f"{dtype} {self.heads[0]}/{self.heads[1]} heads"]
        parts += [f"D {self.head_dim} block {self.block_size} {self.tables} {self.layout}"]
        if self.window > 0:
            parts.append(f"window {self.window}")
        return " ".join(parts)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that have to be read."""
        keys = sum(seq_len if self.window < 0 else min(seq_len, self.window) for _, seq_len in self.lens)
        return 2 * keys * self.heads[1] * self.head_dim * self.cache_dtype.itemsize

    @property
    def flops(self) -> int:
        """Floating-point operations of both products, each pair of a query and a key it sees counted once."""
        pairs = sum(sum(range(seq_len - query_len + 1, seq_len + 1)) for query_len, seq_len in self.lens)
        return 4 * pairs * self.heads[0] * self.head_dim


class Inputs:
    """The same random keys, values and queries for every contender.

    blocks: [ceil(seq_len / B)] int64 of each sequence, in a cache of `num_blocks`; chosen as `shape.tables` says where
        none are given. Sequences that share a block share the tokens in it.
    """

    def __init__(self, shape: Shape, blocks: Sequence[Tensor] | None = None, num_blocks: int = 0) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(shape.dtype)

        num_q_heads, num_kv_heads = shape.heads
        query_lens, seq_lens = zip(*shape.lens, strict=True)
        if blocks is None:
            blocks, num_blocks = blocks_of(shape, generator)
        self.shape, self.blocks = shape, blocks
        self.query = random(sum(query_lens), num_q_heads, shape.head_dim)
        self.slots = [
            slots_of(of_seq, length, shape.block_size)
            for of_seq, length in zip(blocks, seq_lens, strict=True)
        ]
        self.keys, self.values = (
            [pool[slots] for slots in self.slots]  # [seq_len, Hkv, D]
            for pool in (random(num_blocks * shape.block_size, num_kv_heads, shape.head_dim) for _ in "kv")
        )
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32)
        self.query_start_loc = torch.tensor([0, *query_lens]).cumsum(0, dtype=torch.int32)
        self.block_tables = torch.zeros(len(blocks), max(map(len, blocks)), dtype=torch.int32)
        for table, of_seq in zip(self.block_tables, blocks, strict=True):
            table[: len(of_seq)] = of_seq
        self.cache_shape = (num_blocks, num_kv_heads, shape.block_size, shape.head_dim)
        self.scale = shape.head_dim**-0.5

    def save(self, path: Path) -> str:
        names = (
            "query",
            "keys",
            "values",
            "block_tables",
            "seq_lens",
            "query_start_loc",
            "cache_shape",
            "scale",
        )
        torch.save({name: getattr(self, name) for name in names}, path)
        return str(path)


def blocks_of(shape: Shape, generator: torch.Generator) -> tuple[Sequence[Tensor], int]:
    """The blocks of each sequence, none of them shared, and their number."""
    widths = [-(-length // shape.block_size) for _, length in shape.lens]
    order = torch.arange(sum(widths))
    if shape.tables == "scattered":
        order = torch.randperm(sum(widths), generator=generator)
    return order.split(widths), sum(widths)


class Ours:
    """paged_attention on a PagedKVCache, as a user of the library has it."""

    def __init__(self, inputs: Inputs) -> None:
        shape = inputs.shape
        cache = paged_kv.PagedKVCache(
            1,
            shape.heads[1],
            shape.head_dim,
            shape.cache_dtype,
            shape.block_size,
            num_blocks=inputs.cache_shape[0],
            layout=shape.layout,
            scales="tensor" if shape.stored else None,
        )
        layer = cache[0]
        self.key_cache, self.value_cache = layer.key, layer.value
        scales = {}
        if shape.stored:
            scales = {
                "k_scale": layer.k_scale.fill_(QUANTISED_SCALE),
                "v_scale": layer.v_scale.fill_(QUANTISED_SCALE),
            }
        # Sequence by sequence, as a call takes each slot once only.
        for keys, values, slots in zip(inputs.keys, inputs.values, inputs.slots, strict=True):
            paged_kv.ops.reshape_and_cache(keys, values, self.key_cache, self.value_cache, slots, **scales)
        self.args = (inputs.query, self.key_cache, self.value_cache, inputs.block_tables)
        self.args += (inputs.seq_lens, inputs.query_start_loc)
        query_lens, seq_lens = zip(*shape.lens, strict=True)
        self.max_query_len, self.max_seq_len = max(query_lens), max(seq_lens)
        self.scale, self.window = inputs.scale, shape.window
        self.k_scale, self.v_scale = scales.get("k_scale"), scales.get("v_scale")
        self.out = torch.empty_like(inputs.query)
        self.lse = torch.empty(inputs.query.shape[:2])

    def __call__(self) -> Tensor:
        # Each argument by its name, as the peers' are: what a call from Python takes is measured, too.
        paged_kv.ops.paged_attention(
            *self.args,
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
            scale=self.scale,
            window=self.window,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            out=self.out,
            lse=self.lse,
        )
        return self.out


class Contiguous:
    """scaled_dot_product_attention on keys and values [S, H, L, D] that need no block table, group by group."""

    def __init__(self, inputs: Inputs) -> None:
        shape, self.calls = inputs.shape, []
        first_seq = first_row = 0
        for group in shape.groups:
            keys, values = (
                torch.stack(rows[first_seq:][: group.num_seqs]).transpose(1, 2).contiguous()
                for rows in (inputs.keys, inputs.values)
            )
            num_rows = group.num_seqs * group.query_len
            packed = inputs.query[first_row:][:num_rows].unflatten(0, (group.num_seqs, group.query_len))
            options = {"scale": inputs.scale, "enable_gqa": shape.heads[0] != shape.heads[1]}
            if group.kind == "prefill":
                options["is_causal"] = True
            elif group.kind == "chunk":
                options["attn_mask"] = mask_of(group, shape.window)
            self.calls.append((packed.transpose(1, 2), keys, values, options))
            first_seq, first_row = first_seq + group.num_seqs, first_row + num_rows

    def __call__(self) -> Tensor:
        outs = [scaled_dot_product_attention(q, k, v, **options) for q, k, v, options in self.calls]
        return torch.cat([out.transpose(1, 2).flatten(0, 1) for out in outs])


def mask_of(group: Group, window: int) -> Tensor:
    """Which keys each row sees, [query_len, seq_len]."""
    positions = torch.arange(group.seq_len - group.query_len, group.seq_len)[:, None]
    keys = torch.arange(group.seq_len)
    seen = keys <= positions
    return seen if window < 0 else seen & (keys > positions - window)


def check(name: str, inputs: Inputs, out: Tensor) -> None:
    """A contender that computes something else is not one: the last sequence of each group in float64.

    Of many groups, the shortest and the middle one: float64 takes longer than all that is timed.
    """
    shape, last_seq, last_row = inputs.shape, -1, 0
    by_length = sorted(shape.groups, key=lambda group: group.seq_len)
    checked = by_length if len(by_length) <= 3 else [by_length[0], by_length[len(by_length) // 2]]
    for group in shape.groups:
        last_seq, last_row = last_seq + group.num_seqs, last_row + group.num_seqs * group.query_len
        if group not in checked:
            continue
        rows = slice(last_row - group.query_len, last_row)
        keys, values = (as_stored(shape, kv[last_seq]).transpose(0, 1) for kv in (inputs.keys, inputs.values))
        query, mask = inputs.query[rows].double().transpose(0, 1), mask_of(group, shape.window)
        exact = scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=mask,
            scale=inputs.scale,
            enable_gqa=shape.heads[0] != shape.heads[1],
        )
        error = float((out[rows].double() - exact.transpose(0, 1)).abs().max() / exact.abs().max())
        allowed = 1e-5 if shape.dtype == F32 else 2e-2
        if not error <= allowed:
            raise SystemExit(
                f"{shape}: {name} is wrong: error {error:.1e} of the largest output, allowed {allowed:.0e}"
            )


def as_stored(shape: Shape, rows: Tensor) -> Tensor:
    """What a cache gives back, in float64."""
    if shape.stored is None:
        return rows.double()
    return reference.quantise(rows, shape.stored, QUANTISED_SCALE).double() * QUANTISED_SCALE
