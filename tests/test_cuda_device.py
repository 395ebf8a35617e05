"""What only a GPU can show: streams, CUDA graphs, asynchronous swaps, no wait of the host, the engine on its device.

Collected where a GPU is found that the build has kernels for. The op tests of the other files run there too, on the
backend "cuda"; bench/gpu_check.sh runs them all.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from cases import Case, make_inputs
from compare import assert_same_bits
from op_mistakes import MISTAKES, VALID, Mistake
from torch import Tensor, library
from torch.nn.functional import scaled_dot_product_attention

from paged_kv import PagedKVCache, PagedKVCacheManager, ops

BF16, F16, F32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
DECODE = ((1, 700), (1, 3), (1, 513), (1, 40))

# One small call for each kernel; compute-sanitizer runs these. Decode in splits, tiles of rows, the vector kernel.
SHORT = {
    "decode": Case(seqs=DECODE, heads=(8, 2), head_dim=128, dtype=BF16),
    "decode_float16": Case(seqs=DECODE, heads=(4, 4), head_dim=64, dtype=F16),
    "decode_float32": Case(seqs=DECODE, heads=(4, 2), head_dim=40),
    "decode_fp8": Case(
        seqs=DECODE, heads=(4, 1), dtype=BF16, cache_dtype=E4M3, k_scale="token", v_scale="head"
    ),
    "decode_int8": Case(seqs=DECODE, heads=(4, 1), dtype=F16, cache_dtype=torch.int8, k_scale="head"),
    "many_heads": Case(seqs=((1, 60), (2, 30)), dtype=F16, heads=(72, 1)),
    "mixed": Case(seqs=((70, 90), (1, 600), (20, 20), (0, 5)), dtype=BF16, heads=(4, 1), head_dim=256),
    "window": Case(seqs=((30, 200), (1, 150)), dtype=F16, window=40, softcap=20.0, alibi=True, sinks=0.0),
    "broken": Case(seqs=((20, 70),), dtype=BF16, broken="v"),
    "odd": Case(seqs=((3, 50), (1, 20)), dtype=F16, head_dim=33, block_size=3, cache_layout="padded"),
}


def to_cuda(values: object) -> object:
    """The same tensors on the GPU, views of one storage still being views of one, with all strides and offsets."""
    storages: dict[int, Tensor] = {}

    def move(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage).cuda()
        moved = storages[storage.data_ptr()].untyped_storage()
        empty = torch.empty(0, dtype=tensor.dtype, device="cuda")
        return empty.set_(moved, tensor.storage_offset(), tensor.shape, tensor.stride())

    return pytree.tree_map_only(Tensor, move, values)


def arguments_of(call: str, arguments: dict, host: tuple[str, ...] = ()) -> dict:
    """A call's arguments on the GPU, but for those in `host` and the pairs of swap_blocks, which it reads there."""
    if call.startswith("swap_blocks"):
        host = ("block_mapping", *host)
    moved = to_cuda({name: value for name, value in arguments.items() if name not in host})
    return {name: moved.get(name, value) for name, value in arguments.items()}


@contextmanager
def busy_stream(warm_up: Callable[[], object]) -> Iterator[torch.cuda.Stream]:
    """A stream that is the current one, and whose work so far takes long enough for the host to come far.

    `warm_up` runs on it first: the first call of a kernel loads it, and the first allocation asks the driver, for which
    they may wait.
    """
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        warm_up()
        torch.cuda.synchronize()
        torch.cuda._sleep(400_000_000)  # cycles
        yield stream


# ------------------------------------------------------------------------------------------------------------
# Every kernel once


@pytest.mark.parametrize("name", SHORT)
def test_short_attention(name: str) -> None:
    """Against the CPU's own kernels, which the other tests hold to the definition."""
    case = SHORT[name]
    out, lse = ops.paged_attention(**make_inputs(case, "cuda").args)
    expected, expected_lse = ops.paged_attention(**make_inputs(case, "cpu").args)
    torch.testing.assert_close(out.cpu(), expected, atol=4e-2, rtol=4e-2, equal_nan=True)
    torch.testing.assert_close(lse.cpu(), expected_lse, atol=2e-2, rtol=2e-2, equal_nan=True)


@pytest.mark.parametrize("call", [call for call in VALID if not call.startswith("paged_attention")])
def test_short_others(call: str) -> None:
    on_host, on_cuda = VALID[call](), None
    on_cuda = arguments_of(call, pytree.tree_map_only(Tensor, Tensor.clone, on_host))
    function = getattr(ops, call.split()[0])
    results = function(**on_cuda), on_cuda
    expected = function(**on_host), on_host
    torch.cuda.synchronize()
    for actual, exact in zip(pytree.tree_leaves(results), pytree.tree_leaves(expected), strict=True):
        if isinstance(exact, Tensor):
            torch.testing.assert_close(actual.cpu().float(), exact.float(), atol=1e-5, rtol=1e-5)


