#!/usr/bin/env bash
# Runs the tests marked `gpu` and the benchmarks `gpu.*` on a machine with a CUDA device; `make gpu` calls it.
#
# Needs no network and no virtual environment: $PYTHON (python3) has a torch with CUDA and numpy, CMake and a C++20 compiler are
# installed, and the other packages lie as wheels in $WHEELS (.whl), where `make gpu-wheels` puts them on another machine.
# Ends within $LIMIT seconds (480), for which 16 cores are enough. The table of targets comes first, and each line is appended to
# $MEASURES, the file of all measures, as soon as it is known: a run that is cut short leaves what it has measured.
# With PRESET=smoke it runs without a device, on tensors of the CPU, and leaves out the tests: to try this script.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
WHEELS=${WHEELS:-.whl}
LIMIT=${LIMIT:-480}
PRESET=${PRESET:-laptop}
if [ "$PRESET" = smoke ]; then
  MEASURES=${MEASURES:-$(mktemp)}
else
  MEASURES=${MEASURES:-docs/assets/performance/measures.jsonl}
fi
# Targets, in their order; then old ways against new ones; then all others.
TABLE="gpu.step_vs_dense_only gpu.dlrm_128_vs_dense_only gpu.ffnn_paper_vs_dense_only gpu.rows_1m_128* gpu.cache_rows gpu.threads"
WAYS="gpu.pooled_together gpu.one_thread* gpu.compile* gpu.serve*"
export PYTHONUNBUFFERED=1 CI=1

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if compgen -G "$WHEELS/*.whl" > /dev/null; then
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site" "$WHEELS"/*.whl
fi
export PYTHONPATH="$PWD/src:$site${PYTHONPATH:+:$PYTHONPATH}"

PRESET=$PRESET "$PYTHON" - <<'PYTHON_CODE'
import os, sys, torch
if os.environ["PRESET"] == "smoke" and not torch.cuda.is_available():
    sys.exit(0)
if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} sees no CUDA device; run this on a machine that has one.")
print(f"device: {torch.cuda.get_device_name(0)}, torch {torch.__version__}")
PYTHON_CODE

cmake -S . -B build/gpu -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(command -v "$PYTHON")" > /dev/null
cmake --build build/gpu -j
echo "built after $SECONDS s"
failed=
if [ "$PRESET" != smoke ]; then
  # Files by name, where others beside them import what is not in $WHEELS.
  timeout 120 "$PYTHON" -m pytest -q -m gpu tests/nn tests/optim tests/trainer tests/dense tests/serve/test_device_rows.py \
    tests/cluster/test_ray_devices.py || failed=1
  # In a process of its own: torch 2.11 has crashed on an H200 while it loaded compiled code, of a plain Linear as well.
  timeout 60 "$PYTHON" -m pytest -q -m gpu tests/serve/test_compiled_network.py || failed=1
  echo "tested after $SECONDS s"
fi
set -f  # Patterns of names are no files.
# A benchmark that has begun takes up to 30 s.
timeout $((LIMIT - SECONDS)) "$PYTHON" -m benchmarks $TABLE $WAYS "gpu.*" --preset "$PRESET" --keep-going \
  --seconds $((LIMIT - SECONDS - 30)) --json "$MEASURES" || failed=1
echo "measured after $SECONDS s, in $MEASURES"
exit "${failed:-0}"
