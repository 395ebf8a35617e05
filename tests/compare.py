"""How results are compared: bit for bit, or against float64 with PyTorch's own error as the tolerance."""

import torch
from torch import Tensor

FLOAT32_EPS = torch.finfo(torch.float32).eps
FEW = 4096  # elements in a result too small for its largest error to mean something
# Below this all counts as zero: a weight may stop at the smallest normal number, so that an infinite value is
# still infinite after it, as in exact arithmetic.
UNDERFLOW = 1e-35

# Error that PyTorch's attention may make, as a share of the largest value, before it is the test that must be
# wrong: a tolerance taken from a larger one would let anything pass.
SANE_ERROR = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def bits(x: Tensor) -> Tensor:
    """The tensor's bits as integers, so that NaN equals NaN and -0.0 is not 0.0."""
    return x.contiguous().view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    )


def assert_same_bits(actual: Tensor, expected: Tensor, what: str) -> None:
    assert actual.shape == expected.shape, (
        f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, expected {expected.dtype}"
    wrong = bits(actual.cpu()) != bits(expected.cpu())
    _tell(wrong, actual.cpu(), expected.cpu(), wrong.double(), f"{what}: bits differ")


def error_of(peer: Tensor, exact: Tensor, what: str) -> float:
    """The largest error that PyTorch's result `peer` makes against the float64 result.

    A small result may be right by luck, which is no measure: there it counts as four float32 roundings, about
    what the rounding of a score of 10 does to its weight.
    """
    finite = exact.isfinite()
    size = max(1.0, _largest(exact[finite]))
    error = _largest((peer.double() - exact)[finite])
    sane = SANE_ERROR[peer.dtype] * size
    assert error <= sane, f"{what}: PyTorch's own error of {error:.2e} exceeds {sane:.2e}; is the test right?"
    return max(error, 4 * FLOAT32_EPS * size) if exact.numel() < FEW else error


def assert_close(actual: Tensor, exact: Tensor, error: float, what: str) -> None:
    """|actual - exact| is at most twice PyTorch's error on the same input, plus the rounding of the output.

    Args:
        actual: result under test, of any float dtype.
        exact: float64 result of the same shape.
        error: the largest error that PyTorch makes in `actual`'s dtype (`error_of`).
        what: the case, for the message.
    """
    assert actual.shape == exact.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    actual, exact = actual.cpu(), exact.cpu()
    wide, special = actual.double(), ~exact.isfinite()
    same = torch.where(exact.isnan(), wide.isnan(), wide == exact)
    wrong = (special | ~wide.isfinite()) & ~same
    _tell(wrong, actual, exact, wrong.double(), f"{what}: inf and NaN differ")
    excess = (wide - exact).abs() - 2 * error - torch.finfo(actual.dtype).eps * exact.abs() - UNDERFLOW
    _tell(
        ~special & (excess > 0), actual, exact, excess, f"{what}: error beyond 2 x {error:.2e} and a rounding"
    )


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _tell(wrong: Tensor, actual: Tensor, expected: Tensor, badness: Tensor, what: str) -> None:
    """Fails with the number of wrong elements and the worst of them."""
    if not wrong.any():
        return
    worst = int(torch.where(wrong, badness, -torch.inf).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), wrong.shape))
    raise AssertionError(
        f"{what}\n  {int(wrong.sum())} of {wrong.numel()} elements; worst at {index}: "
        f"{actual[index].item()!r}, expected {expected[index].item()!r}"
    )