# ------------------------------------------------------------------------------------------------------------
# Streams


@pytest.mark.parametrize("name", SHORT)
def test_no_call_waits_for_the_device(name: str) -> None:
    args = make_inputs(SHORT[name], "cuda").args
    out, lse = ops.paged_attention(**args)
    again, again_lse = torch.empty_like(out), torch.empty_like(lse)
    with busy_stream(lambda: ops.paged_attention(**args)) as stream:
        ops.paged_attention(**args, out=again, lse=again_lse)
        assert not stream.query(), "the call waited until the device was done"
    stream.synchronize()
    assert_same_bits(again, out, "out")
    assert_same_bits(again_lse, lse, "lse")


WITHOUT_WAIT = ["reshape_and_cache", "reshape_and_cache_dynamic", "copy_blocks", "gather_kv out"]


@pytest.mark.parametrize("call", [*WITHOUT_WAIT, "merge_attention_states", "merge_attention_states out"])
def test_no_other_op_waits_for_the_device(call: str) -> None:
    arguments, function = arguments_of(call, VALID[call]()), getattr(ops, call.split()[0])
    with busy_stream(lambda: function(**arguments)) as stream:
        function(**arguments)
        assert not stream.query(), "the call waited until the device was done"
    stream.synchronize()


def test_ops_run_on_the_current_stream() -> None:
    """Behind the work that makes their inputs, on a stream that nothing else waits for."""
    case = SHORT["decode"]
    args = make_inputs(case, "cuda").args
    expected, _ = ops.paged_attention(**args)
    query = torch.zeros_like(args["query"])
    with busy_stream(lambda: ops.paged_attention(**args)) as stream:
        query.copy_(args["query"])
        out, _ = ops.paged_attention(**args | {"query": query})
    stream.synchronize()
    assert_same_bits(out, expected, "out")


