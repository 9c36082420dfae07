#!/bin/sh
# Creates build/peers-env: TensorFlow Recommenders Addons and PaddlePaddle, which peers.py measures beside the store.
#
#   benchmarks/baselines/peers_env.sh [PYTHON]      (default: python; 3.10 or 3.11)
#
# PaddlePaddle's wheels have had no parameter server since 3.0.
set -eu
python=${1:-python}
root=$(cd "$(dirname "$0")/../.." && pwd)
env="$root/build/peers-env"

rm -rf "$env"
"$python" -m venv "$env"
"$env/bin/python" -m pip install --quiet --disable-pip-version-check \
    tensorflow-recommenders-addons==0.8.1 tensorflow==2.16.2 paddlepaddle==2.6.2 'numpy<2' setuptools
echo "peers are ready"
