"""PagedAttention for PyTorch: block-table attention ops, a block manager and a small engine."""

__version__ = "0.1.0"

from .build_info import BuildInfo, build_info, set_isa
from .errors import OutOfBlocksError, PagedKVError
from .manager import Admission, AdmissionStatus, PagedKVCacheManager

__all__ = [
    "Admission",
    "AdmissionStatus",
    "BuildInfo",
    "OutOfBlocksError",
    "PagedKVCacheManager",
    "PagedKVError",
    "build_info",
    "set_isa",
]
