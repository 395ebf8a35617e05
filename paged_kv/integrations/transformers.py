"""Run a transformers model on a paged cache.

transformers looks attention up by name in `AttentionInterface`, and masks in `AttentionMaskInterface`. One
name is registered in both: the attention function writes the new keys and values to their blocks and calls
`paged_attention`; the mask function builds no mask and only tells how far a layer looks back. Tokens of many
sequences are packed in one row, with their positions, and a `PagedBatch` that says where they live rides
through the model's forward as a keyword argument. No padding, no `DynamicCache`.

A model that means something else than `paged_attention` can do must not run at all: `PagedModel` reads its
config, and then lets it prove itself on a few tokens.

    transformers.py   PagedModel
    _attention.py     what transformers calls
    _packing.py       weights as oneDNN reads them
    _probe.py         the proof
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _memory
from .._optional import optional_import
from ..cache import FLOATS, PagedKVCache
from ..errors import UnsupportedModelError
from ._attention import AttentionLayer, PagedBatch, attend, mask
from ._packing import pack_linear_layers
from ._probe import Probe, attend_probe, mask_probe, probe

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["AttentionLayer", "PagedBatch", "PagedModel", "is_model"]

ATTENTION, PROBE = "paged_kv", "paged_kv_probe"
"""Names under which transformers finds the functions that run a model, and those that probe it."""


class PagedModel:
    """A transformers causal language model that reads and writes a paged cache.

    The model itself stays as it is: it looks up the paged attention only during `forward`.

    Args:
        model: a decoder-only model in eval mode whose attention goes through `AttentionInterface`.

    Raises:
        UnsupportedModelError: the model means something that the ops or packing cannot do.
        TypeError: it is no model.
        ValueError: it is in training mode.
        ImportError: transformers is not installed.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        transformers = optional_import("transformers", "transformers")
        for name, functions in (ATTENTION, (attend, mask)), (PROBE, (attend_probe, mask_probe)):
            transformers.AttentionInterface.register(name, functions[0])
            transformers.AttentionMaskInterface.register(name, functions[1])
        if not is_model(model):
            raise TypeError(f"model: expected a model of transformers, got {type(model).__name__}")
        if model.training:
            raise ValueError("model: expected eval mode, got training mode: call model.eval() first")
        if model.device.type == "cpu":
            _memory.keep_what_is_freed()
        self.model = model
        self._call = model
        self.config = model.config.get_text_config(decoder=True)
        self._configs = list(_with_sub_configs(model.config))
        self._slices_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        try:
            _check_config(model, self.config)
            self.layers: list[AttentionLayer] = probe(self._compute_probe, self.config, self.device)
        except UnsupportedModelError as error:
            name = type(model).__name__
            raise UnsupportedModelError(f"{name} cannot run on a paged cache: {error}") from None
        self.vocab_size: int = self.config.vocab_size
        self.context_length = _context_length(self.config)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def new_cache(
        self,
        block_size: int = 16,
        *,
        num_blocks: int | None = None,
        memory: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> PagedKVCache:
        """A cache for this model's layers, beside its weights, sized in blocks or in bytes.

        dtype: of keys and values: the model's own by default, or a quantised one.

        Raises ValueError for another dtype, and as PagedKVCache does.
        """
        own = self.layers[0].dtype
        check_cache_dtype("dtype", dtype, own)
        return PagedKVCache(
            len(self.layers),
            [layer.num_kv_heads for layer in self.layers],
            [layer.head_dim for layer in self.layers],
            dtype or own,
            block_size,
            num_blocks=num_blocks,
            memory=memory,
            device=self.device,
        )

    def compile(self, **options: Any) -> None:  # noqa: ANN401
        """Has torch compile the model's forward, in one graph for batches of all sizes, at its next calls.

        options: of `torch.compile`, such as its `mode`.
        """
        self._call = torch.compile(self.model, **{"dynamic": True, "fullgraph": True, **options})

    def pack_weights(self) -> int:
        """Has the model's own linear layers multiply by packed copies of their weights, on a CPU; tells how many do.

        The other layers and the weights stay as they are. Results differ in the last bits. Not together with `compile`.

        Raises:
            ValueError: this PyTorch has no oneDNN, or there is no linear layer in float32 on the CPU.
        """
        return pack_linear_layers(self.model)

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, position_ids: Tensor, batch: PagedBatch, rows: Tensor) -> Tensor:
        """Computes packed tokens and stores their keys and values.

        Args:
            input_ids: `[T]` int64, sequences one after another.
            position_ids: `[T]` int64, position of each token in its own sequence, counted from 0.
            batch: where the tokens live.
            rows: `[R]` int64, the tokens whose logits are wanted.

        Returns:
            logits `[R, vocab_size]` in the model's dtype.
        """
        kwargs = {"logits_to_keep": rows} if self._slices_logits else {}
        logits = self._compute(ATTENTION, input_ids, position_ids, batch, **kwargs)
        return logits if self._slices_logits else logits[rows]

    def _compute(
        self,
        attention: str,
        input_ids: Tensor,
        position_ids: Tensor | None,
        batch: PagedBatch | Probe,
        **kwargs: Tensor,
    ) -> Tensor:
        if position_ids is not None:
            kwargs["position_ids"] = position_ids[None]
        # A mask of ones says that there is no padding; without it transformers guesses at packed sequences.
        ones = torch.ones_like(input_ids[None])
        with self._looking_up(attention):
            return self._call(
                input_ids=input_ids[None], attention_mask=ones, use_cache=False, paged_batch=batch, **kwargs
            ).logits[0]

    def _compute_probe(self, input_ids: Tensor, position_ids: Tensor | None, batch: Probe) -> None:
        self._compute(PROBE, input_ids, position_ids, batch)

    @contextmanager
    def _looking_up(self, attention: str) -> Iterator[None]:
        before = [config._attn_implementation for config in self._configs]
        self.model.config._attn_implementation = attention
        try:
            yield
        finally:
            for config, implementation in zip(self._configs, before, strict=True):
                config._attn_implementation = implementation


