"""The tensors of a paged key/value cache: one allocation for all layers, viewed as the ops take it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import index

import numpy as np
import torch
from torch import Tensor

from . import _memory, ops
from ._arguments import check_choice, check_flag, check_instance, check_integer, is_row, lists_integers

__all__ = ["LayerCache", "PagedKVCache"]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
QUANTISED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)

# The order in which the elements of one layer's keys (or values) lie in memory, slowest first: block, head,
# slot, element of the head.
_LAYOUTS = {"HND": "NHBD", "NHD": "NBHD", "head_major": "HNBD"}
_SCALES = ("token", "head", "tensor", "none")

MAX_BLOCK_SIZE = 1024

_NOT_COPIED = ("device", "huge_pages", "_memory", "_layers")  # made anew for a copy
_ALIGNMENT = 64  # bytes: a cache line, and the widest vector load


@dataclass(frozen=True)
class LayerCache:
    """One layer's views into a `PagedKVCache`, ready to be passed to the ops."""

    key: Tensor  # [N, Hkv, B, D]; strides depend on the layout
    value: Tensor  # [N, Hkv, B, D]
    k_scale: Tensor | None = None  # float32 [1], [Hkv] or [N, Hkv, B] over a quantised cache; None: 1
    v_scale: Tensor | None = None

    @property
    def scale_per_token(self) -> bool:
        """Whether scales lie beside each token, to be written with it and copied with its block."""
        return self.k_scale is not None and self.k_scale.dim() == 3


