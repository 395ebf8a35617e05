"""PagedAttention for PyTorch: block-table attention ops, a block manager and a small engine."""

__version__ = "0.1.0"

from . import ops
from .build_info import BuildInfo, build_info, set_isa
from .cache import LayerCache, PagedKVCache
from .engine import LLM, RequestOutput, SamplingParams
from .errors import OutOfBlocksError, PagedKVError, UnsupportedModelError
from .interrupts import interrupts_wait
from .manager import Admission, AdmissionStatus, PagedKVCacheManager

__all__ = [
    "LLM",
    "Admission",
    "AdmissionStatus",
    "BuildInfo",
    "LayerCache",
    "OutOfBlocksError",
    "PagedKVCache",
    "PagedKVCacheManager",
    "PagedKVError",
    "RequestOutput",
    "SamplingParams",
    "UnsupportedModelError",
    "build_info",
    "interrupts_wait",
    "ops",
    "set_isa",
]
