"""Runs CMakeLists.txt, the only description of the native build, for setuptools; metadata: pyproject.toml."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
GIB = 1 << 30
BYTES_PER_JOB = 3 * GIB // 2  # the bindings, which include torch's headers, take the most


class CMakeBuild(build_ext):
    """Builds incrementally in build/cmake-<python>, whatever temporary folder pip or setuptools would use."""

    def run(self) -> None:
        package = ROOT / "paged_kv" if self.inplace else Path(self.build_lib).resolve() / "paged_kv"
        build = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
        cmake, ninja = find_tool("cmake"), find_tool("ninja")
        cache = build / "CMakeCache.txt"
        if cache.exists() and f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}\n" not in cache.read_text():
            shutil.rmtree(build)  # the folder was moved or copied here, and CMake would refuse it
        configure = ["-S", ROOT, "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        run(cmake, *configure, f"-DPYTHON={sys.executable}", *os.environ.get("CMAKE_ARGS", "").split())
        run(cmake, "--build", build, "--parallel", compile_jobs())
        run(cmake, "--install", build, "--prefix", package)

    def get_outputs(self) -> list[str]:
        package = Path(self.build_lib) / "paged_kv"
        return [str(package / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"), str(package / "_build.json")]


def run(*command: object) -> None:
    result = subprocess.run([str(part) for part in command], check=False)
    if result.returncode:
        sys.exit(f"paged_kv: `{command[0]}` failed with exit code {result.returncode}, see above")


def find_tool(name: str) -> str:
    """The tool that pip put beside this interpreter, else the one on PATH."""
    scripts = sysconfig.get_path("scripts")
    path = shutil.which(name, path=scripts) or shutil.which(name)
    if path is None:
        sys.exit(f"paged_kv needs {name} to build: run `pip install cmake ninja pybind11` and try again.")
    return path


def compile_jobs() -> int:
    if jobs := os.environ.get("MAX_JOBS"):
        return max(1, int(jobs))
    return max(1, min(len(os.sched_getaffinity(0)), available_memory() // BYTES_PER_JOB))


def available_memory() -> int:
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


setup(ext_modules=[Extension("paged_kv._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
