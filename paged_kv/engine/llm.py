"""Text in, text out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..integrations.transformers import PagedModel
from ..manager import PagedKVCacheManager
from .detokenizer import Detokenizer
from .engine import Engine
from .loading import load
from .metrics import CacheUse
from .request import FinishReason, Request
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["LLM", "RequestOutput"]

DEFAULT_MEMORY = 1 << 30  # about 23,000 tokens of a model of 135 million parameters in float32


@dataclass(frozen=True)
class RequestOutput:
    """Where one prompt has got to."""

    index: int  # which of the prompts
    prompt_ids: list[int]
    token_ids: list[int]  # all new tokens so far, the stop token included
    text: str  # theirs, without special tokens; empty without a tokenizer
    new_text: str  # the end of `text` that this output adds to the one before
    finish_reason: FinishReason | None  # None while it runs
    error: str | None  # why it was refused
    num_preemptions: int

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class LLM:
    """A transformers model that answers many prompts at once out of one paged cache.

    Args:
        model: a loaded model, the path of a folder written by `save_pretrained`, or the path of a GGUF file.
        tokenizer: for a loaded model; without one, prompts are token ids and outputs have no text.
        dtype: of the weights where a path is loaded; None for the one they are stored in (float32 for GGUF).
        block_size: slots in a block.
        num_blocks, memory: size of the pool, in blocks or in bytes; 1 GiB where neither is given.
        max_model_len, max_batch_tokens, max_num_seqs: see Engine.

    Raises:
        UnsupportedModelError: the model cannot run on a paged cache.
        FileNotFoundError, ImportError: see `paged_kv.engine.loading.load`.

    Example:
        llm = LLM("SmolLM2-135M-Instruct.Q4_1.gguf")
        for output in llm.generate(["Once upon a time", "Water boils at"], SamplingParams(max_tokens=20)):
            print(output.text)
    """

    def __init__(
        self,
        model: PreTrainedModel | str | Path,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dtype: torch.dtype | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        memory: int | None = None,
        max_model_len: int | None = None,
        max_batch_tokens: int = 512,
        max_num_seqs: int = 64,
    ) -> None:
        if isinstance(model, (str, Path)):
            model, loaded_tokenizer = load(model, dtype)
            tokenizer = tokenizer or loaded_tokenizer
        elif dtype is not None:
            raise ValueError(f"dtype: only for a path, a loaded model has its own ({model.dtype})")
        self.tokenizer = tokenizer
        self.model = PagedModel(model)
        if num_blocks is None and memory is None:
            memory = DEFAULT_MEMORY
        cache = self.model.new_cache(block_size, num_blocks=num_blocks, memory=memory)
        manager = PagedKVCacheManager(cache.num_blocks, block_size)
        self.engine = Engine(
            self.model,
            cache,
            manager,
            eos_token_ids=_eos_token_ids(model),
            max_model_len=max_model_len,
            max_batch_tokens=max_batch_tokens,
            max_num_seqs=max_num_seqs,
        )

    @property
    def cache_use(self) -> CacheUse:
        """How the cache was used so far, and what a contiguous cache would have taken."""
        return self.engine.cache_use

    def encode(self, prompt: str, *, chat: bool = False) -> list[int]:
        """Token ids of a text; `chat` wraps it as a user's message in the tokenizer's chat template.

        Raises:
            ValueError: there is no tokenizer, or it has no chat template.
        """
        if self.tokenizer is None:
            raise ValueError("prompt: expected token ids, since this model was given without a tokenizer")
        if not chat:
            return self.tokenizer(prompt).input_ids
        if not self.tokenizer.chat_template:
            raise ValueError("chat: this model's tokenizer has no chat template")
        message = {"role": "user", "content": prompt}
        return self.tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False)

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008 - frozen
    ) -> list[RequestOutput]:
        """Answers all prompts and returns their final outputs in the order of the prompts.

        Args:
            prompts: texts or lists of token ids; a single text stands for a list of one.
            params: for all prompts, or one for each.

        A prompt that can never run (empty, or longer than the context or the pool) has
        `finish_reason == REFUSED` and an `error`; the others are answered.
        """
        finished = [output for output in self.stream(prompts, params) if output.finished]
        return sorted(finished, key=lambda output: output.index)

    def stream(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008 - frozen
    ) -> Iterator[RequestOutput]:
        """Like `generate`, but yields an output for each new token of each prompt, as they come.

        Closing the iterator aborts what has not finished. Several streams may run at once: each step computes
        tokens for all of them, and a stream that is asked later tells several tokens in one output.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(
                f"params: expected one or {len(prompts)}, one for each prompt, got {len(params)}"
            )
        for prompt in prompts:
            if not isinstance(prompt, (str, Sequence)):
                raise TypeError(f"prompts: expected texts or lists of token ids, got {prompt!r} among them")
        ids = [self.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        return self._stream(ids, params)

    def _stream(
        self, prompts: list[Sequence[int]], params: Sequence[SamplingParams]
    ) -> Iterator[RequestOutput]:
        requests: list[Request] = []
        try:
            for ids, param in zip(prompts, params, strict=True):
                requests.append(self.engine.add_request(ids, param))
            told = [_Told(index, request, self.tokenizer) for index, request in enumerate(requests)]
            while told:
                # Whoever else works with the engine steps these requests too, so their state tells what is new.
                yield from [one.output() for one in told if one.has_news]
                told = [one for one in told if one.has_news or not one.request.finished]
                if told:
                    self.engine.step()
        finally:
            for request in requests:
                self.engine.abort(request)


class _Told:
    """What of a request has been told, and the text that its tokens make piece by piece."""

    def __init__(self, index: int, request: Request, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.request = request
        self._index = index
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._text = ""
        self._num_tokens = 0
        self._finished = False

    @property
    def has_news(self) -> bool:
        return self.request.num_new_tokens > self._num_tokens or self.request.finished != self._finished

    def output(self) -> RequestOutput:
        request, new_text = self.request, ""
        if self._detokenizer:
            for token in request.new_token_ids[self._num_tokens :]:
                new_text += self._detokenizer.push(token)
            if request.finished:
                new_text += self._detokenizer.flush()
        self._text += new_text
        self._num_tokens = request.num_new_tokens
        self._finished = request.finished
        return RequestOutput(
            index=self._index,
            prompt_ids=request.prompt_ids,
            token_ids=request.new_token_ids,
            text=self._text,
            new_text=new_text,
            finish_reason=request.finish_reason,
            error=request.error,
            num_preemptions=request.num_preemptions,
        )


def _eos_token_ids(model: PreTrainedModel) -> list[int]:
    """Where `model.generate` would stop."""
    eos = model.generation_config.eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
