# `make demo` and `make test` each work on a fresh machine: they make .venv, install into it and run.
# Needs Python >= 3.11 (found on PATH, or PYTHON=...) and a C++20 compiler.

VENV ?= .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
# No byte code beforehand: Python compiles what is imported when it is first imported.
INSTALL := $(BIN)/pip --disable-pip-version-check --quiet install --no-compile

# An editable install: the sources are used from the checkout, the native module is built once.
# A changed build input or dependency list makes the stamps old, and the next target installs again.
NATIVE_SOURCES := $(shell find ffi -type f 2>/dev/null)
INSTALL_INPUTS := pyproject.toml CMakeLists.txt $(wildcard cmake/*) $(NATIVE_SOURCES)

# AUTO: the CUDA module beside a GPU, for that GPU alone. Elsewhere nothing could run it; `make cuda` sees that it compiles.
CUDA ?= AUTO
# All that is compiled for VENV, in one folder that stays: targets that need more than others compile only the difference.
BUILD ?= build/native
# Of a compiler cache, if there is one; CMake reads it where it configures a folder for the first time.
export CMAKE_CXX_COMPILER_LAUNCHER ?= $(shell command -v ccache)
# What ccache keeps serves every checkout: paths in this one count as relative.
export CCACHE_BASEDIR ?= $(CURDIR)
export CCACHE_NOHASHDIR ?= 1
EDITABLE = $(INSTALL) --no-build-isolation --editable . --config-settings=build-dir=$(BUILD) $(NATIVE_OPTIONS:%=--config-settings=cmake.define.%)
NATIVE_OPTIONS = JAX_TT_CUDA=$(CUDA) JAX_TT_EMULATION=$(EMULATION)
# The CUDA kernels compiled for the processor, which only tests run: they take most of a build. OFF leaves them out.
EMULATION ?= ON
EMULATED := $(if $(filter ON,$(EMULATION)),$(VENV)/.with-emulation)

# Tests use all cores, but at most 8: each worker holds a JAX of its own.
# A worker begins with the files of its half of the list, whose programs are compiled once, and then takes from others.
PYTEST_ARGS ?= --numprocesses=auto --maxprocesses=8 --dist=worksteal
# Threads of numpy's matrix products would wait for each other in every worker.
test test-ci test-peers test-sample soak: export OPENBLAS_NUM_THREADS := 1
DATA ?= ../shared/data

.PHONY: help demo test test-ci soak test-peers newest test-newest test-sample fuzz dev lint format types bench bench-quick docs native native-with asan ubsan cuda cuda-all \
  emulated cuda-coverage gpu-bundle gpu-check check-wheel wheel wheels sdist retrieval-quick clean

help:
	@echo "make demo     train the DLRM example on a synthetic click log (5 minutes on 2 cores, the installation included)"
	@echo "make test     run the quick tier of the tests; test-ci adds those that take long, soak runs for hours"
	@echo "make test-peers  compare collections with FBGEMM, which this installs"
	@echo "make test-newest  check the wheel, and a sample of the tests, with the newest Python and the newest jax"
	@echo "make dev      install everything a developer needs; hooks: .venv/bin/pre-commit install"
	@echo "make cuda     compile the CUDA kernels (no GPU needed); cuda-all for every architecture"
	@echo "make gpu-bundle  build the modules of a machine with a GPU here, for its Python; make gpu-check there uses them"
	@echo "make gpu-check  on a machine with a GPU: benchmarks, tests, compute-sanitizer, in thirteen minutes"
	@echo "make lint | types | docs | bench | native | asan | ubsan | check-wheel | wheel | clean"

demo: $(VENV)/.with-examples
	$(PY) -m examples.dlrm.main --steps 240

test: $(VENV)/.with-test $(EMULATED)
	$(PY) -m pytest $(PYTEST_ARGS) --tier=quick

# All that CI runs: also the tests that take long.
test-ci: $(VENV)/.with-test $(EMULATED)
	$(PY) -m pytest $(PYTEST_ARGS) --tier=ci --costs=build/test_costs.jsonl

# For hours: every combination of parameters, long random runs, emulated threads in several orders, all architectures.
soak: $(VENV)/.with-test $(EMULATED)
	$(PY) -m pytest $(PYTEST_ARGS) --tier=all
	$(PY) -m tests.fuzz --calls 100000
	$(PY) -m tests.kinds.hashed.hash_soak --operations 1000000
	$(MAKE) --no-print-directory emulated cuda-all

# Against FBGEMM on the CPU, which is installed for this.
test-peers: $(VENV)/.with-test $(VENV)/.with-peers
	$(PY) -m pytest $(PYTEST_ARGS) tests/peers

# What users install is tested with the newest releases of jax and all else that this Python gets, in an environment that
# is made anew: the module of the wheel is placed beside the sources. CMake and XLA's headers are those of VENV: with
# others, a compiler cache would find nothing.
NEWEST ?= build/newest
newest: $(VENV)/.with-builder
	@python=$$(scripts/find_python.sh --newest) && headers=$$($(PY) -c "import jax.ffi; print(jax.ffi.include_dir())") && \
	  PATH="$(abspath $(BIN)):$$PATH" "$$python" scripts/check_wheel.py --environment $(NEWEST) --newest --headers "$$headers"
test-newest: newest
	@$(MAKE) --no-print-directory test-sample
# In the environment that is there.
test-sample:
	$(NEWEST)/bin/python -m pytest $(PYTEST_ARGS) --tier=sample

dev: $(VENV)/.with-dev

lint: $(VENV)/.with-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@files=$$(git ls-files '*.cc' '*.h' '*.cu' '*.cuh'); \
	if [ -n "$$files" ]; then $(BIN)/clang-format --dry-run --Werror $$files && echo "clang-format: clean"; fi

format: $(VENV)/.with-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	@files=$$(git ls-files '*.cc' '*.h' '*.cu' '*.cuh'); if [ -n "$$files" ]; then $(BIN)/clang-format -i $$files; fi

types: $(VENV)/.with-dev
	$(BIN)/basedpyright

# Peers (torch, fbgemm, tensorly-torch) are timed where they are installed: make bench EXTRAS=peers
EXTRAS ?= examples
BENCH_ARGS ?=
bench: $(VENV)/.with-$(EXTRAS)
	$(PY) -m benchmarks.run $(BENCH_ARGS)

# Malformed calls and damaged files, 100,000 of them; the normal suite makes 500.
fuzz: $(VENV)/.with-test $(EMULATED)
	$(PY) -m tests.fuzz --calls 100000

bench-quick: $(VENV)/.with-$(EXTRAS)
	$(PY) -m benchmarks.run --quick $(BENCH_ARGS)

docs: $(VENV)/.with-docs
	$(BIN)/sphinx-build -W --keep-going -b html docs build/docs

# With optax the same tables are trained in tests/programs.
VARIANTS ?= dense_fused,tt_fused
RETRIEVAL_ARGS ?=
retrieval-quick: $(VENV)/.with-examples
	$(PY) -m examples.retrieval.main --data $(DATA) --quick --fresh --workdir build/retrieval --variants $(VARIANTS) \
	  $(RETRIEVAL_ARGS)

# A developer's loop on the native module: compiles only what changed.
native: $(VENV)/.with-dev $(EMULATED)

# The same for a Python of your own that has jax and nanobind and imports the checkout through PYTHONPATH:
# the module is copied beside the sources. make native-with NATIVE_PYTHON=/path/to/python
NATIVE_PYTHON ?= $(PY)
NATIVE_BUILD ?= build/in_tree
NATIVE_FLAGS ?= $(NATIVE_OPTIONS:%=-D%)
native-with:
	cmake -S . -B $(NATIVE_BUILD) -DPython_EXECUTABLE=$(abspath $(NATIVE_PYTHON)) $(NATIVE_FLAGS)
	cmake --build $(NATIVE_BUILD) --target in_tree --parallel $$(nproc)

# The CUDA module, which needs no GPU to compile: sm_90 and PTX of sm_80, or all GPUs. Says so and goes on where there is
# no nvcc.
cuda: ARCHITECTURES := 90-real;80-virtual
cuda-all: ARCHITECTURES := all
cuda cuda-all: $(VENV)/.with-builder $(VENV)/.with-disassembler
	$(PY) -m scripts.compile_cuda --build build/$@ "$(ARCHITECTURES)"
	PATH="$(abspath $(BIN)):$$PATH" $(PY) -m scripts.kernel_loads --check

# The tests of the ops on the emulated CUDA kernels, threads and blocks in several orders: a race shows as a result
# that depends on the order, where the emulator does not name it outright.
SEEDS ?= 1 2 3
EMULATION_TESTS ?= lookup/test_conformance.py lookup/test_grad.py lookup/test_fused.py lookup/test_vmap.py \
  lookup/test_jit.py lookup/test_arguments.py lookup/test_shard.py lookup/test_fused_shard.py lookup/test_max.py \
  lookup/test_precision.py lookup/test_refused_steps.py optimizers/test_rules.py optimizers/test_moment_dtype.py \
  optimizers/test_averaged_rules.py optimizers/test_extension_rules.py optimizers/test_extension_builds.py \
  optimizers/test_custom_rules.py ids/test_bags.py ids/test_bad_ids.py ids/test_poisoned_ids.py \
  native/test_cuda_tt.py native/test_cuda_fast.py native/test_cuda_storage.py native/test_cuda_plan.py \
  native/test_tt_tables_cuda.py native/test_dense_segments.py native/test_dense_tables_cuda.py \
  kinds/quantized/test_quantized_tables.py kinds/quantized/test_quantized_levels.py \
  kinds/quantized/test_quantized_groups.py kinds/quantized/test_quantized_training.py \
  kinds/cached/test_cache_ops.py kinds/cached/test_cache_lookup.py kinds/cached/test_cache_steps.py \
  kinds/hashed/test_hash_ops.py kinds/hashed/test_hash_directory.py kinds/hashed/test_hash_tables.py \
  kinds/hashed/test_hash_lookups.py
emulated: $(VENV)/.with-test $(EMULATED)
	@for seed in $(SEEDS); do echo "seed $$seed"; \
	  JAX_TT_EMULATION_SEED=$$seed $(PY) -m pytest $(PYTEST_ARGS) -k cuda \
	    $(EMULATION_TESTS:%=tests/%) || exit 1; done

# Which lines and instances of the CUDA kernels those tests execute. Needs gcov.
cuda-coverage: $(VENV)/.with-dev
	$(PY) -m scripts.cuda_coverage $(EMULATION_TESTS:%=tests/%)

# On a machine with a GPU, with nothing installed by this project and no network: measures, tests, looks for memory
# errors and races. GPU_PYTHON has jax with CUDA and pytest, and nanobind, cmake and ninja where there is no bundle.
GPU_PYTHON ?= python3
GPU_CHECK_ARGS ?=
gpu-check:
	$(GPU_PYTHON) scripts/gpu_check.py $(GPU_CHECK_ARGS)

# The modules for that machine, built elsewhere: BUNDLE_PYTHON has the versions of Python, jax and numpy that it has, and
# nanobind, cmake and ninja. They go to build/gpu-bundle.
BUNDLE_PYTHON ?= $(PY)
gpu-bundle:
	$(BUNDLE_PYTHON) -m scripts.gpu_bundle --python $(BUNDLE_PYTHON)

# The tests on a native module built with sanitizers. It takes the place of the ordinary one in .venv; the next target
# that needs that one installs it again.
SANITIZER_TESTS ?= tests
asan: SANITIZER := address
ubsan: SANITIZER := undefined
# jaxlib is not instrumented and keeps memory until the process ends: leaks are not looked for.
asan ubsan: export ASAN_OPTIONS := detect_leaks=0:abort_on_error=1
ubsan: export UBSAN_OPTIONS := print_stacktrace=1:halt_on_error=1
asan ubsan: private BUILD = build/$(SANITIZER)
asan ubsan: $(VENV)/.with-test
	rm -f $(VENV)/.installed
	$(EDITABLE) --no-deps --config-settings=install.strip=false --config-settings=cmake.define.JAX_TT_SANITIZE=$(SANITIZER)
	LD_PRELOAD="$$($(CXX) -print-file-name=lib$(subst undefined,ub,$(subst address,a,$(SANITIZER)))san.so) \
	  $$($(CXX) -print-file-name=libstdc++.so)" $(PY) -m pytest $(PYTEST_ARGS) $(SANITIZER_TESTS)

# The wheel as a user gets it: built, inspected, installed into an environment of its own, imported outside the checkout.
check-wheel:
	@python=$$(scripts/find_python.sh) && "$$python" scripts/check_wheel.py

# That wheel, for the Python that is found and all Linux systems whose C library is not older than this one; into dist/.
wheel:
	@python=$$(scripts/find_python.sh) && "$$python" scripts/check_wheel.py --output dist

# Wheels for every Python, in containers (cibuildwheel, which needs Docker), and the source distribution; into dist/.
PYTHON ?= python3
wheels:
	$(PYTHON) -m cibuildwheel --output-dir dist

sdist:
	$(PYTHON) -m build --sdist --outdir dist

clean:
	rm -rf build dist $(VENV)

$(VENV)/bin/python:
	@python=$$(scripts/find_python.sh) && echo "creating $(VENV) with $$python" && "$$python" -m venv $(VENV)

# What the build needs is in the environment: of jax the oldest supported release, whose headers are compiled against.
$(VENV)/.with-builder: $(VENV)/bin/python pyproject.toml
	@echo "installing what building needs into $(VENV)"
	@$(INSTALL) cmake ninja $$($(PY) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['build-system']['requires'])")
	@touch $@

# What the machine code of kernels is read with.
$(VENV)/.with-disassembler: $(VENV)/bin/python
	@$(INSTALL) nvidia-cuda-nvdisasm
	@touch $@

$(VENV)/.installed: EMULATION := OFF
$(VENV)/.installed: $(VENV)/.with-builder $(INSTALL_INPUTS)
	@echo "building and installing jax-tt into $(VENV)"
	@$(EDITABLE)
	@touch $@

$(VENV)/.with-emulation: $(VENV)/.installed
	@echo "building the emulated CUDA kernels"
	@$(EDITABLE) --no-deps
	@touch $@

# The project is there already, so that only what the extra names gets installed; nothing is compiled again.
$(VENV)/.with-%: $(VENV)/.installed
	@echo "installing what jax-tt[$*] needs into $(VENV)"
	@$(INSTALL) "jax-tt[$*]"
	@touch $@
