# Two commands on a fresh machine: `make demo`, `make test`. Needs Python 3.11+ and a C++20 compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RUNS := $(VENV)/.runs
SOURCES := $(shell find cpp bindings -name '*.cpp' -o -name '*.hpp' -o -name CMakeLists.txt) CMakeLists.txt pyproject.toml

.PHONY: chaos gpu gpu-wheels demo demo-cluster demo-online test test-all test-processes test-rest test-cpp sanitize lint format wheel bench bench-cpp bench-smoke examples docs clean install

install: $(READY)  ## create .venv and install persia into it, editable

# torch first and pinned: a looser request would pull gigabytes of CUDA.
$(VENV)/.dependencies: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt scikit-build-core nanobind ninja cmake
	touch $@

$(READY): $(VENV)/.dependencies $(SOURCES)
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e ".[dev,docs]"
	touch $(RUNS) $@

# What a first run waits for: without the tools of tests and documentation.
$(RUNS): $(VENV)/.dependencies $(SOURCES)
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e .
	touch $@

demo: $(RUNS)  ## train on real click logs if there are any, else on generated ones
	$(BIN)/python examples/demo.py

demo-online: install  ## from clicks in Kafka to predictions over HTTP, two minutes
	$(BIN)/python examples/online/run.py

demo-cluster: install  ## the same program on processes of this machine
	$(BIN)/python examples/cluster.py

test: install test-cpp  ## unit tests
	$(MAKE) -j2 test-processes test-rest

test-all: install test-cpp  ## unit tests and the slow ones
	$(MAKE) -j2 test-processes test-rest PYTEST_OPTIONS='-m "slow or not slow"'

# Beside each other: the first tests start processes, and wait for them most of the time.
START_PROCESSES = tests/cluster tests/chaos tests/cli tests/docs
test-processes: install
	$(BIN)/python -m pytest -q $(PYTEST_OPTIONS) $(START_PROCESSES)

test-rest: install
	$(BIN)/python -m pytest -q $(PYTEST_OPTIONS) $(START_PROCESSES:%=--ignore=%)

test-cpp: $(VENV)/.dependencies  ## the core's own tests
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S cpp -B build/cpp -GNinja -DCMAKE_BUILD_TYPE=Release > /dev/null
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/cpp
	ctest --test-dir build/cpp --output-on-failure -j2

bench-cpp: test-cpp  ## what bounds a lookup
	build/cpp/bench_lookup

sanitize: $(VENV)/.dependencies  ## the core's tests under ASan + UBSan and under TSan
	for kind in address,undefined thread; do \
	  PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S cpp -B build/$$kind -GNinja -DPERSIA_SANITIZE=$$kind -DCMAKE_BUILD_TYPE=Sanitized > /dev/null && \
	  PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/$$kind && \
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

# What the wheel is built from: sdist, as a release is; or checkout, of what `install` has compiled. What it needs comes from the
# package index, or without a network from a folder of wheels: PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER make wheel
WHEEL_FROM ?= sdist
wheel: install  ## build the source distribution and the wheel into dist/, install it into an empty environment, try it there
	$(BIN)/python tests/wheel.py $(WHEEL_FROM)

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
