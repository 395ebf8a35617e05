#!/usr/bin/env bash
# The whole proof on a machine with an NVIDIA GPU, in one go: builds for this GPU, runs the op, manager and engine tests
# on it, compute-sanitizer on a short list, and the benchmarks. Ends with a table; exits 1 if any row failed.
#
#   bench/gpu_check.sh [--rehearse]
#
# Needs python3 with torch (2.11 or later, CUDA 13), numpy, pybind11 and pytest, nvcc, cmake and ninja; no network. What
# needs more (hypothesis, transformers, compute-sanitizer, Google Benchmark) is left out where that is missing, and the
# table says so. Logs and figures are left in build/gpu_check, or in $GPU_CHECK_LOGS.
#
# --rehearse goes through the same steps without a GPU: the build is real, the tests run on a pretended device, the
# benchmarks in small sizes on the CPU.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive PIP_NO_INDEX=1
python=${PYTHON:-python3}
logs=${GPU_CHECK_LOGS:-build/gpu_check}
mkdir -p "$logs"
rehearse=
[ "${1:-}" = --rehearse ] && rehearse=yes
started=$SECONDS

give_up() {
  echo "gpu_check: $1" >&2
  exit 1
}

# ----------------------------------------------------------------------------------------------------------------------
# What is here

has() { "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)"; }
has torch || give_up "expected torch in $python, found none"
[ -n "$rehearse" ] || "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
  give_up "expected a CUDA GPU that torch can use, found none; --rehearse runs without one"
"$python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' ||
  give_up "expected torch's CUDA build, got $("$python" -c 'import torch; print(torch.__version__)')"
export PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin"
scripts=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
export PATH="$scripts:$PATH"
for tool in nvcc cmake ninja; do
  command -v $tool > /dev/null || give_up "expected $tool, found none"
done
for module in numpy pybind11 pytest; do
  has $module || give_up "expected the Python module $module, found none"
done

# ----------------------------------------------------------------------------------------------------------------------
# Rows of the table: step, result, seconds, what it found

rows=()
failed=0
row() { rows+=("$(printf '%-34s %-9s %5s s  %s' "$1" "$2" "$3" "$4")"); }
log_of() { echo "$logs/${1// /_}.log"; }

# conclude NAME STATUS BEGAN LIMIT: the row of a command that has ended, which had so many seconds
conclude() {
  local log last seconds=$((SECONDS - $3))
  log=$(log_of "$1")
  last=$(grep -v '^ *$' "$log" | tail -1 | cut -c1-120)
  [ "$2" = 124 ] && last="still running after $4 s"
  if [ "$2" = 0 ]; then
    row "$1" passed $seconds "$last"
  else
    row "$1" FAILED $seconds "$last (see $log)"
    failed=1
    tail -30 "$log"
  fi
}

# step NAME SECONDS COMMAND...: the command's output goes to a log of that name
step() {
  local name=$1 limit=$2 from=$SECONDS status
  shift 2
  echo "== $name"
  timeout --kill-after=10 "$limit" "$@" > "$(log_of "$name")" 2>&1
  status=$?
  conclude "$name" $status $from "$limit"
  return $status
}

finish() {
  echo
  printf '%s\n' "${rows[@]}"
  echo "gpu_check: $([ $failed = 0 ] && echo all passed || echo FAILED) in $((SECONDS - started)) s; logs in $logs"
  exit $failed
}

# ----------------------------------------------------------------------------------------------------------------------
# Build, for this GPU alone: 9.0 and 10.0 as in the default list, with what only they have

