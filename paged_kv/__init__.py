"""PagedAttention for PyTorch: block-table attention ops, a block manager and a small engine."""

__version__ = "0.1.0"

from importlib import import_module

from . import ops
from .build_info import BuildInfo, build_info, set_isa
from .cache import LayerCache, PagedKVCache
from .errors import OutOfBlocksError, PagedKVError
from .manager import Admission, AdmissionStatus, PagedKVCacheManager

__all__ = [
    "Admission",
    "AdmissionStatus",
    "BuildInfo",
    "LayerCache",
    "OutOfBlocksError",
    "PagedKVCache",
    "PagedKVCacheManager",
    "PagedKVError",
    "build_info",
    "ops",
    "set_isa",
]

# Name -> its module, imported when first asked for, so that `import paged_kv` needs torch and numpy alone.
_LAZY: dict[str, str] = {}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name], __name__), name)
    globals()[name] = value
    return value
