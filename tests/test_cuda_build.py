"""A build with the CUDA backend, as far as it can be asked without a GPU: registration, fake tensors on cuda, schemas.

`make cuda-build` makes one and runs these tests.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.utils._pytree as pytree
from op_mistakes import MISTAKES, VALID, Mistake
from pretend_cuda import PretendCuda
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import paged_kv
from paged_kv import ops

OPS = [
    "reshape_and_cache",
    "reshape_and_cache_dynamic",
    "paged_attention",
    "paged_attention.out",
    "copy_blocks",
    "swap_blocks",
    "gather_kv",
    "gather_kv.out",
    "merge_attention_states",
    "merge_attention_states.out",
]
ON_HOST = {"swap_blocks": ("block_mapping", "dst")}  # arguments that lie in host memory


def on_cuda(call: str, arguments: dict, mode: FakeTensorMode) -> dict:
    """The same arguments as fake tensors on cuda."""

    def fake(name: str, value: object) -> object:
        host = name in ON_HOST.get(call.split()[0], ())
        return pytree.tree_map_only(
            Tensor, lambda t: mode.from_tensor(t) if host else mode.from_tensor(t).to("cuda"), value
        )

    with mode:
        return {name: fake(name, value) for name, value in arguments.items()}


def test_every_op_has_a_cuda_kernel_of_its_own() -> None:
    defined = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("paged_kv::")}
    assert defined == {f"paged_kv::{name}" for name in OPS}
    for name in OPS:
        for key in "CPU", "CUDA":
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"paged_kv::{name}", key), (name, key)


def test_build_info_lists_architectures_and_ptx_of_the_newest() -> None:
    info = paged_kv.build_info()
    assert info.cuda_reason == ""
    *images, ptx = info.cuda_archs
    assert images and all(re.fullmatch(r"sm_\d+[af]?", image) for image in images)
    assert ptx == "compute_" + max((re.sub(r"\D", "", image) for image in images), key=int)
    assert ", ".join(info.cuda_archs) in str(info)


def test_importing_asks_for_no_gpu() -> None:
    code = "import torch, paged_kv; assert not torch.cuda.is_initialized(); print(paged_kv.build_info())"
    folder = Path(paged_kv.__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)
    assert run.returncode == 0, run.stderr
    assert "CUDA archs built:" in run.stdout and "none" not in run.stdout


@pytest.mark.parametrize("call", VALID)
def test_fake_results_lie_where_the_arguments_do(call: str) -> None:
    """Shapes, dtypes, strides and device of the results; the CPU's own results are the measure of the first three."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    real = VALID[call]()
    expected = getattr(ops, call.split()[0])(**real)
    arguments = on_cuda(call, VALID[call](), mode)
    if call.startswith("gather_kv") and "out" not in call:
        return  # how many tokens, the data alone tell: the next test
    with mode:
        results = getattr(ops, call.split()[0])(**arguments)
    for result, exact in zip(results or (), expected or (), strict=True):
        assert (result.shape, result.dtype, result.stride()) == (exact.shape, exact.dtype, exact.stride())
        assert result.device == torch.device("cuda", 0)


@pytest.mark.parametrize("call", ["gather_kv", "gather_kv scaled"])
def test_fake_gather_has_a_length_of_its_own(call: str) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    arguments = on_cuda(call, VALID[call](), mode)
    with mode:
        for result in ops.gather_kv(**arguments):
            assert result.device.type == "cuda" and result.shape[1:] == arguments["key_cache"].shape[1::2]
            assert isinstance(result.shape[0], torch.SymInt)


@pytest.mark.parametrize("mistake", [m for m in MISTAKES if m.stage in ("dtype", "shape")], ids=str)
def test_fake_implementation_raises_alike(mistake: Mistake) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    arguments = on_cuda(mistake.call, mistake.arguments(), mode)
    with mode, pytest.raises(ValueError) as error:
        getattr(ops, mistake.op)(**arguments)
    assert str(error.value) == mistake.message


@pytest.mark.parametrize("call", [call for call in VALID if call.split()[0] != "swap_blocks"])
def test_tensors_of_two_devices_raise(call: str) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    tensors = [name for name, value in VALID[call]().items() if isinstance(value, Tensor)]
    for name in tensors[1:]:
        arguments = on_cuda(call, VALID[call](), mode)
        with (
            mode,
            pytest.raises(
                ValueError, match=r": expected the device of \w+, (cuda:0, got cpu|cpu, got cuda:0)"
            ),
        ):
            getattr(ops, call.split()[0])(**arguments | {name: arguments[name].cpu()})


@pytest.mark.parametrize("call", [call for call in VALID if not call.startswith("gather_kv")])
def test_tracing_keeps_the_op_and_what_it_writes(call: str) -> None:
    """The graph that torch.compile starts from, functionalised: what the schema says is written is handed on."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    arguments = on_cuda(call, VALID[call](), mode)
    leaves, spec = pytree.tree_flatten(arguments)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def function(*tensors: Tensor) -> list[Tensor]:
        given = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor
        results = getattr(ops, call.split()[0])(**pytree.tree_unflatten(given, spec))
        return [*(results or ()), *(tensor.clone() for tensor in tensors)]

    with mode:
        graph = make_fx(dispatch_functionalize(function))(*(leaves[place] for place in places))
    targets = [(node.target, *node.args) for node in graph.graph.nodes if node.op == "call_function"]
    op = getattr(torch.ops.paged_kv, call.split()[0])
    assert any(part in (op.default, getattr(op, "out", None)) for parts in targets for part in parts)


def test_the_pretended_device_finds_what_a_gpu_would() -> None:
    """Without that, tests that pass on it would show nothing."""
    with PretendCuda():
        there, here = torch.ones(3, device="cuda"), torch.ones(3)
        assert there.device == (there * 2).device == there[1:].device == torch.device("cuda", 0)
        assert there.cpu().device == here.device and here.to("cuda").device == there.device
        here.copy_(there * 2)
        assert here.tolist() == [2, 2, 2]
        for mix in (lambda: there + here, lambda: torch.cat([here, there]), lambda: there.equal(here)):
            with pytest.raises(RuntimeError, match="expected all tensors on one device"):
                mix()
        with pytest.raises((TypeError, RuntimeError)):
            there.numpy()
