"""Writes the files of `persia init`: a configuration, a model, and a program."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from persia.cli.init.columns import ColumnGuess
from persia.cli.init.guess import Guess, quoted_column
from persia.schema.checks import MAX_NAME

__all__ = ["FILES", "file_texts", "write_files"]

FILES = ("config.toml", "model.py", "train.py")

_SHUFFLE_ROWS = 100_000
_SMALL_ROWS = 10_000
_STEPS_OF_AN_EPOCH = 200
_MAX_BATCH = 1024
_TRAINED_ROWS = 300_000
_MAX_EPOCHS = 10
_PATIENCE = 2
_SMALL_DIM, _DIM = 8, 16
_FEW_IDS = 1_000

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
labels = [{label_name}]{label_comment}
dense_features = [{dense}]
id_features = [
{features}
]
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
epochs = {epochs}{epochs_comment}

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


def reader(section):
    data = CONFIG[section]
    return persia.data.{kind}(data["path"], SCHEMA, data["batch_size"], **data["options"])


def main():
    torch.manual_seed(0)
    output = HERE / "runs" / f"{{datetime.now():%Y-%m-%d_%H-%M-%S}}"
    trainer = persia.Trainer(
        Model(SCHEMA),
        SCHEMA,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3),
        embedding_optimizer=persia.optim.Adagrad(lr=0.05),
        options=msgspec.convert(CONFIG["trainer"] | {{"checkpoint_dir": str(output)}}, persia.TrainerOptions),
    )
    result = trainer.fit(reader("data"), reader("eval_data"), epochs=CONFIG["train"]["epochs"])
    print(result)
    print(f"AUC on held-out rows: {{result.evaluation.auc:.4f}}")
    print(f"best: step {{result.best_step}}, {{result.watched}} {{result.best:.4f}}")
    print("saved in", output)


if __name__ == "__main__":
    main()
'''

_MODEL = '''\
"""The network: DeepFM on embeddings{and_numbers}."""

{import_torch}from torch import nn

import persia
{scales}

class Model(nn.Module):
    """Returns a logit for each sample."""

    def __init__(self, schema, hidden=(256, 128)):
        super().__init__()
{buffer}        self.network = persia.nn.models.DeepFM(schema, hidden=hidden)

    def forward(self, dense, embeddings):
{standardise}        return self.network(dense, embeddings)
'''

_SCALES = """
# By number x: mean and deviation of sign(x) * log(1 + |x|){where}.
SCALES = {{
{entries}
}}
"""

_BUFFER = """\
        scales = torch.tensor([SCALES[name] for name in schema.dense_names]).reshape(-1, 2)
        self.register_buffer("scales", scales)
"""

_STANDARDISE = """\
        mean, deviation = self.scales.T
        dense = (dense.sign() * dense.abs().log1p() - mean) / deviation
