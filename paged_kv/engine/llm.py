"""Text in, text out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .._arguments import check_choice, check_flag, check_instance, check_integer, check_token_ids, is_row
from ..cache import FLOATS, MAX_BLOCK_SIZE, QUANTISED
from ..integrations.loading import load
from ..integrations.transformers import PagedModel, check_cache_dtype, is_model
from ..interrupts import interrupts_wait
from ..manager import PagedKVCacheManager
from .engine import Engine
from .metrics import CacheUse, EngineMetrics
from .request import FinishReason, Request
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["LLM", "Completion", "RequestOutput", "Teller", "check_options"]

DEFAULT_MEMORY = 1 << 30  # about 23,000 tokens of a model of 135 million parameters in float32


@dataclass(frozen=True)
class Completion:
    """One answer to a prompt, as far as it has got."""

    token_ids: list[int]  # all new tokens so far, the stop token included
    text: str  # theirs, without special tokens, up to a stop text; empty without a tokenizer
    new_text: str  # the end of `text` that this output adds to the one before
    finish_reason: FinishReason | None  # None while it runs
    logprobs: list[dict[int, float]]  # of each new token: its own and those of the likeliest, if asked for
    # What answers were compared by: a beam's score, or a sample's mean log-probability; else None.
    score: float | None


@dataclass(frozen=True)
class RequestOutput:
    """Where one prompt has got to."""

    index: int  # which of the prompts
    prompt_ids: list[int]
    completions: list[Completion]  # n of them; where they are compared, empty until the end, the best first
    error: str | None  # why it was refused, or what went wrong
    finished: bool
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    num_preemptions: int

    @property
    def token_ids(self) -> list[int]:
        """New tokens of the first completion."""
        return self.completions[0].token_ids if self.completions else []

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.completions[0].text if self.completions else ""

    @property
    def new_text(self) -> str:
        """What this output adds to the first completion's text."""
        return self.completions[0].new_text if self.completions else ""

    @property
    def finish_reason(self) -> FinishReason | None:
        """Of the first completion."""
        return self.completions[0].finish_reason if self.completions else None


