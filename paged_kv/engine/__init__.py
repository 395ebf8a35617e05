"""A small engine that runs a transformers model out of a paged cache. One idea a file, from the outside in:

llm.py               text in, text out
engine.py            the loop: add requests, step
scheduler.py         which tokens are computed next, who is admitted, who is preempted
runner.py            packs a step and runs the model
sampler.py           from logits to tokens
request.py, sampling_params.py, detokenizer.py, loading.py, metrics.py   what these need
"""

from .engine import Engine
from .llm import LLM, RequestOutput
from .metrics import CacheUse
from .request import FinishReason, Request
from .sampling_params import SamplingParams

__all__ = ["LLM", "CacheUse", "Engine", "FinishReason", "Request", "RequestOutput", "SamplingParams"]
