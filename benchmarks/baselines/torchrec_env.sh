#!/bin/sh
# Creates build/torchrec-env: TorchRec 1.8.0 with FBGEMM's CPU build, beside the torch of the given Python.
#
#   benchmarks/baselines/torchrec_env.sh [PYTHON]      (default: python)
#
# The environment sees the packages of PYTHON (torch, numpy), and adds the rest. torchrec itself is installed without
# dependencies because it would replace FBGEMM's CPU build with the CUDA one; this pair of versions needs torch 2.13.
set -eu
python=${1:-python}
root=$(cd "$(dirname "$0")/../.." && pwd)
env="$root/build/torchrec-env"

"$python" -c 'import sys, torch
if not torch.__version__.startswith("2.13."):
    sys.exit(f"torchrec 1.8.0 needs torch 2.13, found {torch.__version__}; the TorchRec comparison is optional.")'
rm -rf "$env"
"$python" -m venv "$env"
site=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
"$python" -c 'import site, sysconfig; print(sysconfig.get_paths()["purelib"])' >"$site/parent.pth"
torch=$("$python" -c 'import torch; print(torch.__version__.split("+")[0])')
printf 'torch==%s\n' "$torch" >"$env/constraints.txt"
"$env/bin/python" -m pip install --quiet --disable-pip-version-check -c "$env/constraints.txt" \
    fbgemm-gpu-cpu==1.8.0 tensordict pyre-extensions tqdm torchmetrics
"$env/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps torchrec==1.8.0
"$env/bin/python" -c 'import fbgemm_gpu, torchrec; print("torchrec", torchrec.__version__, "is ready")'
