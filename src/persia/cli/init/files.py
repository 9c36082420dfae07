"""Writes the files of `persia init`: a configuration, a model, and a program."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from persia.cli.init.guess import Guess
from persia.cli.init.guessed_columns import ColumnGuess
from persia.cli.init.schema_text import reader_options, schema_names, schema_text
from persia.cli.init.toml_text import toml_comment, toml_value

__all__ = ["FILES", "file_texts", "write_files"]

FILES = ("config.toml", "model.py", "train.py")

_SHUFFLE_ROWS = 100_000
_SMALL_ROWS = 10_000
_STEPS_OF_AN_EPOCH = 200
_MAX_BATCH = 1024
_TRAINED_ROWS = 300_000
_MAX_EPOCHS = 10
_FIT_ROWS = 1_000_000
_PATIENCE = 2

_CONFIG = """\
# Predicts `{label}` of {name}: `persia train {config}`.
# Written by `persia init` from {rows}; change what it guessed wrong. train.py reads it, too.

[data]
kind = "{kind}"
path = {path}
batch_size = {batch_size}

[data.options]
{options}
{order}split = {{ part = "train", {split} }}

[eval_data]  # The same, but for the held-out rows.
kind = "{kind}"
path = {path}
batch_size = {batch_size}

[eval_data.options]
{options}
split = {{ part = "test", {split} }}

[schema]
{schema}
{unused}
[model]
kind = "model:Model"  # The class Model in model.py.

[optimizer]
kind = "adam"
lr = 1e-3

[embedding_optimizer]
kind = "adagrad"
lr = 0.05

[train]
epochs = {epochs}{epochs_comment}{fit_rows}