class PagedKVCache:
    """Keys and values of all layers in `num_blocks` blocks of `block_size` token slots.

    A block id means the same block in every layer, so that one block table serves the whole model. What lies
    in a slot that was never written is unspecified; the ops never let it reach a result.

    Memory is one allocation. On the CPU it is backed by huge pages where Linux has them: reading a cache of
    many GB in random order spends much of its time in TLB misses with pages of 4 KiB. It is committed as it
    is first written.

    `copy.deepcopy`, pickle and `torch.save` copy that memory once, whatever is in it. `torch.load` puts the cache
    where its `map_location` says; it wants `torch.serialization.add_safe_globals([PagedKVCache])`, or
    `weights_only=False`.

    Args:
        num_layers: layers of the model that attend to a cache of their own.
        num_kv_heads: key/value heads (Hkv); a sequence with a number for each layer where they differ.
        head_dim: size of a head (D), 1 to 256; a sequence as for `num_kv_heads`.
        dtype: float32, float16 or bfloat16; or, quantised, float8_e4m3fn, float8_e5m2 or int8.
        block_size: token slots of a block (B), 1 to 1024.
        num_blocks: blocks (N) to allocate.
        memory: instead of `num_blocks`, bytes that the blocks may take: as many as fit are allocated.
        device: where the tensors lie.
        layout: memory order of a layer's keys, and of its values: "HND" is ``[N, Hkv, B, D]``, "NHD" is
            ``[N, B, Hkv, D]``, "head_major" is ``[Hkv, N, B, D]``, where one head's neighbouring blocks touch
            and reading them is one stream. The views are ``[N, Hkv, B, D]`` in each.
        interleaved: keys and values of a block side by side (``[N, 2, ...]``) instead of all keys before all
            values.
        scales: for a quantised dtype, what has a scale of its own: each "token" and head (the default;
            `write` chooses them, no calibration), each "head", the whole "tensor" (both 1 until set), or
            "none": the scale is 1.

    Raises:
        ValueError: an argument is out of its range, not both or none of `num_blocks` and `memory` is given,
            or `memory` does not hold one block. The sentence names the argument, what was expected and what
            came.
        TypeError: an argument is of another type; with such a sentence.
        MemoryError: the system does not give that much memory.

    Example:
        >>> cache = PagedKVCache(2, num_kv_heads=8, head_dim=64, dtype=torch.bfloat16, memory=64 << 20)
        >>> cache.num_blocks, cache.block_size, cache.bytes_per_block
        (1024, 16, 65536)
        >>> cache[0].key.shape
        torch.Size([1024, 8, 16, 64])
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int | Sequence[int],
        head_dim: int | Sequence[int],
        dtype: torch.dtype,
        block_size: int = 16,
        *,
        num_blocks: int | None = None,
        memory: int | None = None,
        device: torch.device | str = "cpu",
        layout: str = "HND",
        interleaved: bool = False,
        scales: str | None = None,
    ) -> None:
        num_layers = check_integer("num_layers", num_layers, 1)
        self.block_size = check_integer("block_size", block_size, 1, MAX_BLOCK_SIZE)
        check_choice("dtype", dtype, (*FLOATS, *QUANTISED))
        check_choice("layout", layout, tuple(_LAYOUTS))
        quantised = dtype in QUANTISED
        if scales is None:
            scales = "token" if quantised else "none"
        check_choice("scales", scales, _SCALES if quantised else ("none",))
        check_flag("interleaved", interleaved)

        self.num_kv_heads = _per_layer("num_kv_heads", num_kv_heads, num_layers)
        self.head_dim = _per_layer("head_dim", head_dim, num_layers, 256)
        self.dtype = dtype
        self.layout = layout
        self.interleaved = interleaved
        self.scales = scales
        self.num_blocks = self._choose_num_blocks(num_blocks, memory)
        if not isinstance(device, (str, torch.device)):
            raise TypeError(f"device: expected a device that torch has, got {device!r}")
        try:
            self.device = torch.device(device)
            torch.empty(0, device=self.device)  # known by name, and not there: AssertionError
        except (AssertionError, RuntimeError, ValueError):  # each has a page of torch's own
            raise ValueError(f"device: expected a device that torch has, got {device!r}") from None
        self._layers = self._allocate()

    @property
    def num_layers(self) -> int:
        return len(self.num_kv_heads)

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes over all layers, its per-token scales included."""
        return sum(map(self._layer_bytes_per_block, range(self.num_layers)))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors: the blocks, and scales per head or tensor beside them."""
        tensors = (t for at in self for t in (at.key, at.value, at.k_scale, at.v_scale) if t is not None)
        return sum(t.nbytes for t in tensors)

    @property
    def huge_page_bytes(self) -> int:
        """Bytes that the system has put on huge pages by now: what was written, where it had such pages."""
        return min(self.nbytes, _memory.huge_page_bytes(self._memory)) if self.huge_pages else 0

    def __len__(self) -> int:
        return self.num_layers

    def __getitem__(self, layer: int) -> LayerCache:
        try:
            return self._layers[index(layer)]
        except (IndexError, TypeError) as error:
            raise type(error)(f"layer: expected 0 to {self.num_layers - 1}, got {layer!r}") from None

    def __iter__(self) -> Iterator[LayerCache]:
        return iter(self._layers)

    def __repr__(self) -> str:
        heads, dims = (sorted(set(x)) for x in (self.num_kv_heads, self.head_dim))
        return (
            f"PagedKVCache({self.num_layers} layers, {self.num_blocks} blocks of {self.block_size} slots, "
            f"Hkv {', '.join(map(str, heads))}, D {', '.join(map(str, dims))}, {self.dtype}, {self.layout}"
            f"{', interleaved' if self.interleaved else ''}, {self.device}, {self.nbytes / 2**20:.1f} MiB)"
        )

    def write(self, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Writes new tokens ``[T, Hkv, D]`` to their slots, int64 ``[T]``, in a layer; negative slots are
        skipped.

        With scales per token it chooses and stores them. Raises as `ops.reshape_and_cache` does.
        """
        at = self[layer]
        write = ops.reshape_and_cache_dynamic if at.scale_per_token else ops.reshape_and_cache
        write(key, value, at.key, at.value, slot_mapping, k_scale=at.k_scale, v_scale=at.v_scale)

    def copy_blocks(self, block_mapping: Tensor | Sequence[tuple[int, int]]) -> None:
        """Copies blocks (source, destination) within every layer, per-token scales too, in one call.

        A destination stands once and is no source. Raises ValueError on ids out of range and TypeError on what are
        no ids, and copies nothing then.
        """
        keys = [t for layer in self for t in self._blocked(layer.key, layer.k_scale)]
        values = [t for layer in self for t in self._blocked(layer.value, layer.v_scale)]
        ops.copy_blocks(keys, values, _pairs(block_mapping).to(self.device))

    def swap_blocks(
        self, destination: PagedKVCache, block_mapping: Tensor | Sequence[tuple[int, int]]
    ) -> None:
        """Copies blocks (source here, destination there) of every layer to another cache: swap out, or in.

        The caches may lie on different devices and differ in layout, number of blocks and memory order, not
        in layers, heads, dtype, block size or scales.
        """
        check_instance("destination", destination, PagedKVCache)
        mine, theirs = self._geometry(), destination._geometry()
        if mine != theirs:
            raise ValueError(f"destination: expected a cache of {mine}, got one of {theirs}")
        pairs = _pairs(block_mapping)
        for here, there in zip(self, destination, strict=True):
            for source, target in (
                *zip(
                    self._blocked(here.key, here.k_scale),
                    self._blocked(there.key, there.k_scale),
                    strict=True,
                ),
                *zip(
                    self._blocked(here.value, here.v_scale),
                    self._blocked(there.value, there.v_scale),
                    strict=True,
                ),
            ):
                ops.swap_blocks(source, target, pairs)

    def like(self, num_blocks: int, device: torch.device | str = "cpu") -> PagedKVCache:
        """A new cache of `num_blocks` blocks for the same model, such as the host cache to swap to."""
        return PagedKVCache(
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            self.dtype,
            self.block_size,
            num_blocks=num_blocks,
            device=device,
            layout=self.layout,
            interleaved=self.interleaved,
            scales=self.scales,
        )

    def __copy__(self) -> PagedKVCache:
        """Another object over the same memory."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __deepcopy__(self, memo: dict) -> PagedKVCache:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(self.__getstate__())
        return twin

    # The tensors are views of one memory that begin storages of their own: each would be copied with its storage,
    # and the memory once more.
    def __getstate__(self) -> dict:
        own = {name: value for name, value in self.__dict__.items() if name not in _NOT_COPIED}
        scales = [(at.k_scale, at.v_scale) for at in self] if self.scales in ("head", "tensor") else []
        return own | {"memory": _memory.apart(self._memory), "layer_scales": scales}

    def __setstate__(self, state: dict) -> None:
        memory, layer_scales = state["memory"], state["layer_scales"]
        own = {name: value for name, value in state.items() if name not in ("memory", "layer_scales")}
        self.__dict__.update(own, device=memory.device)
        self._layers = self._allocate()
        self._memory.copy_(memory)
        for at, scales in zip(self, layer_scales, strict=False):
            at.k_scale.copy_(scales[0])
            at.v_scale.copy_(scales[1])

    def _geometry(self) -> dict:
        names = ("num_kv_heads", "head_dim", "dtype", "block_size", "scales")
        return {name: getattr(self, name) for name in names}

    @staticmethod
    def _blocked(cache: Tensor, scale: Tensor | None) -> list[Tensor]:
        """What belongs to blocks of one layer's keys or values: tensors whose first dimension is N."""
        return [cache] if scale is None or scale.dim() == 1 else [cache, scale]

    def _layer_bytes_per_block(self, layer: int) -> int:
        row = self.head_dim[layer] * self.dtype.itemsize + (4 if self.scales == "token" else 0)
        return 2 * self.num_kv_heads[layer] * self.block_size * row

    def _choose_num_blocks(self, num_blocks: int | None, memory: int | None) -> int:
        if (num_blocks is None) == (memory is None):
            got = "none" if memory is None else "both"
            raise ValueError(f"num_blocks, memory: expected one of them, got {got}")
        if memory is None:
            return check_integer("num_blocks", num_blocks, 1)
        memory = check_integer("memory", memory, 1)
        if memory < self.bytes_per_block:
            raise ValueError(
                f"memory: expected at least the bytes of one block over {self.num_layers} layers, "
                f"{self.bytes_per_block}, got {memory}"
            )
        return memory // self.bytes_per_block

    def _allocate(self) -> tuple[LayerCache, ...]:
        order = _LAYOUTS[self.layout]
        parts = [(order.replace("N", "NK") if self.interleaved else "K" + order, self.dtype)]
        if self.scales == "token":
            parts.append(("KHNB" if self.layout == "head_major" else "KNHB", torch.float32))
        sizes = [
            {"K": 2, "N": self.num_blocks, "H": heads, "B": self.block_size, "D": dim}
            for heads, dim in zip(self.num_kv_heads, self.head_dim, strict=True)
        ]
        total = sum(_aligned_bytes(part, dtype, size) for size in sizes for part, dtype in parts)
        self._memory, self.huge_pages = _memory.allocate(total, self.device)

        layers, rest = [], self._memory
        for size in sizes:
            views = []  # [2, N, Hkv, B, D]: keys and values; then [2, N, Hkv, B] or [2, ...]: their scales
            for part, dtype in parts:
                nbytes = math.prod(size[d] for d in part) * dtype.itemsize
                tensor = rest[:nbytes].view(dtype).view([size[d] for d in part])
                views.append(tensor.permute([part.index(d) for d in "KNHBD" if d in part]))
                rest = rest[_aligned_bytes(part, dtype, size) :]
            if self.scales in ("head", "tensor"):
                count = size["H"] if self.scales == "head" else 1
                views.append(torch.ones(2, count, dtype=torch.float32, device=self.device))
            layers.append(LayerCache(*(_memory.apart(half) for view in views for half in view)))
        return tuple(layers)


