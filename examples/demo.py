"""`make demo`: trains on real click logs where there are any, else on generated ones, and saves the model."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from persia import data

HERE = Path(__file__).parent
OUTPUT = "runs/demo"
NEXT = """
This trained the configuration {config}, and saved rows, network and optimizer state in {output}.
The progressive AUC scores each batch before it is trained, so it is that of unseen samples. Next:

  {persia} checkpoint inspect {output}
  {persia} train {config} --resume {output} --set train.epochs=2
  {persia} init YOUR_FILE.csv   # or .parquet: writes a configuration, a model and a program for your data
"""


def main() -> int:
    real = data.find("globo_ctr") is not None
    config = HERE / ("globo.toml" if real else "synthetic.toml")
    print(f"Training {config.name}" + ("" if real else " (no real data: set PERSIA_DATA to use some)"), flush=True)
    shutil.rmtree(OUTPUT, ignore_errors=True)  # Of an earlier demo: `persia train` does not mix two runs.
    command = [sys.executable, "-m", "persia", "train", str(config), "--output", OUTPUT]
    if os.environ.get("PERSIA_EXAMPLE_SMALL"):
        command += ["--set", "train.max_steps=300"]
    status = subprocess.run(command, check=False).returncode
    if status == 0:
        print(NEXT.format(persia=Path(sys.executable).with_name("persia"), config=config, output=OUTPUT))
    return status


if __name__ == "__main__":
    sys.exit(main())
