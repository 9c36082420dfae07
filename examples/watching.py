"""Watching a run: a trace of its steps, and a report."""

import json
import os
import tempfile
from collections import Counter
from pathlib import Path

import torch

import persia
from persia.dashboard.report import report
from persia.telemetry.run_record import read_run

ROWS = 20_000 if os.environ.get("PERSIA_EXAMPLE_SMALL") else 500_000


def main() -> None:
    torch.manual_seed(0)
    data = persia.data.synthetic(ROWS, id_features=8, ids_per_feature=1_000, batch_size=512)
    with tempfile.TemporaryDirectory() as folder:
        trainer = persia.Trainer(
            persia.nn.models.DeepFM(data.schema, hidden=(128, 64)),
            data.schema,
            optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3),
            embedding_optimizer=persia.optim.Adagrad(lr=0.05),
            options=persia.TrainerOptions(checkpoint_dir=folder),
        )
        with trainer.trace(Path(folder) / "trace.json"):  # Open it in https://ui.perfetto.dev.
            trainer.fit(data, max_steps=20)
        seconds: Counter[str] = Counter()
        for event in json.loads((Path(folder) / "trace.json").read_text())["traceEvents"]:
            seconds[event["name"]] += event.get("dur", 0) / 1e6
        for name in ("lookup", "forward", "backward", "update", "push"):
            print(f"{name:>9} {seconds[name] * 1e3:7.1f} ms in 20 steps")

        trainer.fit(data)
        page = report(read_run(folder), "Synthetic clicks")  # As `persia report DIR`.
        print(f"the report has {page.count('<svg')} charts")


if __name__ == "__main__":
    main()
