"""Puts faults into the CUDA kernels, one at a time, and asks the tests to find each: ``make cuda-faults``.

A fault is a replacement in one source file, with the test of tests/test_cuda_checked.py that must fail. The kernels are
compiled and linked anew for each fault; the other objects are those of the last build.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
CHECKED = "paged_kv_cuda_checked"


@dataclass(frozen=True)
class Fault:
    name: str
    file: str  # in csrc/cuda
    old: str
    new: str
    test: str  # pytest's -k
    kernel: str = ""  # the source to compile, where `file` is a header


TENSOR, VECTOR = "attention_tensor.cu", "attention_vector.cu"
FAULTS = [
    Fault(
        "no barrier before a tile is used",
        TENSOR,
        "    __syncthreads();  // this tile is here",
        "    // this tile is here",
        "prefill",
    ),
    Fault(
        "waits for one tile too few",
        TENSOR,
        "cp_async_wait<kStages - 2>",
        "cp_async_wait<kStages - 1>",
        "prefill",
    ),
    Fault(
        "no barrier before shared memory is used anew",
        TENSOR,
        "cp_async_wait<0>();\n  __syncthreads();",
        "cp_async_wait<0>();",
        "prefill",
    ),
    Fault(
        "no barrier before rows are merged",
        TENSOR,
        "  __syncthreads();\n  store_rows(",
        "  store_rows(",
        "decode",
    ),
    Fault(
        "no barrier after values were cleared",
        TENSOR,
        "      left_out = true;\n      __syncthreads();",
        "      left_out = true;",
        "broken",
    ),
    Fault("NaN is not looked for", TENSOR, "if (is_mixed && ", "if (false && ", "broken"),
    Fault("reads one key too many", TENSOR, "key < work.end_key; };", "key <= work.end_key; };", "decode"),
    Fault("the sums are not rescaled", TENSOR, "w.out[block][2 * r + 1] *= rescale;", "", "prefill"),
    Fault(
        "key scales of the wrong keys",
        TENSOR,
        "stage.k_scale[first_key + key - first]",
        "stage.k_scale[key - first]",
        "quantised",
    ),
    Fault(
        "key fragments in the wrong order",
        "fragments.cuh",
        "2 * number, lane / 8 % 2)",
        "2 * number, lane / 16)",
        "prefill",
        TENSOR,
    ),
    Fault(
        "value fragments exchanged",
        "fragments.cuh",
        "b[2 * i][1] = r[1];",
        "b[2 * i][1] = r[2];",
        "prefill",
        TENSOR,
    ),
    Fault("bytes of a value pair exchanged", "fragments.cuh", "0x3120", "0x3210", "quantised", TENSOR),
    Fault("e4m3 loses its bias", "fragments.cuh", "0x5c005c00u", "0x58005800u", "quantised", TENSOR),
    Fault(
        "the row's own key is hidden",
        "attention.cuh",
        "key <= (p.causal ? position",
        "key < (p.causal ? position",
        "prefill",
        TENSOR,
    ),
    Fault(
        "the window is one key too long",
        "attention.cuh",
        "key > position - p.window_keys",
        "key >= position - p.window_keys",
        "window",
        TENSOR,
    ),
    Fault(
        "splits overlap",
        "attention.cuh",
        "work.first_key + kSplitKeys;",
        "work.first_key + kSplitKeys + 1;",
        "decode",
        TENSOR,
    ),
    Fault(
        "the tile's description is not waited for",
        "attention.cuh",
        "shared = work;\n    __syncthreads();",
        "shared = work;",
        "decode",
        TENSOR,
    ),
    Fault(
        "a tile overwrites the one before it",
        "attention.cuh",
        "if (number > 0) __syncthreads();",
        "",
        "many_heads",
        TENSOR,
    ),
    Fault(
        "the sink is not in the sum",
        "attention.cuh",
        "state.d += expf(*sink - state.base());",
        "",
        "sinks",
        TENSOR,
    ),
    Fault(
        "a weight that is rounded to zero makes NaN of infinity",
        "attention.cuh",
        "is_nan = sum != sum && ",
        "is_nan = false && ",
        "infinity",
        TENSOR,
    ),
    Fault(
        "the scale of an infinite value is ignored", "attention.cuh", " * v_scale;", ";", "infinity", VECTOR
    ),
    Fault(
        "a score of minus infinity weighs more than zero",
        "attention.cuh",
        "weighs_zero ? NAN : ",
        "",
        "infinity",
        TENSOR,
    ),
    Fault(
        "scales of NaN are not looked for",
        TENSOR,
        "!is_finite(stage.v_scale[thread]);",
        "false;",
        "broken_scales",
    ),
    Fault(
        "a split's weight is rounded to zero",
        "softmax.cuh",
        "ptx::max_or_nan(y, 0x1p-126f)",
        "y",
        "infinity",
        "attention_merge.cu",
    ),
    Fault(
        "light tokens beside a heavy one are lost",
        TENSOR,
        "std::is_same_v<T, __half> ? 15 : 0",
        "0",
        "light_tokens",
    ),
    Fault(
        "32-bit offsets",
        "views.cuh",
        "block * cache.stride_block + head",
        "static_cast<int>(block * cache.stride_block) + head",
        "far_blocks",
        VECTOR,
    ),
    Fault(
        "hidden values weigh zero instead of nothing",
        VECTOR,
        "if ((seen >> (r * kStep + j) & 1) == 0) continue;",
        "",
        "broken_float32",
    ),
    Fault(
        "a lane's share of the sum is lost",
        VECTOR,
        "bits = kStep / 2; bits > 0; bits /= 2) state.d",
        "bits = kStep / 2; bits > 1; bits /= 2) state.d",
        "decode_float32",
    ),
    Fault(
        "the last split is not merged",
        "attention_merge.cu",
        "num_splits; ++i) {\n    const SoftmaxState state",
        "num_splits - 1; ++i) {\n    const SoftmaxState state",
        "decode",
    ),
    Fault(
        "a skipped token is written",
        "reshape_and_cache.cu",
        "if (slot < 0) return",
        "if (slot < -1) return",
        "cache_ops",
    ),
    Fault(
        "one lane's largest is not seen",
        "reshape_and_cache.cu",
        "bits = kWarpSize / 2; bits > 0",
        "bits = kWarpSize / 2; bits > 1",
        "cache_ops",
    ),
    Fault(
        "a token falls into the sequence before",
        "prefix_search.cuh",
        "start + end > index",
        "start + end >= index",
        "cache_ops",
        "gather_kv.cu",
    ),
    Fault(
        "a block's last access is lost",
        "copy_blocks.cu",
        "if (access >= t.num_accesses) break;",
        "if (access + 1 >= t.num_accesses) break;",
        "cache_ops",
    ),
    Fault(
        "the empty state wins",
        "merge_attention_states.cu",
        "out[d] = a_is_empty   ? out_b[d]",
        "out[d] = a_is_empty   ? out_a[d]",
        "merge",
    ),
]
# To compile in seconds: the instances of head sizes up to 64 of three dtypes, which the tests above use.
PRUNE = [
    ("  if (head_dim <= 128) return &kTensorKernel<TensorTraits<T, Cache, 128>>;\n", ""),
    ("return &kTensorKernel<TensorTraits<T, Cache, 256>>;", "return nullptr;"),
    ("return kernel_for<__half, Float8E5M2>(p.head_dim);", "return nullptr;"),
    ("return kernel_for<__half, int8_t>(p.head_dim);", "return nullptr;"),
]
UNPRUNED = "not reads_each_key"  # that test takes a head size of 128


def run(*command: object, **options: object) -> None:
    result = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, **options)
    if result.returncode:
        sys.exit(f"cuda-faults: {' '.join(map(str, command))}\n{result.stdout}{result.stderr}")


def replace_once(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    if text.count(old) != 1:
        sys.exit(f"cuda-faults: {path.name} holds {text.count(old)} times, not once: {old!r}")
    path.write_text(text.replace(old, new))


def build(fault: Fault | None, folder: Path, objects: dict[str, Path], headers: Path) -> None:
    """The checked library with the fault, in `folder`."""
    source = folder / "csrc"
    shutil.copytree(ROOT / "csrc", source)
    twins = ROOT / "tests" / "cuda_on_cpu"
    for old, new in PRUNE:
        replace_once(source / "cuda" / TENSOR, old, new)
    if fault is not None:
        replace_once(source / "cuda" / fault.file, fault.old, fault.new)
    kernel = (fault.kernel or fault.file) if fault else TENSOR
    flags = [
        "-std=c++20",
        "-O1",
        "-fPIC",
        "-ffp-contract=off",
        "-fvisibility=hidden",
        "-fsanitize=thread",
        "-w",
    ]
    paths = ["-I", twins / "include", "-I", source, "-isystem", headers, "-isystem", headers / "cccl"]
    run("g++", *flags, *paths, "-x", "c++", "-c", source / "cuda" / kernel, "-o", folder / "kernel.o")
    others = [path for name, path in objects.items() if name != kernel]
    torch_lib = Path(torch.__file__).parent / "lib"
    library = folder / f"lib{CHECKED}.so"
    run(
        "g++",
        "-shared",
        "-Wl,-Bsymbolic",
        "-pthread",
        "-o",
        library,
        folder / "kernel.o",
        *others,
        torch_lib / "libtorch_cpu.so",
        torch_lib / "libc10.so",
    )


def find(fault: Fault | None, objects: dict[str, Path], headers: Path) -> str:
    """What the fault's test says of it; nothing if the test passes. Without a fault: what any test says."""
    with tempfile.TemporaryDirectory() as folder:
        build(fault, Path(folder), objects, headers)
        shutil.copy(ROOT / "build" / "cuda_on_cpu" / "libpaged_kv_cuda_on_cpu.so", folder)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        command += ["tests/test_cuda_checked.py", "-k", fault.test if fault else UNPRUNED]
        environment = os.environ | {"CUDA_ON_CPU_FOLDER": folder, "PYTHONPATH": str(ROOT)}
        result = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=900
        )
    if result.returncode in (-signal.SIGSEGV, -signal.SIGABRT):
        return "the process is ended by a signal"
    if result.returncode not in (0, 1):  # nothing was tested
        sys.exit(f"cuda-faults: {' '.join(command)}\n{result.stdout}{result.stderr}")
    if result.returncode == 0:
        return ""
    error = re.search(r"^E +(?:\w+Error: )?(.*)", result.stdout, re.MULTILINE)
    return re.sub(r".*\), (?=block \()|\S*/(?=csrc/)", "", error[1]) if error else "the test fails"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--build", type=Path, default=ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
    )
    parser.add_argument(
        "--headers", type=Path, default=Path("/usr/local/cuda/include"), help="of the CUDA toolkit"
    )
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("faults", nargs="*", help="parts of names; default: all")
    arguments = parser.parse_args()
    parts = (f"{CHECKED}_kernels.dir", f"{CHECKED}.dir", "device_on_cpu.dir", "/ops.dir")
    objects = {
        path.name.removesuffix(".o"): path
        for path in arguments.build.rglob("*.o")
        if any(part in str(path) for part in parts)
    }
    if said := find(None, objects, arguments.headers):
        sys.exit(f"cuda-faults: the tests fail without a fault: {said}")
    chosen = [f for f in FAULTS if not arguments.faults or any(p in f.name for p in arguments.faults)]
    missed = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        found = pool.map(lambda fault: find(fault, objects, arguments.headers), chosen)
        for fault, said in zip(chosen, found, strict=True):
            missed += not said
            print(
                f"{fault.file}: {fault.name}\n    {f'-k {fault.test}: {said:.200}' if said else 'MISSED'}",
                flush=True,
            )
    print(f"cuda-faults: {len(chosen) - missed} of {len(chosen)} found")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
