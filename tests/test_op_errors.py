"""Every error message of every op: one argument of a valid call is made wrong, the sentence is compared in
full, and every tensor is found as it was, bit for bit.

The checks stand before any kernel, so they need no `backend` fixture. The fake implementations are held to
the same sentences where dtypes and shapes show the mistake.
"""

import pytest
import torch
import torch.utils._pytree as pytree
from op_mistakes import MISTAKES, VALID, Arguments, Mistake
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from paged_kv import ops

OPS = sorted({call.split()[0] for call in VALID})
OVERLOADS = [(op, overload) for op in OPS for overload in getattr(torch.ops.paged_kv, op).overloads()]


def tensors_of(arguments: Arguments) -> list[Tensor]:
    lists = [value if isinstance(value, list) else [value] for value in arguments.values()]
    return [value for values in lists for value in values if isinstance(value, Tensor)]


def storage_bytes(tensor: Tensor) -> Tensor:
    """A copy of all bytes behind a tensor, those between its elements included."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).clone()


@pytest.mark.parametrize("call", VALID)
def test_valid_calls_pass(call):
    getattr(ops, call.split()[0])(**VALID[call]())


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_message_and_no_change(mistake: Mistake):
    arguments = mistake.arguments()
    before = [storage_bytes(tensor) for tensor in tensors_of(arguments)]
    with pytest.raises(ValueError) as error:
        getattr(ops, mistake.op)(**arguments)
    assert str(error.value) == mistake.message
    for tensor, content in zip(tensors_of(arguments), before, strict=True):
        assert torch.equal(storage_bytes(tensor), content)


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_fake_implementation_raises_alike(mistake: Mistake):
    with FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True) as mode:
        arguments = pytree.tree_map_only(Tensor, mode.from_tensor, mistake.arguments())
        prefix = mistake.message.partition(": expected")[0] + ": expected"
        if mistake.stage in ("dtype", "shape"):
            with pytest.raises(ValueError) as error:
                getattr(ops, mistake.op)(**arguments)
            assert str(error.value) == mistake.message
        else:  # seen without data, or when the compiled function runs
            try:
                getattr(ops, mistake.op)(**arguments)
            except ValueError as error:
                assert str(error).startswith(prefix)
