"""A small engine that runs a transformers model out of a paged cache. One idea a file, from the outside in:

llm.py               text in, text out
async_engine.py      the same for asyncio
engine.py            the loop: add requests, step
scheduler.py         which tokens are computed next, who is admitted, who is preempted
runner.py            packs a step and runs the model
sampler.py           from logits to tokens
beams.py, drafts.py  beam search; guesses from the text itself
request.py           a request and the sequences that answer it
sampling_params.py, detokenizer.py   what these need
metrics.py, tracing.py   what was done, in figures and as a picture
"""

from .async_engine import AsyncEngine
from .engine import Engine
from .llm import LLM, Completion, RequestOutput
from .metrics import CacheUse, EngineMetrics
from .request import FinishReason, Request
from .sampling_params import SamplingParams
from .tracing import StepTrace

__all__ = [
    "LLM",
    "AsyncEngine",
    "CacheUse",
    "Completion",
    "Engine",
    "EngineMetrics",
    "FinishReason",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "StepTrace",
]