arch=9.0a
[ -n "$rehearse" ] || arch=$("$python" -c '
import torch
arch = "%d.%d" % torch.cuda.get_device_capability()
print(arch + ("a" if arch in ("9.0", "10.0") else ""))')
bench=OFF
echo 'find_package(benchmark REQUIRED)' > "$logs/CMakeLists.txt"
cmake -S "$logs" -B "$logs/probe" > /dev/null 2>&1 && bench=ON
rm -rf "$logs/CMakeLists.txt" "$logs/probe"
export TORCH_CUDA_ARCH_LIST=$arch PAGED_KV_BUILD=cmake-gpu-check
export CMAKE_ARGS="${CMAKE_ARGS:-} -DPAGED_KV_BENCH=$bench"
step "build for sm_${arch/./}" 400 "$python" setup.py --quiet build_ext --inplace || finish
"$python" -m paged_kv info

# ----------------------------------------------------------------------------------------------------------------------
# Tests, several processes at a time: the GPU has room, and most of the time goes into making inputs on the CPU

backend=cuda
limit=300
if [ -n "$rehearse" ]; then
  backend=cuda_pretended
  export PAGED_KV_TEST_PRETEND_CUDA=1
  limit=3000 # on however few cores
fi
names=() processes=()
# start NAME COMMAND...: in the background; collect waits for all of them
start() {
  local name=$1
  shift
  timeout --kill-after=10 "$limit" "$@" > "$(log_of "$name")" 2>&1 &
  names+=("$name")
  processes+=($!)
}
# tests NAME PYTEST_ARGUMENT...
tests() {
  local name=$1
  shift
  start "$name" "$python" -m pytest -q -p no:cacheprovider "$@"
}
collect() {
  local i from=$SECONDS
  for i in "${!names[@]}"; do
    wait "${processes[$i]}"
    conclude "${names[$i]}" $? "$from" "$limit"
  done
  names=() processes=()
}
left_out() { row "$1" "left out" 0 "$2"; }

echo "== tests"
random=""
has hypothesis && random=tests/test_attention_random.py
has hypothesis || left_out "attention, random cases" "needs hypothesis"
tests "attention, cases" tests/test_attention.py -k "$backend and test_correct"
tests "attention, corners and others" tests/test_attention.py $random -k "$backend and not test_correct"
tests "cache ops" tests/test_cache_ops.py -k "$backend"
tests "merge and determinism" tests/test_merge.py tests/test_determinism.py -k "$backend"
tests "build, registration, fake tensors" tests/test_cuda_build.py
if [ -n "$rehearse" ]; then
  left_out "streams, graphs, errors" "needs a GPU"
  left_out "errors, checking mode" "needs a GPU"
else
  tests "streams, graphs, errors" tests/test_cuda_device.py
  PAGED_KV_CUDA_CHECKS=1 tests "errors, checking mode" tests/test_cuda_device.py -k "mistakes or two_devices"
fi
if has hypothesis; then
  tests "manager" tests/test_manager*.py
else
  tests "manager" $(ls tests/test_manager*.py | grep -v -e _model -e _data)
  left_out "manager, random walks" "needs hypothesis"
fi
if (cd tests && "$python" -c 'import tiny_models') 2> /dev/null; then
  tests "engine" tests/test_engine.py tests/test_engine_sampling.py tests/test_integration_transformers.py
else
  left_out "engine" "needs transformers as pyproject.toml asks for"
fi

# compute-sanitizer, with memory that is not pooled, so that each tensor's end is an end
sanitizer() {
  start "compute-sanitizer $1" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
    compute-sanitizer --tool "$1" --error-exitcode 9 --kernel-name kns=paged_kv \
    "$python" -m pytest -q -p no:cacheprovider tests/test_cuda_device.py -k "$2"
}
if [ -n "$rehearse" ]; then
  left_out "compute-sanitizer" "needs a GPU"
elif ! command -v compute-sanitizer > /dev/null; then
  left_out "compute-sanitizer" "not installed"
elif ! compute-sanitizer "$python" -c 'import torch; torch.zeros(1, device="cuda")' > "$logs/sanitizer_probe.log" 2>&1; then
  left_out "compute-sanitizer" "does not run on this machine (see $logs/sanitizer_probe.log)"
else
  sanitizer memcheck "test_short"
  sanitizer racecheck "test_short_attention and (decode or mixed or broken)"
fi
collect

# ----------------------------------------------------------------------------------------------------------------------
# Benchmarks, alone on the GPU

if [ -n "$rehearse" ]; then
  step "benchmarks" 200 "$python" -m bench.gpu --rehearse --json "$logs/gpu.json"
else
  step "benchmarks" 200 "$python" -m bench.gpu --seconds 0.2 --json "$logs/gpu.json" && cat "$logs/benchmarks.log"
fi
if [ $bench = OFF ]; then
  left_out "C++ benchmarks" "needs Google Benchmark"
elif [ -n "$rehearse" ]; then
  step "C++ benchmarks" 60 build/$PAGED_KV_BUILD/bench/cpp/bench_cuda --benchmark_list_tests
else
  step "C++ benchmarks" 100 build/$PAGED_KV_BUILD/bench/cpp/bench_cuda \
    --benchmark_out="$logs/bench_cuda.json" && cat "$logs/C++_benchmarks.log"
fi
finish
