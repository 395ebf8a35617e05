"""Sequences and prefix caches as safetensors files: keys, values, tokens and the digests that name them.

A file tells what it was made for (identity, that is the model, dtype, block size, heads, windows ...), and is refused
by the name of the first thing that differs. The digests are hashed again from the tokens. It needs
`pip install 'paged_kv[transfer]'`.

Tensors: layers.{i}.key and layers.{i}.value [entries, Hkv, B, D]; layers.{i}.k_scale and v_scale, [entries, Hkv, B] or
as the cache has them; tokens int32; digests uint8 [n, 32]; and for a prefix cache parents uint8 [n, 32], groups uint8.
"""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ._arguments import check_instance
from ._optional import optional_import
from .cache import PagedKVCache
from .errors import TransferMismatchError
from .manager import PagedKVCacheManager
from .manager.chain import ContentKey
from .manager.handover import (
    CachedBlocks,
    Fills,
    SequenceState,
    describe_cache,
    describe_sequence,
    take_cache,
    take_sequence,
)

__all__ = ["export_prefix_cache", "export_sequence", "import_prefix_cache", "import_sequence"]

_VERSION = 1


def export_sequence(
    path: str | os.PathLike, manager: PagedKVCacheManager, cache: PagedKVCache, seq_id: Hashable
) -> None:
    """Writes the computed tokens of `seq_id` to a file; the sequence stays as it is.

    Raises UnknownSequenceError, SwappedSequenceError, and ValueError if cache and manager differ in their blocks.
    """
    _expect_pair(manager, cache)
    state, blocks = describe_sequence(manager, seq_id)
    meta = {
        "known_len": state.known_len,
        "root": state.root.hex(),
        "first_block": state.first_block,
        "keys": [[k.kind, _text(k.value), isinstance(k.value, str), k.start, k.stop] for k in state.keys],
    }
    tensors = {"tokens": torch.from_numpy(state.tokens), "digests": _pack(state.digests)}
    stop, filled = -(-len(state.tokens) // manager.block_size), len(state.tokens) % manager.block_size
    ends = np.cumsum([stop - first for first in state.first_block])
    _save(
        path, "sequence", manager, cache, meta, tensors, blocks, (ends - 1).tolist() if filled else [], filled
    )


def import_sequence(
    path: str | os.PathLike, manager: PagedKVCacheManager, cache: PagedKVCache, seq_id: Hashable
) -> None:
    """Opens `seq_id` with the content of a file: its tokens are computed and its full blocks published.

    Raises DuplicateSequenceError, OutOfBlocksError, TransferMismatchError (name, expected, found), and ValueError for
    a file of another kind or a damaged one; nothing has changed then.
    """
    _expect_pair(manager, cache)
    meta, tensors = _load(path, "sequence", manager, cache)
    state = SequenceState(
        tokens=tensors["tokens"].numpy(),
        known_len=meta["known_len"],
        root=bytes.fromhex(meta["root"]),
        digests=_unpack(tensors["digests"]),
        keys=tuple(
            ContentKey(kind, bytes.fromhex(value).decode() if is_text else bytes.fromhex(value), start, stop)
            for kind, value, is_text, start, stop in meta["keys"]
        ),
        first_block=meta["first_block"],
    )
    stop = -(-len(state.tokens) // manager.block_size)
    _expect_whole(
        path,
        state.tokens.dtype == np.int32
        and len(state.first_block) == len(manager.windows)
        and all(0 <= first <= stop for first in state.first_block)
        and len(state.digests) * manager.block_size <= state.known_len <= len(state.tokens)
        and _has_entries(cache, tensors, sum(stop - first for first in state.first_block)),
    )
    _fill(cache, tensors, take_sequence(manager, seq_id, state))


def export_prefix_cache(path: str | os.PathLike, manager: PagedKVCacheManager, cache: PagedKVCache) -> int:
    """Writes all cached blocks to a file, but for those whose content depends on keys within them; tells how many."""
    _expect_pair(manager, cache)
    _expect_prefix_cache(manager)
    cached, blocks = describe_cache(manager)
    tensors = {
        "tokens": torch.from_numpy(cached.tokens),
        "groups": torch.from_numpy(cached.groups),
        "digests": _pack(cached.digests),
        "parents": _pack(cached.parents),
    }
    _save(path, "prefix cache", manager, cache, {}, tensors, blocks)
    return len(blocks)


def import_prefix_cache(path: str | os.PathLike, manager: PagedKVCacheManager, cache: PagedKVCache) -> int:
    """Adds the blocks of a file to the prefix cache, as many as there are free ones; tells how many.

    Nothing is evicted for them; where not all fit, the least recently used are left out. Raises
    TransferMismatchError (name, expected, found), and ValueError for a file of another kind or
    a damaged one; nothing has changed then.
    """
    _expect_pair(manager, cache)
    _expect_prefix_cache(manager)
    _, tensors = _load(path, "prefix cache", manager, cache)
    cached = CachedBlocks(
        tensors["groups"].numpy(),
        _unpack(tensors["digests"]),
        _unpack(tensors["parents"]),
        tensors["tokens"].numpy(),
    )
    num_entries = len(cached.groups)
    _expect_whole(
        path,
        cached.tokens.dtype == np.int32
        and cached.tokens.shape == (num_entries, manager.block_size)
        and len(cached.digests) == len(cached.parents) == num_entries
        and (cached.groups < len(manager.windows)).all()
        and _has_entries(cache, tensors, num_entries),
    )
    fills = take_cache(manager, cached)
    _fill(cache, tensors, fills)
    return len(fills)


def _expect_pair(manager: PagedKVCacheManager, cache: PagedKVCache) -> None:
    """Raises TypeError where they are something else, and ValueError where the manager's blocks are not the cache's."""
    check_instance("manager", manager, PagedKVCacheManager)
    check_instance("cache", cache, PagedKVCache)
    if cache.block_size != manager.block_size:
        raise ValueError(
            f"cache: expected block_size {manager.block_size} as of manager, got {cache.block_size}"
        )
    if cache.num_blocks < manager.num_blocks:
        raise ValueError(
            f"cache: expected the {manager.num_blocks} blocks of manager, got {cache.num_blocks}"
        )


def _expect_prefix_cache(manager: PagedKVCacheManager) -> None:
    if not manager.has_prefix_cache:
        raise ValueError("manager: expected one with prefix_cache=True, it has none")


def _geometry(manager: PagedKVCacheManager, cache: PagedKVCache) -> dict:
    """What must be the same where a file is made and where it is read."""
    return {
        "identity": manager.identity,
        "block_size": manager.block_size,
        "windows": list(manager.windows),
        "dtype": str(cache.dtype).removeprefix("torch."),
        "num_layers": cache.num_layers,
        "num_kv_heads": list(cache.num_kv_heads),
        "head_dim": list(cache.head_dim),
        "scales": cache.scales,
    }


def _save(
    path: str | os.PathLike,
    kind: str,
    manager: PagedKVCacheManager,
    cache: PagedKVCache,
    meta: dict,
    tensors: dict[str, Tensor],
    blocks: list[int],
    partial: Sequence[int] = (),
    filled: int = 0,
) -> None:
    """Entries `partial` have `filled` tokens: what former holders left behind these in the block is not written."""
    safetensors = optional_import("safetensors.torch", "transfer")
    index = torch.tensor(blocks, dtype=torch.int64, device=cache.device)
    for name, tensor, by_block in _tensors(cache):
        content = (tensor.index_select(0, index) if by_block else tensor).cpu().contiguous()
        if by_block and partial:
            content.view(torch.uint8).reshape(*content.shape[:3], -1)[partial, :, filled:] = 0
        tensors[name] = content
    header = {"kind": kind, "version": _VERSION, "geometry": _geometry(manager, cache), **meta}
    safetensors.save_file(tensors, path, {"paged_kv": json.dumps(header)})


def _load(
    path: str | os.PathLike, kind: str, manager: PagedKVCacheManager, cache: PagedKVCache
) -> tuple[dict, dict[str, Tensor]]:
    safetensors = optional_import("safetensors", "transfer")
    with safetensors.safe_open(path, "pt") as file:
        header = json.loads((file.metadata() or {}).get("paged_kv", "{}"))
        if (header.get("kind"), header.get("version")) != (kind, _VERSION):
            raise ValueError(f"{path}: expected a {kind} exported by paged_kv, format {_VERSION}")
        for name, expected in _geometry(manager, cache).items():
            if header["geometry"][name] != expected:
                raise TransferMismatchError(name, expected, header["geometry"][name])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    _expect_whole(path, all(name in tensors for name, _, _ in _tensors(cache)))
    for name, tensor, by_block in _tensors(cache):
        if not by_block and not torch.equal(tensor.cpu(), tensors[name]):
            raise TransferMismatchError(name, tensor.tolist(), tensors[name].tolist())
    return header, tensors


def _expect_whole(path: str | os.PathLike, whole: bool) -> None:
    """Asked before anything changes."""
    if not whole:
        raise ValueError(
            f"{path}: expected what paged_kv exported, the parts of this file do not fit together"
        )


def _has_entries(cache: PagedKVCache, tensors: dict[str, Tensor], num_entries: int) -> bool:
    """Whether there is the content of so many blocks for each tensor of the cache."""
    return all(
        (tensors[name].dtype, tensors[name].shape) == (tensor.dtype, (num_entries, *tensor.shape[1:]))
        for name, tensor, by_block in _tensors(cache)
        if by_block
    )


def _fill(cache: PagedKVCache, tensors: dict[str, Tensor], fills: Fills) -> None:
    entries = torch.tensor([entry for entry, _ in fills], dtype=torch.int64)
    blocks = torch.tensor([block for _, block in fills], dtype=torch.int64, device=cache.device)
    for name, tensor, by_block in _tensors(cache):
        if by_block:
            content = tensors[name].index_select(0, entries).to(cache.device)
            if tensor.element_size() == 1:  # index_copy_ has no float8
                tensor, content = tensor.view(torch.uint8), content.view(torch.uint8)
            tensor.index_copy_(0, blocks, content)


def _tensors(cache: PagedKVCache) -> Iterator[tuple[str, Tensor, bool]]:
    """Name and tensor of all that the cache consists of, and whether its first dimension is that of blocks."""
    for i, layer in enumerate(cache):
        yield f"layers.{i}.key", layer.key, True
        yield f"layers.{i}.value", layer.value, True
        for name, scale in (("k_scale", layer.k_scale), ("v_scale", layer.v_scale)):
            if scale is not None:
                yield f"layers.{i}.{name}", scale, layer.scale_per_token


def _text(value: str | bytes) -> str:
    return (value.encode() if isinstance(value, str) else value).hex()


def _pack(digests: list[bytes]) -> Tensor:
    return torch.from_numpy(np.frombuffer(b"".join(digests), np.uint8).copy().reshape(len(digests), 32))


def _unpack(digests: Tensor) -> list[bytes]:
    return [digest.tobytes() for digest in digests.numpy()]