class LLM:
    """A transformers model that answers many prompts at once out of one paged cache.

    Args:
        model: a loaded model, the path of a folder written by `save_pretrained`, or the path of a GGUF file.
        tokenizer: for a loaded model; without one, prompts are token ids and outputs have no text.
        dtype: of the weights where a path is loaded; None for the one they are stored in (float32 for GGUF).
        cache_dtype: of keys and values: the model's own by default, or quantised: torch.int8,
            torch.float8_e4m3fn or torch.float8_e5m2, with a scale for each token and head.
        block_size: slots in a block.
        num_blocks, memory: size of the pool, in blocks or in bytes; 1 GiB where neither is given.
        num_host_blocks: blocks on the host that preempted requests are swapped to; without room there, they
            are computed again.
        compile: let torch compile the model's forward; the first steps take minutes then.
        pack_weights: multiply by copies of the weights in the layout that oneDNN reads, on a CPU: decode is faster, and
            the weights take their memory twice. It changes the model's linear layers. Not with `compile`.
        prefix_cache: let prompts start with what earlier requests computed for the same beginning.
        max_model_len, max_batch_tokens, max_num_seqs: see Engine.

    Attributes:
        metrics: latencies, and totals of what was done.
        cache_use: how the cache was used so far, and what a contiguous cache would have taken.
        engine: what computes.

    Raises:
        UnsupportedModelError: the model cannot run on a paged cache.
        ValueError, TypeError: an argument is out of range or of another type; the message names it.
        FileNotFoundError, ImportError: see `paged_kv.integrations.loading.load`.

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
        cache_dtype: torch.dtype | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        memory: int | None = None,
        num_host_blocks: int = 0,
        compile: bool = False,
        pack_weights: bool = False,
        prefix_cache: bool = True,
        max_model_len: int | None = None,
        max_batch_tokens: int = 512,
        max_num_seqs: int = 64,
    ) -> None:
        from_path = isinstance(model, (str, Path))
        if not from_path and not is_model(model):
            got = type(model).__name__
            raise TypeError(f"model: expected a model of transformers, or the path of one, got {got}")
        if tokenizer is not None and not callable(tokenizer):
            raise TypeError(f"tokenizer: expected a tokenizer of transformers or None, got {tokenizer!r}")
        check_options(
            dtype=dtype,
            cache_dtype=cache_dtype,
            block_size=block_size,
            num_blocks=num_blocks,
            memory=memory,
            num_host_blocks=num_host_blocks,
            compile=compile,
            pack_weights=pack_weights,
            prefix_cache=prefix_cache,
            max_model_len=max_model_len,
            max_batch_tokens=max_batch_tokens,
            max_num_seqs=max_num_seqs,
        )
        if not from_path and dtype is not None:
            raise ValueError(
                f"dtype: expected None for a loaded model, which has its own ({model.dtype}), got {dtype}"
            )
        if from_path:
            model, loaded_tokenizer = load(model, dtype)
            tokenizer = tokenizer or loaded_tokenizer
        self.tokenizer = tokenizer
        self.model = PagedModel(model)
        check_cache_dtype("cache_dtype", cache_dtype, self.model.layers[0].dtype)
        if num_blocks is None and memory is None:
            memory = DEFAULT_MEMORY
        cache = self.model.new_cache(block_size, num_blocks=num_blocks, memory=memory, dtype=cache_dtype)
        manager = PagedKVCacheManager(
            cache.num_blocks,
            block_size,
            prefix_cache=prefix_cache,
            identity=f"{self.model.config.name_or_path} {self.model.layers[0].dtype} {cache.dtype}",
            num_host_blocks=num_host_blocks,
        )
        self.engine = Engine(
            self.model,
            cache,
            manager,
            host_cache=cache.like(num_host_blocks) if num_host_blocks else None,
            eos_token_ids=_eos_token_ids(model),
            tokenizer=tokenizer,
            max_model_len=max_model_len,
            max_batch_tokens=max_batch_tokens,
            max_num_seqs=max_num_seqs,
        )
        if pack_weights:  # it changes the model, so nothing may go wrong from here on
            self.model.pack_weights()
        if compile:
            self.model.compile()
        self.cache_use: CacheUse = self.engine.cache_use
        self.metrics: EngineMetrics = self.engine.metrics

    def encode(self, prompt: str | Sequence[dict[str, str]], *, chat: bool = False) -> list[int]:
        """Token ids of a text; `chat` wraps it as a user's message in the tokenizer's chat template.

        A conversation so far, messages with "role" and "content", is wrapped likewise; what of it was computed for an
        earlier turn is in the prefix cache.

        Raises:
            ValueError: there is no tokenizer, or it has no chat template; there is no message, or one lacks a text.
            TypeError: it is neither a text nor messages of texts.
        """
        check_flag("chat", chat)
        if not isinstance(prompt, str):
            _check_messages("prompt", prompt)
        if self.tokenizer is None:
            expected = "token ids, since this model was given without a tokenizer"
            raise ValueError(f"prompt: expected {expected}, got {prompt!r}")
        if isinstance(prompt, str) and not chat:
            return self.tokenizer(prompt).input_ids
        if not self.tokenizer.chat_template:
            name, expected, got = ("chat", "False", chat) if chat else ("prompt", "a text", prompt)
            raise ValueError(
                f"{name}: expected {expected}, since this model's tokenizer has no chat template, got {got!r}"
            )
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008 - frozen
        *,
        priority: int = 0,
        salt: str | None = None,
    ) -> list[RequestOutput]:
        """Answers all prompts and returns their final outputs in the order of the prompts.

        Args:
            prompts: texts or lists of token ids; a single text stands for a list of one.
            params: for all prompts, or one for each.
            priority, salt: of all these prompts; see `Engine.add_request`.

        A prompt that can never run (empty, or longer than the context or the pool) has
        `finish_reason == REFUSED` and an `error`; the others are answered.
        """
        outputs = self.stream(prompts, params, priority=priority, salt=salt)
        return sorted((output for output in outputs if output.finished), key=lambda output: output.index)

    def stream(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008 - frozen
        *,
        priority: int = 0,
        salt: str | None = None,
    ) -> Iterator[RequestOutput]:
        """Like `generate`, but yields an output for each new token of each prompt, as they come.

        Closing the iterator aborts what has not finished. Several streams may run at once: each step computes
        tokens for all of them, and a stream that is asked later tells several tokens in one output.
        """
        expected = "prompts: expected texts or lists of token ids"
        if not isinstance(prompts, str) and not is_row(prompts):
            raise TypeError(f"{expected}, got {prompts!r}")
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        if not isinstance(params, Sequence) or not is_row(params):
            raise TypeError(f"params: expected SamplingParams, or a list of them, got {params!r}")
        if len(params) != len(prompts):
            raise ValueError(
                f"params: expected one or {len(prompts)}, one for each prompt, got {len(params)}"
            )
        for place, param in enumerate(params):
            check_instance(f"params[{place}]", param, SamplingParams)
        for prompt in prompts:
            if not isinstance(prompt, str) and not is_row(prompt):
                raise TypeError(f"{expected}, got {prompt!r} among them")
        ids = [
            self.encode(prompt) if isinstance(prompt, str) else check_token_ids(f"prompts[{place}]", prompt)
            for place, prompt in enumerate(prompts)
        ]

        def outputs() -> Iterator[RequestOutput]:
            requests: list[Request] = []
            try:
                for prompt_ids, param in zip(ids, params, strict=True):
                    with interrupts_wait():
                        request = self.engine.add_request(prompt_ids, param, priority=priority, salt=salt)
                        requests.append(request)
                tellers = [Teller(request, index) for index, request in enumerate(requests)]
                while tellers:
                    # Whoever else works with the engine steps these requests too, so their state tells what is new.
                    yield from [teller.output() for teller in tellers if teller.has_news]
                    tellers = [one for one in tellers if one.has_news or not one.request.finished]
                    if tellers:
                        self.engine.step()
            finally:
                with interrupts_wait():
                    for request in requests:
                        self.engine.abort(request)

        return outputs()


class Teller:
    """What of a request has been told, and what is new."""

    def __init__(self, request: Request, index: int = 0) -> None:
        self.request = request
        self._index = index
        self._told = (-1, False)
        self._text_lens = [0] * request.params.n

    @property
    def _state(self) -> tuple[int, bool]:
        request = self.request
        if request.compares and not request.finished:
            return 0, False
        return sum(sequence.num_new_tokens for sequence in request.completions), request.finished

    @property
    def has_news(self) -> bool:
        return self._state not in (self._told, (0, False))

    def output(self) -> RequestOutput:
        """How things stand; from now on this is told."""
        request, completions = self.request, []
        self._told = self._state
        for place, sequence in enumerate(request.completions if any(self._told) else ()):
            text, told, self._text_lens[place] = sequence.text, self._text_lens[place], len(sequence.text)
            tokens, logprobs = sequence.new_token_ids, list(sequence.logprobs)
            score = request.score(sequence)
            completions.append(Completion(tokens, text, text[told:], sequence.finish_reason, logprobs, score))
        return RequestOutput(
            self._index,
            request.prompt_ids,
            completions,
            request.error,
            request.finished,
            request.num_cached_tokens,
            request.num_preemptions,
        )


def check_options(**options: object) -> None:
    """Raises ValueError or TypeError where those of the options of `LLM` that are given are wrong whatever the model:
    loading it takes long."""
    for name, optional, low, high in (
        ("block_size", False, 1, MAX_BLOCK_SIZE),
        ("num_blocks", True, 1, None),
        ("memory", True, 1, None),
        ("num_host_blocks", False, 0, None),
        ("max_model_len", True, 2, None),
        ("max_batch_tokens", False, 1, None),
        ("max_num_seqs", False, 1, None),
    ):
        if name in options and not (optional and options[name] is None):
            check_integer(name, options[name], low, high)
    for name, choices in (("dtype", FLOATS), ("cache_dtype", (*FLOATS, *QUANTISED))):
        if name in options:
            check_choice(name, options[name], (*choices, None))
    for name in ("compile", "pack_weights", "prefix_cache"):
        if name in options:
            check_flag(name, options[name])
    given = {name for name, value in options.items() if value is not None and value is not False}
    if {"num_blocks", "memory"} <= given:
        raise ValueError("num_blocks, memory: expected one of them, got both")
    if {"pack_weights", "compile"} <= given:
        raise ValueError("pack_weights: expected False with compile, got True")
    if {"pack_weights", "dtype"} <= given and options["dtype"] != torch.float32:
        got = str(options["dtype"]).removeprefix("torch.")
        raise ValueError(f"pack_weights: expected weights in float32, got {got}")
    if {"dtype", "cache_dtype"} <= given:
        check_cache_dtype("cache_dtype", options["cache_dtype"], options["dtype"])


def _check_messages(name: str, messages: object) -> None:
    if not isinstance(messages, Sequence) or not is_row(messages):
        raise TypeError(f"{name}: expected a text or a list of messages, got {messages!r}")
    if not messages:
        raise ValueError(f"{name}: expected a text or a list of one message or more, got {messages!r}")
    for place, message in enumerate(messages):
        is_dict, keys = isinstance(message, Mapping), ("role", "content")
        if not (is_dict and all(isinstance(message.get(key), str) for key in keys)):
            lacks = is_dict and any(key not in message for key in keys)
            raise (ValueError if lacks else TypeError)(
                f"{name}[{place}]: expected a dict with texts for 'role' and 'content', got {message!r}"
            )


def _eos_token_ids(model: PreTrainedModel) -> list[int]:
    """Where `model.generate` would stop."""
    eos = model.generation_config.eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
