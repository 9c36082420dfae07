"""`make demo`: trains on real click logs where there are any, else on generated ones; saves the model, writes a report.

Arguments are passed on to `persia train`, such as `--set train.max_steps=100`.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from persia import data

HERE = Path(__file__).parent
OUTPUT = Path("runs/demo")
NEXT = """
This trained the configuration {config}, and saved rows, network and optimizer state in {output}.
The progressive AUC scores each batch before it is trained, so it is that of unseen samples.
The report has it by step, with loss, calibration, hit rates and staleness. Open it in a browser:

  {report}

Next:

  {persia} checkpoint inspect {output}
  {persia} train {config} --resume {output} --set train.epochs=2
  {persia} init YOUR_FILE.csv   # or .parquet: writes a configuration, a model and a program for your data
"""


def persia(*arguments: str) -> int:
    """Runs a command of persia; returns its exit status."""
    return subprocess.run([sys.executable, "-m", "persia", *arguments], check=False).returncode


def main(arguments: list[str]) -> int:
    real = data.find("globo_ctr") is not None
    config = HERE / ("globo.toml" if real else "synthetic.toml")
    print(f"Training {config.name}" + ("" if real else " (no real data: set PERSIA_DATA to use some)"), flush=True)
    shutil.rmtree(OUTPUT, ignore_errors=True)  # Of an earlier demo: `persia train` does not mix two runs.
    small = ["--set", "train.max_steps=300"] if os.environ.get("PERSIA_EXAMPLE_SMALL") else []
    status = persia("train", str(config), "--output", str(OUTPUT), *small, *arguments)
    status = status or persia("report", str(OUTPUT))
    if status == 0:
        report = (OUTPUT / "report.html").resolve().as_uri()
        program = Path(sys.executable).with_name("persia")
        print(NEXT.format(persia=program, config=config, output=OUTPUT, report=report))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
