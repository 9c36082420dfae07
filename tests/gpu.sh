#!/usr/bin/env bash
# Runs the tests marked `gpu` and the benchmarks `gpu.*` on a machine with a CUDA device; `make gpu` calls it.
#
# Needs no network and no virtual environment: $PYTHON (python3) has a torch with CUDA and numpy, CMake and a C++20 compiler are
# installed, and the other packages lie as wheels in $WHEELS (.whl), where `make gpu-wheels` puts them on another machine.
# Meant to fit a run of eight minutes with 16 cores. Results are printed one by one, so a run that is cut short has some.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
WHEELS=${WHEELS:-.whl}
export PYTHONUNBUFFERED=1 CI=1

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if compgen -G "$WHEELS/*.whl" > /dev/null; then
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site" "$WHEELS"/*.whl
fi
export PYTHONPATH="$PWD/src:$site${PYTHONPATH:+:$PYTHONPATH}"

"$PYTHON" - <<'PYTHON_CODE'
import sys, torch
if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} sees no CUDA device; run this on a machine that has one.")
print(f"device: {torch.cuda.get_device_name(0)}, torch {torch.__version__}")
PYTHON_CODE

cmake -S . -B build/gpu -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(command -v "$PYTHON")" > /dev/null
cmake --build build/gpu -j
echo "built after $SECONDS s"
failed=
# Files by name, where others beside them import what is not in $WHEELS.
"$PYTHON" -m pytest -q -m gpu tests/nn tests/optim tests/trainer tests/dense tests/cluster/test_ray_devices.py || failed=1
# In a process of its own: torch 2.11 has crashed on an H200 while it loaded compiled code, of a plain Linear as well.
"$PYTHON" -m pytest -q -m gpu tests/serve/test_compiled_network.py || failed=1
echo "tested after $SECONDS s"
"$PYTHON" -m benchmarks "gpu.*" || failed=1
echo "measured after $SECONDS s"
exit "${failed:-0}"
