"""Weights laid out as oneDNN's matrix products read them, for CPUs.

PyTorch multiplies by weights as they are stored, which suits the few rows of a decode step badly: packed once, the
products of 8 rows take two thirds of the time. float32 alone: for bfloat16, oneDNN asks for AVX-512.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

__all__ = ["pack_linear_layers"]

ROWS = 16  # what oneDNN chooses a layout for: good from 4 rows on, and hardly worse for hundreds


def pack_linear_layers(model: nn.Module) -> int:
    """Has the model's linear layers multiply by packed copies of their weights; returns how many do.

    The weights stay where they are, and take their memory again; what is changed in them later has no effect.
    Results differ in the last bits.

    Raises:
        ValueError: this PyTorch has no oneDNN, or nothing of the model is for it.
    """
    if not torch.backends.mkldnn.is_available():
        raise ValueError("pack_weights: expected a PyTorch with oneDNN (mkldnn), this one has none")
    layers = [
        layer
        for layer in model.modules()
        if type(layer) is nn.Linear
        and layer.weight.device.type == "cpu"
        and layer.weight.dtype == torch.float32
    ]
    if not layers:
        raise ValueError("pack_weights: expected linear layers in float32 on the CPU, found none")
    for layer in layers:
        packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), ROWS)
        layer.forward = partial(_linear, packed, layer.bias)
    return len(layers)


def _linear(packed: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