def _aligned_bytes(dims: str, dtype: torch.dtype, size: dict[str, int]) -> int:
    nbytes = math.prod(size[d] for d in dims) * dtype.itemsize
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _pairs(block_mapping: Tensor | np.ndarray | Sequence[tuple[int, int]]) -> Tensor:
    """int64 ``[K, 2]``; what is wrong with a tensor is for the op to say."""
    if isinstance(block_mapping, Tensor):
        return block_mapping
    error: type[Exception] = TypeError
    if lists_integers(block_mapping):
        error = ValueError
        with suppress(OverflowError, ValueError):  # beyond 64 bits; rows of several lengths
            pairs = np.array(block_mapping, np.int64)
            if not pairs.size:
                return torch.zeros(0, 2, dtype=torch.int64)
            if pairs.ndim == 2 and pairs.shape[1] == 2:
                return torch.from_numpy(pairs)
    raise error(f"block_mapping: expected pairs of block ids, got {block_mapping!r}")


def _per_layer(
    name: str, value: int | Sequence[int], num_layers: int, high: int | None = None
) -> tuple[int, ...]:
    values = tuple(value) if is_row(value) else (value,) * num_layers
    if len(values) != num_layers:
        raise ValueError(
            f"{name}: expected one number, or one for each of {num_layers} layers, got {len(values)}"
        )
    return tuple(check_integer(name, number, 1, high) for number in values)
