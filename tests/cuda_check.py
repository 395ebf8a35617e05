"""Compiles every CUDA kernel for real architectures and reads what came out: ``make cuda-check``.

Fails where a kernel spills registers or keeps a stack frame, or lacks the instructions that it is written for.
Prints, for each kernel and architecture, registers, shared memory and how many blocks fit on a multiprocessor.
No GPU is needed, and no PyTorch.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))


@dataclass(frozen=True)
class Limits:
    """Of a multiprocessor: CUDA C++ Programming Guide, "Compute Capabilities"; 65,536 registers on each."""

    threads: int = 2048
    blocks: int = 32
    shared_kib: int = 228


ARCHS = {"80": Limits(shared_kib=164), "90a": Limits(), "100a": Limits()}
REGISTERS, WARP, REGISTER_UNIT, RESERVED_SHARED = 65536, 32, 256, 1024

# A pattern of demangled kernel names, and patterns of machine instructions that each of them must hold.
EXPECTED = [
    (r"tensor_kernel_of<", [r"HMMA\.16816", r"LDGSTS\.E\S*\.128", r"LDSM\.16\.MT?88", r"LDG\.E\S*\.128"]),
    (r"vector_kernel_of<.*VectorTraits<float, 4", [r"LDG\.E\S*\.128"]),
    (r"vector_kernel_of<.*VectorTraits<__(half|nv_bfloat16), 4", [r"LDG\.E\S*\.64"]),
    (r"::copy_kernel<uint4>", [r"LDG\.E\S*\.128", r"STG\.E\S*\.128"]),
    (r"copy_blocks_kernel", [r"LDG\.E\S*\.128", r"STG\.E\S*\.128"]),
    (r"gather_kernel<unsigned \w+, false, (4|8|16)>", [r"LDG\.E\S*\.128", r"STG\.E\S*\.128"]),
]


@dataclass
class Kernel:
    name: str  # demangled
    registers: int
    stack: int
    spills: int
    threads: int
    instructions: list[str] = field(default_factory=list)  # opcodes with their modifiers

    @property
    def short_name(self) -> str:
        name = re.sub(r"paged_kv::(?:cuda::)?|\(anonymous namespace\)::|^void ", "", self.name)
        return name.rsplit("(", 1)[0]

    @property
    def shared_bytes(self) -> int:
        """Kernels with shared memory have its size as their last template argument."""
        found = re.search(r"_kernel_of<.*, (\d+)ul>\(", self.name)
        return int(found.group(1)) if found else 0

    def blocks_per_multiprocessor(self, limits: Limits) -> int:
        per_warp = -(-self.registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
        by_registers = REGISTERS // per_warp // (self.threads // WARP)
        by_shared = limits.shared_kib * 1024 // (self.shared_bytes + RESERVED_SHARED)
        return min(by_registers, by_shared, limits.threads // self.threads, limits.blocks)

    def faults(self) -> list[str]:
        faults = []
        if self.stack or self.spills:
            faults.append(f"{self.stack} bytes of stack frame, {self.spills} bytes spilled")
        for pattern, instructions in EXPECTED:
            if re.search(pattern, self.name):
                faults += [f"no instruction {i}" for i in instructions if not self.has_instruction(i)]
        return faults

    def has_instruction(self, pattern: str) -> bool:
        return any(re.match(pattern, instruction) for instruction in self.instructions)


def find_tool(name: str, *folders: str | None) -> str:
    candidates = [Path(folder) / "bin" / name for folder in folders if folder]
    found = next((str(c) for c in candidates if os.access(c, os.X_OK)), None) or shutil.which(name)
    if found is None:
        sys.exit(f"cuda-check: {name} not found; give its folder with --tools")
    return found


def run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"cuda-check: {' '.join(command)}\n{result.stdout}{result.stderr}")
    return result.stdout + result.stderr


def compile_source(tools: dict[str, str], source: Path, arch: str, folder: Path) -> list[Kernel]:
    folder = folder / f"{source.stem}-{arch}"
    folder.mkdir()
    cubin = folder / "kernels.cubin"
    flags = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", f"-I{ROOT / 'csrc'}", f"-arch=sm_{arch}"]
    log = run(
        tools["nvcc"],
        *flags,
        "-Xptxas=-v",
        "-cubin",
        "--keep",
        f"--keep-dir={folder}",
        "-o",
        str(cubin),
        str(source),
    )
    ptx = next(folder.glob("*.ptx")).read_text()
    threads = dict(re.findall(r"\.entry (\w+)\([^)]*\)\s*(?:\.\w+ [^.{]*)*?\.maxntid (\d+)", ptx))
    report = re.compile(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers",
        re.DOTALL,
    )
    kernels = {
        mangled: Kernel(mangled, int(registers), int(stack), int(stores) + int(loads), int(threads[mangled]))
        for mangled, stack, stores, loads, registers in report.findall(log)
    }
    if not kernels:
        return []
    current = None
    for line in run(tools["cuobjdump"], "-sass", str(cubin)).splitlines():
        if function := re.match(r"\s*Function : (\w+)", line):
            current = kernels.get(function.group(1))
        elif current and (instruction := re.match(r"\s*/\*\w+\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", line)):
            current.instructions.append(instruction.group(1))
    names = run(tools["c++filt"], *kernels).splitlines()
    for kernel, name in zip(kernels.values(), names, strict=True):
        kernel.name = name
    return list(kernels.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", action="append", choices=ARCHS, help="default: all")
    parser.add_argument(
        "--tools", default=os.environ.get("CUDA_TOOLS"), help="folder whose bin/ has cuobjdump, nvdisasm"
    )
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()

    toolkit = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    tools = {
        name: find_tool(name, toolkit, arguments.tools)
        for name in ("nvcc", "cuobjdump", "nvdisasm", "c++filt")
    }
    os.environ["PATH"] = os.pathsep.join([str(Path(tools["nvdisasm"]).parent), os.environ["PATH"]])
    archs = arguments.arch or list(ARCHS)
    faults = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        jobs = {
            (arch, source): pool.submit(compile_source, tools, source, arch, Path(folder))
            for source in sorted(SOURCES, key=lambda s: "tensor" not in s.name)  # the longest first
            for arch in archs
        }
        print(f"{'arch':>5} {'registers':>9} {'shared':>7} {'threads':>7} {'blocks/SM':>9}  kernel")
        for (arch, _), job in jobs.items():
            for kernel in job.result():
                blocks = kernel.blocks_per_multiprocessor(ARCHS[arch])
                print(
                    f"{arch:>5} {kernel.registers:>9} {kernel.shared_bytes:>7} {kernel.threads:>7} {blocks:>9}  "
                    f"{kernel.short_name}",
                    flush=True,
                )
                faults += [f"sm_{arch} {kernel.short_name}: {fault}" for fault in kernel.faults()]
        names = {kernel.name for job in jobs.values() for kernel in job.result()}
    for pattern, _ in EXPECTED:
        if not any(re.search(pattern, name) for name in names):
            faults.append(f"no kernel is called {pattern}")
    for fault in faults:
        print(f"cuda-check: {fault}", file=sys.stderr)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