"""


def file_texts(guess: Guess, folder: Path) -> dict[str, str]:
    """Returns the text of each file.

    Args:
        guess: guesses about the data set.
        folder: directory that the files will be in.
    """
    sample = guess.sample
    names = _schema_names(
        [guess.label.column, *(c.column for c in guess.columns if c.role in ("id", "list", "number"))]
    )
    dense = [column for column in guess.columns if column.role == "number"]
    remote = "://" in sample.path
    batch_size, epochs = _length(guess)
    watched, why = _watched(guess)
    split = guess.split if "by" in guess.split or sample.rows >= _SMALL_ROWS else {**guess.split, "test": 0.2}
    rows = f"its {sample.rows:,} rows" if sample.complete else f"the first {sample.rows:,} rows"
    config = _CONFIG.format(
        label=_comment(names[guess.label.column]),
        name=_comment(os.path.basename(sample.path.rstrip("/"))),
        config=_comment(str(folder / "config.toml")),
        rows=rows,
        kind=sample.kind,
        path=_toml(sample.path if remote else os.path.abspath(sample.path)),
        batch_size=batch_size,
        options="\n".join(f"{key} = {_toml(value)}" for key, value in _options(guess, names).items()),
        order="" if guess.in_order else f"shuffle_rows = {_SHUFFLE_ROWS:_}\n",
        split=_toml(split)[2:-2],
        label_name=_toml(names[guess.label.column]),
        label_comment=f"  # {_comment(guess.label.reason)}",
        dense=_wrapped([_toml(names[column.column]) for column in dense]),
        features="\n".join(_features(guess, names)),
        unused=_unused(guess, split),
        epochs=epochs,
        epochs_comment="  # At most: [trainer] ends training earlier." if epochs > _PATIENCE else "",
        watched=_toml(watched),
        watched_comment=f"  # {why}",
        patience=_PATIENCE,
    )
    config = re.sub(r"\n{3,}", "\n\n", config.replace("options]\n\n", "options]\n"))
    where = "" if sample.complete else f", of the first {sample.rows:,} rows"
    entries = "\n".join(f"    {_python(names[c.column])}: ({c.scale[0]:.4g}, {c.scale[1]:.4g})," for c in dense)
    model = _MODEL.format(
        and_numbers=" and standardised numbers" if dense else "",
        import_torch="import torch\n" if dense else "",
        scales=_SCALES.format(where=where, entries=entries) if dense else "",
        buffer=_BUFFER if dense else "",
        standardise=_STANDARDISE if dense else "",
    )
    return {"config.toml": config, "model.py": model, "train.py": _TRAIN.format(kind=sample.kind)}


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
    kind = getattr(guess.label, "kind", "binary")
    if kind == "binary":
        return "auc", "How well rows are ordered; log_loss where predictions are used as probabilities."
    if kind in ("regression", "count"):
        return "rmse", "The label is a value; mae where large errors are no worse than several small ones."
    return "log_loss", "The label is a class; accuracy where only the first class counts."


def _schema_names(columns: list[str]) -> dict[str, str]:
    """Returns a valid and unique name for each column; unchanged where possible."""
    names: dict[str, str] = {}
    for number, column in enumerate(columns, 1):
        name = (
            re.sub(r"[/\0\n\r\t]", "_", column.strip()).encode()[: MAX_NAME - 4].decode(errors="ignore").strip()
            or "unnamed"
        )
        names[column] = name if name not in names.values() else f"{name[: MAX_NAME // 8]}_{number}"
    return names


def _options(guess: Guess, names: dict[str, str]) -> dict[str, Any]:
    """Returns the arguments of the reader, except arguments that select rows."""
    sample, label = guess.sample, guess.label
    used = [column for column in guess.columns if column.column in names]
    options: dict[str, Any] = {}
    if sample.kind == "csv":
        if not sample.header:
            options["column_names"] = list(sample.columns)
        if sample.delimiter != ",":
            options["delimiter"] = sample.delimiter
        if sample.numerals.decimal != ".":
            options["decimal"] = sample.numerals.decimal
        if sample.numerals.thousands:
            options["thousands"] = sample.numerals.thousands
        units = {
            names[c.column]: sample.units[c.column] for c in used if c.role == "number" and c.column in sample.units
        }
        if label.column in sample.units:
            units[label.column if label.rule else names[label.column]] = sample.units[label.column]
        if units:
            options["units"] = units
        lists = {names[column.column]: column.separator for column in used if column.separator}
        if lists:
            options["lists"] = lists
        nulls = sorted({text for column in used for text in column.nulls})
        if nulls:
            options["null_values"] = nulls
    if label.rule is not None:
        options["labels"] = {names[label.column]: label.rule}
    rename = {
        name: column for column, name in names.items() if name != column and (column != label.column or not label.rule)
    }
    if rename:
        options["rename"] = rename
    numbers = [column for column in used if column.role == "number" and (column.missing or not sample.complete)]
    if numbers:
        options["fill"] = {names[column.column]: float(f"{column.fill:.4g}") for column in numbers}
    if label.gaps:
        options["where"] = f"{quoted_column(label.column)} is not None"
    return options


def _features(guess: Guess, names: dict[str, str]) -> list[str]:
    tables = {column.column: column for column in guess.columns}
    lines = []
    for column in guess.columns:
        if column.role not in ("id", "list"):
            continue
        owner = tables[column.table] if column.table else column
        shared = {other.table for other in guess.columns}
        small = owner.role == "id" and owner.distinct <= _FEW_IDS and owner.column not in shared
        fields: dict[str, Any] = {"name": names[column.column], "dim": _SMALL_DIM if small else _DIM}
        if column.table:
            fields["table"] = names[column.table]
        if column.role == "list":
            fields["pooling"] = "mean"
        if column.max_length is not None:
            fields["max_length"] = column.max_length
        if column.text:
            fields["kind"] = "text"
        lines.append(f"  {_toml(fields)},  # {_comment(column.reason)}")
    return lines


def _unused(guess: Guess, split: dict[str, Any]) -> str:
    """Returns comments about the columns that are no features."""
    columns = [column for column in guess.columns if column.role in ("unused", "time")]
    by_time = [column for column in columns if column.column == split.get("column")]
    left_out = [column for column in columns if column not in by_time]
    lines = []
    for title, part in (("Used for the split by time, and no feature:", by_time), ("Left out:", left_out)):
        if part:
            lines += [f"# {title}", *(f"#   {_comment(_unused_line(column))}" for column in part)]
    return "\n".join([*lines, ""]) if lines else ""


def _unused_line(column: ColumnGuess) -> str:
    return f"{column.column or '(no name)'}: {column.reason}"


def _wrapped(items: list[str], width: int = 100) -> str:
    """Joins items by commas; on several lines if they are long."""
    line = ", ".join(items)
    if len(line) <= width:
        return line
    lines = [""]
    for item in items:
        if len(lines[-1]) + len(item) > width:
            lines.append("")
        lines[-1] += f"{item}, "
    return "\n" + "\n".join(f"  {line.rstrip()}" for line in lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + _wrapped([_toml(item) for item in value]) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _python(text: str) -> str:
    return _toml(text) if text.isprintable() else repr(text)


def _comment(text: str) -> str:
    """Converts a text to one line of printable characters, for a comment."""
    return "".join(c if c.isprintable() else " " for c in text)