[trainer]  # Stops early: scores the held-out rows after each pass, and keeps the best checkpoint next to the last.
keep_best = {watched}{watched_comment}
eval_every_epochs = 1
patience = {patience}  # Passes in a row without an improvement after which training ends.
"""

_TRAIN = '''\
"""Trains the model of model.py on the data of config.toml, as `persia train` does, and saves a checkpoint."""

import tomllib
from datetime import datetime
from pathlib import Path

import msgspec
import torch

import persia
from model import Model

HERE = Path(__file__).resolve().parent
CONFIG = tomllib.loads((HERE / "config.toml").read_text(encoding="utf-8"))
SCHEMA = msgspec.convert(CONFIG["schema"], persia.Schema)


def reader(section, schema):
    data = CONFIG[section]
    return persia.data.{kind}(data["path"], schema, data["batch_size"], **data["options"])


def main():
    # Finds scales, means and edges of buckets in the training rows.
    schema = persia.fit_features(SCHEMA, reader("data", SCHEMA), CONFIG["train"].get("fit_rows"))
    torch.manual_seed(0)
    output = HERE / "runs" / f"{{datetime.now():%Y-%m-%d_%H-%M-%S}}"
    trainer = persia.Trainer(
        Model(schema),
        schema,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3),
        embedding_optimizer=persia.optim.Adagrad(lr=0.05),
        options=msgspec.convert(CONFIG["trainer"] | {{"checkpoint_dir": str(output)}}, persia.TrainerOptions),
    )
    result = trainer.fit(reader("data", schema), reader("eval_data", schema), epochs=CONFIG["train"]["epochs"])
    print(result)
    print("On held-out rows:", result.evaluation.summary())
    print(f"best: step {{result.best_step}}, {{result.watched}} {{result.best:.4f}}")
    print("saved in", output)


if __name__ == "__main__":
    main()
'''

_MODEL = '''\
"""The network: DeepFM. Rules of features, such as scales, are in config.toml."""

from torch import nn

import persia


class Model(nn.Module):
    """Returns the logits of each sample."""

    def __init__(self, schema, hidden=(256, 128)):
        super().__init__()
        self.network = persia.nn.models.DeepFM(schema, hidden=hidden)

    def forward(self, dense, embeddings):
        return self.network(dense, embeddings)
'''


def file_texts(guess: Guess, folder: Path) -> dict[str, str]:
    """Returns the text of each file.

    Args:
        guess: guesses about the data set.
        folder: directory that the files will be in.
    """
    sample = guess.sample
    names = schema_names(guess)
    remote = "://" in sample.path
    batch_size, epochs = _length(guess)
    watched, why = _watched(guess)
    split = guess.split if "by" in guess.split or sample.rows >= _SMALL_ROWS else {**guess.split, "test": 0.2}
    rows = f"its {sample.rows:,} rows" if sample.complete else f"the first {sample.rows:,} rows"
    config = _CONFIG.format(
        label=toml_comment(names[guess.label.column]),
        name=toml_comment(os.path.basename(sample.path.rstrip("/"))),
        config=toml_comment(str(folder / "config.toml")),
        rows=rows,
        kind=sample.kind,
        path=toml_value(sample.path if remote else os.path.abspath(sample.path)),
        batch_size=batch_size,
        options="\n".join(f"{key} = {toml_value(value)}" for key, value in reader_options(guess, names).items()),
        order="" if guess.in_order else f"shuffle_rows = {_SHUFFLE_ROWS:_}\n",
        split=toml_value(split)[2:-2],
        schema=schema_text(guess, names),
        unused=_unused(guess, split),
        epochs=epochs,
        epochs_comment="  # At most: [trainer] ends training earlier." if epochs > _PATIENCE else "",
        fit_rows="" if sample.complete else f"\nfit_rows = {_FIT_ROWS:_}  # For scales and buckets.",
        watched=toml_value(watched),
        watched_comment=f"  # {why}",
        patience=_PATIENCE,
    )
    config = re.sub(r"\n{3,}", "\n\n", config.replace("options]\n\n", "options]\n"))
    return {"config.toml": config, "model.py": _MODEL, "train.py": _TRAIN.format(kind=sample.kind)}


def write_files(folder: Path, texts: dict[str, str]) -> None:
    """Writes files; leaves none behind if one of them cannot be written."""
    created = [directory for directory in (folder, *folder.parents) if not directory.exists()]
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            part = folder / f".{name}.part"
            written.append(part)
            part.write_text(text, encoding="utf-8")
    except OSError:
        for path in written:
            path.unlink(missing_ok=True)
        for directory in created:
            if directory.exists():
                directory.rmdir()
        raise
    for path, name in zip(written, texts, strict=True):
        path.replace(folder / name)


def _length(guess: Guess) -> tuple[int, int]:
    """Returns batch size and number of epochs."""
    rows = guess.sample.rows
    if not guess.sample.complete:
        return _MAX_BATCH, 1
    size = 16
    while size < _MAX_BATCH and 2 * size * _STEPS_OF_AN_EPOCH <= rows:
        size *= 2
    return size, min(_MAX_EPOCHS, max(1, round(_TRAINED_ROWS / rows)))


def _watched(guess: Guess) -> tuple[str, str]:
    """Returns the metric of held-out rows that decides which state is the best, and why."""
    kind = guess.label.kind
    if kind == "binary":
        return "auc", "How well rows are ordered; log_loss where predictions are used as probabilities."
    if kind in ("regression", "count"):
        return "rmse", "The label is a value; mae where large errors are no worse than several small ones."
    return "log_loss", "The label is a class; accuracy where only the first class counts."


def _unused(guess: Guess, split: dict[str, Any]) -> str:
    """Returns comments about the columns that are no features."""
    columns = [column for column in guess.of_role("unused", "time") if not column.parts]
    by_time = [column for column in columns if column.column == split.get("column")]
    left_out = [column for column in columns if column not in by_time]
    lines = []
    for title, part in (("Used for the split by time, and no feature:", by_time), ("Left out:", left_out)):
        if part:
            lines += [f"# {title}", *(f"#   {toml_comment(_unused_line(column))}" for column in part)]
    return "\n".join([*lines, ""]) if lines else ""


def _unused_line(column: ColumnGuess) -> str:
    return f"{column.column or '(no name)'}: {column.reason}"