def check_cache_dtype(name: str, dtype: torch.dtype | None, own: torch.dtype) -> None:
    """Of the floats, a cache is of the model's `own`."""
    if dtype in FLOATS and dtype != own:
        raise ValueError(f"{name}: expected the model's own, {own}, or a quantised one, got {dtype}")


def is_model(value: object) -> bool:
    """Whether it may be a model of transformers: wrapped ones, by peft for instance, are of no class of theirs."""
    return isinstance(value, torch.nn.Module) and hasattr(value, "config")


def _check_config(model: PreTrainedModel, config: PretrainedConfig) -> None:
    """Finds what a model says about itself; the probe would refuse most of it too, with a vaguer reason."""
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError("it is an encoder-decoder model; only decoder-only models are supported")
    if not model.can_generate():
        raise UnsupportedModelError("it has no language-model head (its class cannot generate)")
    if not model._can_set_attn_implementation():
        raise UnsupportedModelError("its attention does not go through transformers' AttentionInterface")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModelError("its forward takes no position_ids, so sequences cannot be packed")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise UnsupportedModelError(
            f"it has layers of the kinds {', '.join(sorted(kinds))}; full and sliding attention are supported"
        )
    if getattr(config, "attention_chunk_size", None) is not None:
        raise UnsupportedModelError("its attention is chunked (attention_chunk_size)")
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1:
        raise UnsupportedModelError(f"its parameters are spread over devices: {', '.join(sorted(devices))}")


def _with_sub_configs(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """Parents first: setting a parent's attention sets its children's too."""
    yield config
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            yield from _with_sub_configs(getattr(config, name))


def _context_length(config: PretrainedConfig) -> int | None:
    """The longest sequence whose tokens are computed alike in any company; None where the config tells none.

    `dynamic` and `longrope` rotations change for every sequence of a batch as soon as one of them passes the
    original length, so that is where such a model's context ends here.
    """
    limits = [getattr(config, "max_position_embeddings", None)]
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in [rope] if "rope_type" in rope else [p for p in rope.values() if isinstance(p, dict)]:
        if "dynamic" in parameters["rope_type"] or parameters["rope_type"] == "longrope":
            limits.append(parameters.get("original_max_position_embeddings"))
    limits = [limit for limit in limits if limit is not None]
    return min(limits) if limits else None
