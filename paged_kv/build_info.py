"""What was built, against what, and what of it is in use; and the loader of the native module."""

import importlib
import json
import platform
import sys
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

import torch

__all__ = ["BuildInfo", "build_info", "set_isa"]

_PACKAGE = Path(__file__).parent


def load_native(package: Path = _PACKAGE) -> tuple[ModuleType, dict]:
    """Imports `paged_kv._C`, which registers the ops, and returns it with the facts of `_build.json`.

    A library built against another torch may crash instead of failing, so the facts are checked first.

    Raises:
        ImportError: `paged_kv._C` is not built, or was built against another torch, or PAGED_KV_ISA names no
            instruction set that this machine supports.
    """
    if (package.parent / "setup.py").exists():
        mend = f"run `pip install --no-build-isolation -e {package.parent}`"
    else:
        mend = "run `pip install --no-build-isolation --no-deps --force-reinstall .` in its source folder"
    facts_file = package / "_build.json"
    parts = [facts_file, *(package / f"{name}{EXTENSION_SUFFIXES[0]}" for name in ("_C", "_manager"))]
    if not all(part.exists() for part in parts):
        raise ImportError(f"paged_kv._C is not built for Python {platform.python_version()}; {mend}")
    facts, running = json.loads(facts_file.read_text()), str(torch.__version__)
    if facts["torch"] != running:
        raise ImportError(f"paged_kv was built against torch {facts['torch']}, not torch {running}; {mend}")
    return importlib.import_module("paged_kv._C"), facts


def _is_command() -> bool:
    """Whether this process is `paged-kv`, or `python -m paged_kv`, whose name is "-m" until the package is imported."""
    name = sys.argv[0] if sys.argv else ""
    if name == "-m":
        return sys.orig_argv[-len(sys.argv)].removeprefix("-m") == "paged_kv"
    return Path(name).name == "paged-kv"


try:
    native, _facts = load_native()
except ImportError as error:
    if not _is_command():
        raise
    # As cli.py does, which cannot be imported without this.
    print(f"paged-kv: {error}", file=sys.stderr)
    raise SystemExit(2) from None


@dataclass(frozen=True)
class BuildInfo:
    """The answer of `build_info()`; `str()` gives it as the lines that `python -m paged_kv info` prints."""

    paged_kv: str
    torch: str  # built against and running: paged_kv refuses to load where they differ
    python_built: str
    python: str
    compiler: str
    isas_built: tuple[str, ...]  # instruction sets of the CPU kernels, weakest first
    isas_supported: tuple[str, ...]  # those of them that this machine can run
    isa: str  # the one in use
    cuda_archs: tuple[str, ...]
    cuda_reason: str  # why cuda_archs is empty, else ""

    def __str__(self) -> str:
        cuda = ", ".join(self.cuda_archs) or f"none: {self.cuda_reason}"
        lines = {
            "paged_kv": self.paged_kv,
            "torch": f"{self.torch} (built against and running)",
            "python": f"{self.python} (built with {self.python_built})",
            "compiler": self.compiler,
            "CPU ISAs built": ", ".join(self.isas_built),
            "CPU ISAs supported": ", ".join(self.isas_supported),
            "CPU ISA in use": f"{self.isa} (PAGED_KV_ISA or paged_kv.set_isa chooses another)",
            "CUDA archs built": cuda,
        }
        width = max(map(len, lines)) + 1
        return "\n".join(f"{name + ':':<{width}} {value}" for name, value in lines.items())


def build_info() -> BuildInfo:
    """Returns versions, compiler, CPU instruction sets (built, supported, in use) and CUDA architectures."""
    from . import __version__

    return BuildInfo(
        paged_kv=__version__,
        torch=_facts["torch"],
        python_built=_facts["python"],
        python=platform.python_version(),
        compiler=_facts["compiler"],
        isas_built=tuple(native.isas_built()),
        isas_supported=tuple(native.isas_supported()),
        isa=native.isa_in_use(),
        cuda_archs=tuple(_facts["cuda_archs"]),
        cuda_reason=_facts["cuda_reason"],
    )


def set_isa(name: str) -> None:
    """Chooses the instruction set of the CPU kernels for all later calls, in all threads.

    The environment variable PAGED_KV_ISA does the same when paged_kv is imported; without either, the
    strongest one that this machine supports is used. Two of them may differ in the last bits of a result.

    Args:
        name: one of `build_info().isas_supported`.

    Raises:
        ValueError: not built, or not supported by this machine; the message lists those that can be chosen.
        TypeError: not a text.
    """
    if not isinstance(name, str):
        raise TypeError(f"name: expected the name of an instruction set, got {name!r}")
    native.set_isa(name)
