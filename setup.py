"""Runs CMakeLists.txt, the only description of the native build, for setuptools; metadata: pyproject.toml."""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
TOOLS = ROOT / "build" / "tools"
BYTES_PER_JOB = 1 << 30  # the bindings, which include torch's headers, peak at 0.6 GiB
CGROUP = Path("/sys/fs/cgroup")


class CMakeBuild(build_ext):
    """Builds incrementally in build/cmake-<python>, whatever temporary folder pip or setuptools would use.

    PAGED_KV_BUILD names another folder under build/, so that builds for two environments keep their objects.
    """

    def run(self) -> None:
        package = ROOT / "paged_kv" if self.inplace else Path(self.build_lib).resolve() / "paged_kv"
        build = ROOT / "build" / os.environ.get("PAGED_KV_BUILD", f"cmake-{sys.implementation.cache_tag}")
        cmake, ninja = find_build_tools()
        configure = ["-S", ROOT, "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        configure += [f"-DPYTHON={sys.executable}", *os.environ.get("CMAKE_ARGS", "").split()]
        forget_other_arguments(build, "\n".join(map(str, configure)))
        run(cmake, *configure)
        run(cmake, "--build", build, "--parallel", compile_jobs())
        run(cmake, "--install", build, "--prefix", package)

    def get_outputs(self) -> list[str]:
        package = Path(self.build_lib) / "paged_kv"
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        return [str(package / name) for name in (f"_C{suffix}", f"_manager{suffix}", "_build.json")]


def forget_other_arguments(build: Path, arguments: str) -> None:
    """Drops CMake's cache where it holds the options of an earlier build, or another folder; objects stay."""
    build.mkdir(parents=True, exist_ok=True)
    record = build / "arguments.txt"
    if not record.exists() or record.read_text() != arguments:
        (build / "CMakeCache.txt").unlink(missing_ok=True)
        record.write_text(arguments)


def run(*command: object) -> None:
    result = subprocess.run([str(part) for part in command], check=False)
    if result.returncode:
        sys.exit(f"paged_kv: `{command[0]}` failed with exit code {result.returncode}, see above")


def require_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        sys.exit(
            "paged_kv is compiled against the torch that you have installed, which a build in isolation "
            "cannot see: run `pip install torch` if you have none, then `pip install --no-build-isolation .`"
        )


def find_build_tools() -> tuple[str, str]:
    """Returns cmake and ninja, and sees to pybind11; what is missing goes to build/tools.

    With --no-build-isolation pip installs no build requirement, and the environment is not ours to change.
    """
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TOOLS), os.environ.get("PYTHONPATH")]))
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", ""), str(TOOLS / "bin")])

    def found() -> dict[str, object]:
        has_pybind11 = importlib.util.find_spec("pybind11") or (TOOLS / "pybind11").exists()
        tools = {name: shutil.which(name, path=path) for name in ("cmake", "ninja")}
        return {**tools, "pybind11": has_pybind11}

    if missing := [name for name, tool in found().items() if not tool]:
        run(sys.executable, "-m", "pip", "install", "--quiet", "--target", TOOLS, *missing)
    tools = found()
    return str(tools["cmake"]), str(tools["ninja"])


def compile_jobs() -> int:
    """MAX_JOBS, else as many as there are cores and memory for."""
    if jobs := os.environ.get("MAX_JOBS"):
        return max(1, int(jobs))
    return max(1, min(len(os.sched_getaffinity(0)), available_memory() // BYTES_PER_JOB))


def available_memory() -> int:
    """Bytes that the machine has to spare, or the container where it is limited to less."""
    meminfo = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable:"))
    limit, used = CGROUP / "memory.max", CGROUP / "memory.current"
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return available


if not {"egg_info", "sdist"} & set(sys.argv):  # these two need no torch; all others say so before any work
    require_torch()
setup(
    ext_modules=[Extension("paged_kv._C", sources=[]), Extension("paged_kv._manager", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