def test_streams_do_not_disturb_one_another() -> None:
    """Many calls at once, each with workspace for partial results, which the allocator hands out again."""
    names = ["decode", "decode_float16", "decode_float32", "decode_fp8"]
    args = [make_inputs(SHORT[name], "cuda").args for name in names]
    expected = [ops.paged_attention(**a)[0] for a in args]
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in names], [[] for _ in names]
    for _ in range(50):
        for stream, a, found in zip(streams, args, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(ops.paged_attention(**a)[0])
    torch.cuda.synchronize()
    for name, found, exact in zip(names, results, expected, strict=True):
        for out in found:
            assert_same_bits(out, exact, name)


def test_swap_to_pinned_memory_is_asynchronous_both_ways() -> None:
    cache = torch.randn(64, 2, 16, 64, device="cuda").to(BF16)
    host = torch.zeros(40, 2, 16, 64, dtype=BF16).pin_memory()
    back = torch.zeros_like(cache)
    order = torch.randperm(64)[:40]
    out = torch.stack([order, torch.arange(40)], 1)
    with busy_stream(lambda: ops.swap_blocks(cache, host, out)) as stream:
        host.zero_()
        ops.swap_blocks(cache, host, out)
        ops.swap_blocks(host, back, out.flip(1).contiguous())
        assert not stream.query(), "swap_blocks waited for the copy"
    stream.synchronize()
    assert_same_bits(host, cache[order.cuda()], "on the host")
    assert_same_bits(back[order.cuda()], cache[order.cuda()], "back on the device")


def test_swap_to_pageable_memory() -> None:
    cache, host = torch.randn(9, 3, 7, device="cuda"), torch.zeros(9, 3, 7)
    ops.swap_blocks(cache, host, torch.tensor([[1, 2], [2, 3], [8, 0]]))
    torch.cuda.synchronize()
    assert_same_bits(host[[2, 3, 0]], cache[[1, 2, 8]], "on the host")


@pytest.mark.parametrize("device", range(torch.cuda.device_count()))
def test_ops_run_on_their_arguments_device(device: int) -> None:
    """Whatever device is the current one."""
    args = make_inputs(SHORT["decode"], f"cuda:{device}").args
    with torch.cuda.device(0):
        out, lse = ops.paged_attention(**args)
    assert out.device == lse.device == torch.device("cuda", device)
    torch.testing.assert_close(out.cpu(), ops.paged_attention(**make_inputs(SHORT["decode"]).args)[0])


# ------------------------------------------------------------------------------------------------------------
# CUDA graphs


def capture(function: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, object]:
    """A graph of one call, and the call's results, which a replay writes anew."""
    function()  # kernels are loaded, and memory is taken, before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


def step(args: dict, new: dict) -> tuple[Tensor, Tensor]:
    """What a layer does in a step: write the new tokens, attend, merge with another state."""
    ops.reshape_and_cache(new["key"], new["value"], args["key_cache"], args["value_cache"], new["slots"])
    out, lse = ops.paged_attention(**args)
    return ops.merge_attention_states(out, lse, new["out"], new["lse"])


@pytest.mark.parametrize("name", ["decode", "decode_float16", "decode_float32", "mixed", "window"])
def test_a_graph_replays_with_other_lengths_tables_and_values(name: str) -> None:
    """Captured with short sequences and the bounds of long ones; replayed with those of three other batches."""
    case = SHORT[name]
    bounds = {"max_query_len": 80, "max_seq_len": 2000}
    static = make_inputs(case, "cuda", placement=1).args | bounds
    num_tokens, heads, dim = static["query"].shape
    kv_heads = case.heads[1]

    def new_tokens(seed: int) -> dict:
        torch.manual_seed(seed)
        free = (
            static["key_cache"].shape[0] * case.block_size - 1
        )  # a slot of a block that no sequence holds, or not
        return {
            "key": torch.randn(1, kv_heads, dim, device="cuda").to(case.dtype),
            "value": torch.randn(1, kv_heads, dim, device="cuda").to(case.dtype),
            "slots": torch.tensor([free], device="cuda"),
            "out": torch.randn(num_tokens, heads, dim, device="cuda").to(case.dtype),
            "lse": torch.randn(num_tokens, heads, device="cuda"),
        }

    new = new_tokens(0)
    graph, results = capture(lambda: step(static, new))
    for placement in (2, 3, 4):
        other, other_new = make_inputs(case, "cuda", placement=placement).args, new_tokens(placement)
        other["query"] = torch.randn_like(other["query"])
        other["seq_lens"] = other["seq_lens"] - (other["seq_lens"] > 2 * placement + 90).int() * placement
        for name_of, value in other.items():
            if isinstance(value, Tensor):
                static[name_of].copy_(value)
        for name_of, value in other_new.items():
            new[name_of].copy_(value)
        expected = step(other | bounds, other_new)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(results[0], expected[0], f"out, placement {placement}")
        assert_same_bits(results[1], expected[1], f"lse, placement {placement}")


def test_copies_and_gathers_replay_with_other_blocks() -> None:
    keys, values = ([torch.randn(20, 2, 4, 8, device="cuda") for _ in range(3)] for _ in "kv")
    mapping = torch.tensor([[0, 10], [1, 11]], device="cuda")
    tables = torch.tensor([[10, 11]], dtype=torch.int32, device="cuda")
    lens = torch.tensor([8], dtype=torch.int32, device="cuda")
    key, value = torch.zeros(2, 8, 2, 8, device="cuda")

    def move() -> None:
        ops.copy_blocks(keys, values, mapping)
        ops.gather_kv(keys[0], values[0], tables, lens, key=key, value=value)

    graph, _ = capture(move)
    mapping.copy_(torch.tensor([[4, 15], [7, 2]]))
    tables.copy_(torch.tensor([[15, 2]]))
    sources = [cache.clone() for cache in (*keys, *values)]
    graph.replay()
    torch.cuda.synchronize()
    for cache, before in zip((*keys, *values), sources, strict=True):
        assert_same_bits(cache[[15, 2]], before[[4, 7]], "copied")
    exact = keys[0][[15, 2]].transpose(1, 2).flatten(0, 1)
    assert_same_bits(key, exact, "gathered")


# ------------------------------------------------------------------------------------------------------------
# Errors

CHECKING = os.environ.get("PAGED_KV_CUDA_CHECKS") == "1"  # which reads the device's data
STAGES = ("dtype", "layout", "shape", "range") if CHECKING else ("dtype", "layout", "shape")


@pytest.mark.parametrize("mistake", [m for m in MISTAKES if m.stage in STAGES], ids=str)
def test_mistakes_raise_alike_and_change_nothing(mistake: Mistake) -> None:
    # Pairs that share memory with the destination are in host memory with it.
    host = ("dst",) if mistake.argument == "block_mapping" else ()
    arguments = arguments_of(mistake.call, mistake.arguments(), host)
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
    before = [tensor.clone() for tensor in tensors]
    with pytest.raises(ValueError) as error:
        getattr(ops, mistake.op)(**arguments)
    assert str(error.value) == mistake.message
    for tensor, content in zip(tensors, before, strict=True):
        assert_same_bits(tensor, content, "an argument")


@pytest.mark.parametrize("call", [call for call in VALID if call.split()[0] != "swap_blocks"])
def test_tensors_of_two_devices_raise(call: str) -> None:
    tensors = [name for name, value in VALID[call]().items() if isinstance(value, Tensor)]
    for name in tensors[1:]:
        arguments = arguments_of(call, VALID[call]())
        with pytest.raises(
            ValueError, match=r": expected the device of \w+, (cuda:0, got cpu|cpu, got cuda:0)"
        ):
            getattr(ops, call.split()[0])(**arguments | {name: arguments[name].cpu()})


def test_the_checking_mode_finds_ids_out_of_range() -> None:
    """In a process of its own, as the mode is chosen once."""
    code = """
import torch, paged_kv
from test_cuda_device import arguments_of
from op_mistakes import VALID
arguments = arguments_of("paged_attention", VALID["paged_attention"]())
arguments["block_tables"][0, 1] = 1000
try:
    paged_kv.ops.paged_attention(**arguments)
except ValueError as error:
    print(error)
"""
    tests = Path(__file__).parent
    path = os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PAGED_KV_CUDA_CHECKS": "1", "PYTHONPATH": path}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "block_tables: expected ids from 0 to 5 in the entries in use, got 1000 in entry 1" in run.stdout


@pytest.mark.parametrize("call", [call for call in VALID if call != "paged_attention quantised"])
def test_opcheck(call: str) -> None:
    packet = getattr(torch.ops.paged_kv, call.split()[0])
    overload = packet.out if call.endswith(" out") else packet.default
    library.opcheck(overload, (), arguments_of(call, VALID[call]()))


# ------------------------------------------------------------------------------------------------------------
# The manager with a cache on the GPU


@pytest.mark.parametrize("layout", ["HND", "NHD", "head_major"])
def test_manager_and_cache_serve_as_contiguous_keys_do(layout: str) -> None:
    """Prompts that begin alike, forks that write, a sequence swapped out and in, with random weights for a model."""
    torch.manual_seed(0)
    heads, kv_heads, dim = 4, 2, 64
    manager = PagedKVCacheManager(num_blocks=64, block_size=4, num_host_blocks=64)
    cache = PagedKVCache(1, kv_heads, dim, F32, num_blocks=64, block_size=4, device="cuda", layout=layout)
    host = cache.like(64)
    rows: dict[str, list[tuple[Tensor, Tensor]]] = {}  # of each sequence, keys and values so far

    def append(new_tokens: dict[str, list[int]]) -> None:
        seq_ids, lens = list(new_tokens), [len(tokens) for tokens in new_tokens.values()]
        done = manager.append(seq_ids, list(new_tokens.values()))
        cache.copy_blocks(done.block_copies)
        count = sum(lens)
        query = torch.randn(count, heads, dim, device="cuda")
        key, value = torch.randn(2, count, kv_heads, dim, device="cuda")
        cache.write(0, key, value, torch.from_numpy(np.ascontiguousarray(done.slot_mapping)).cuda())
        starts = torch.tensor([0, *lens]).cumsum(0, dtype=torch.int32)
        tables, seq_lens = manager.block_tables(seq_ids), manager.seq_lens(seq_ids)
        sizes = [torch.from_numpy(np.ascontiguousarray(x)).int().cuda() for x in (tables, seq_lens)]
        bounds = {"max_query_len": max(lens), "max_seq_len": int(seq_lens.max()), "scale": dim**-0.5}
        layer = cache[0]
        out, _ = ops.paged_attention(query, layer.key, layer.value, *sizes, starts.cuda(), **bounds)
        for i, seq_id in enumerate(seq_ids):
            part = slice(int(starts[i]), int(starts[i + 1]))
            rows.setdefault(seq_id, []).append((key[part], value[part]))
            k, v = (torch.cat(x).transpose(0, 1) for x in zip(*rows[seq_id], strict=True))
            length, new = k.shape[1], lens[i]
            mask = torch.arange(length) <= torch.arange(length - new, length)[:, None]
            exact = scaled_dot_product_attention(
                query[part].transpose(0, 1)[None],
                k[None],
                v[None],
                attn_mask=mask.cuda(),
                enable_gqa=True,
                scale=dim**-0.5,
            )[0].transpose(0, 1)
            torch.testing.assert_close(out[part], exact, atol=1e-4, rtol=1e-4)
        manager.commit(seq_ids)

    for seq_id, prompt in {"a": [5, 3, 8, 1, 9], "b": list(range(30))}.items():
        assert manager.admit(seq_id, prompt).admitted
        append({seq_id: prompt})
    manager.fork("b", "c")
    rows["c"] = list(rows["b"])
    for token in range(6):
        append({"a": [token], "b": [token + 1], "c": [token + 2]})
    cache.swap_blocks(host, manager.swap_out(["b"]))
    torch.cuda.synchronize()
    append({"a": [50], "c": [51]})
    host.swap_blocks(cache, manager.swap_in(["b"]))
    append({"a": [60], "b": [61], "c": [62]})
    manager.check()
