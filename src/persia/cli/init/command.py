"""The command `persia init`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from persia.errors import ConfigError, DataError
from persia.printable import printable, say

if TYPE_CHECKING:
    from persia.batching.numerals import Numerals
    from persia.cli.init.guess import Guess
    from persia.cli.init.guessed_columns import ColumnGuess, ColumnValues
    from persia.cli.init.label_guess import LabelGuess
    from persia.cli.init.sample import Sample

__all__ = ["init"]

_FITTED_ROWS = 65_536
"""Rows that rules are fitted to here, for batches whose labels are looked at."""
_TRIED_BATCHES = 100
_USES = {
    "id": "id",
    "list": "list",
    "text": "words",
    "number": "number",
    "time": "time",
    "weights": "weights of a list",
    "sample_weight": "weight of samples",
    "group": "group",
    "unused": "left out",
}
"""Names of uses in the table, by role, in its order."""


def init(
    data: Annotated[
        str, typer.Argument(help="Parquet, CSV or JSON lines: a file, directory, glob or URL.", metavar="DATA")
    ],
    out: Annotated[
        str | None, typer.Option("--out", help="Directory to write to. Defaults to NAME_model here.", metavar="DIR")
    ] = None,
    label: Annotated[str | None, typer.Option(help="Column to predict. Guessed by default.", metavar="COLUMN")] = None,
    owner: Annotated[
        str | None,
        typer.Option(
            help="Column of the user or session of each event in DATA, whose next item is predicted.", metavar="COLUMN"
        ),
    ] = None,
    item: Annotated[
        str | None, typer.Option(help="Column of the item of each event. Guessed by default.", metavar="COLUMN")
    ] = None,
    time: Annotated[
        str | None, typer.Option(help="Column of the time of each event. Guessed by default.", metavar="COLUMN")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Take all guesses without asking.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files of an earlier `persia init`.")] = False,
) -> None:
    """Write a configuration that trains on your data, with a model and a program.

    Guesses from the first rows which column is the label and of which kind, and by which rules the others enter the
    model: numbers, ids, lists, texts, times and weights. Asks on a terminal where it is unsure. Then
    `persia train DIR/config.toml` and `python DIR/train.py` train as they are.

        persia init clicks.parquet --label clicked

    With --owner, each row is an event, such as an item that a user chose, and needs no label. Writes a configuration
    only, which predicts the item after each event of a user.

        persia init log.csv --owner user
    """
    from persia.cli.init.files import FILES, write_files
    from persia.cli.init.guess import guess as guess_columns
    from persia.cli.init.guessed_columns import plain_values
    from persia.cli.init.label_guess import described, label_from
    from persia.cli.init.sample import read_sample

    folder = Path(out or f"{_stem(data)}_model").resolve()
    present = [name for name in FILES if (folder / name).exists()]
    if present and not force:
        raise ConfigError(
            f"{folder} has {' and '.join(present)} already; give another directory with --out, or overwrite with "
            "--force.",
            path=str(folder),
        )
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; give another directory with --out.", path=str(folder))
    if owner is None and (item or time) is not None:
        raise ConfigError("--item and --time are for a log of events; name whose they are with --owner.", field="owner")
    if owner is not None and label is not None:
        raise ConfigError("--label and --owner exclude each other: events need no label; leave one out.", field="label")
    sample = read_sample(data)
    values = {name: plain_values(array) for name, array in sample.columns.items()}
    if owner is not None:
        _init_next_item(sample, values, (owner, item, time), folder)
        return
    if label is not None:
        if label not in values:
            raise ConfigError(f"{data} has no column {label!r}; it has {described(sample)}.", field="label")
        chosen = label_from(sample, label, values[label])
    else:
        chosen = _choose_label(sample, values, yes)
    asks = sys.stdin.isatty() and not yes
    if asks:
        chosen = _ask_kind(sample, chosen, values)
    guess = guess_columns(sample, chosen, values)
    if asks:
        guess = guess._replace(columns=[_ask(column) for column in guess.columns])
    texts = _working(guess, folder)
    write_files(folder, texts)
    _report(guess, texts["config.toml"], folder)


def _init_next_item(
    sample: Sample, values: dict[str, ColumnValues], columns: tuple[str, str | None, str | None], folder: Path
) -> None:
    """Writes the configuration of a log of events with these columns of the owner, the item and the time."""
    from persia.cli.init.files import write_files
    from persia.cli.init.next_item import guess_next_item, next_item_config
    from persia.telemetry.terminal import DataConsole, Grid

    stale = [name for name in ("model.py", "train.py") if (folder / name).exists()]
    if stale:
        raise ConfigError(
            f"{folder} has {' and '.join(stale)} of another model, which read config.toml; give another directory with "
            "--out.",
            path=str(folder),
        )
    guess = guess_next_item(sample, values, *columns)
    write_files(folder, {"config.toml": next_item_config(guess, folder)})
    table = Grid("column", "use", text=["column", "use"], title=sample.path)
    for column, use in ((guess.owner, "owner"), (guess.item, "item"), (guess.time, "time")):
        table.add_row(column.column, use)
    for name in guess.unused:
        table.add_row(name, _USES["unused"])
    DataConsole().print(table)
    config, run = (_shown(folder, name) for name in ("config.toml", "runs/config/latest"))
    say(f"Wrote config.toml to {folder}. Next:\n")
    say(f"  persia train {config}")
    test = "--retrieval --set eval_data.options.leave_one_out=test"
    say(f"  persia evaluate {config} --checkpoint {run} --step best {test}\n")


def _stem(data: str) -> str:
    """Returns a name for the directory of a data set: the name of its file, or of the folder of a glob."""
    parts = [part for part in re.split(r"[/\\]", data) if part and not any(c in part for c in "*?[") and part != ".."]
    name = re.split(r"\.(?=[A-Za-z])", parts[-1])[0] if parts else ""
    return re.sub(r"\W+", "_", name).strip("_") or "data"


def _choose_label(sample: Sample, values: dict[str, ColumnValues], yes: bool) -> LabelGuess:
    """Returns the likeliest label, or the column that the user chooses.

    Raises:
        ConfigError: several columns are likely, and the user cannot be asked.
        DataError: no column is likely, and the user cannot be asked.
    """
    from persia.cli.init.label_guess import guess_label, label_from

    asks = sys.stdin.isatty() and not yes
    candidates: list[LabelGuess] = []
    try:
        candidates = guess_label(sample, values)
    except DataError as error:
        if not asks:
            raise
        say(error.message)
    if candidates and (candidates[0].sure or yes):
        return candidates[0]
    if not asks:
        names = ", ".join(label.column for label in candidates)
        raise ConfigError(
            f"{sample.path}: unsure which column to predict: {names}. Name it with --label COLUMN, or take "
            f"{candidates[0].column!r} with --yes.",
            field="label",
        )
    if candidates:
        say("Columns that may be the label:")
    for label in candidates:
        say(f"  {label.column}: {label.reason}")
    question = "Which column do you want to predict?"
    if candidates:
        question = printable(f"{question} [{candidates[0].column}]")
    while True:
        name = typer.prompt(question, default=candidates[0].column if candidates else None, show_default=False)
        if name not in values:
            say(f"Choose one of: {', '.join(values)}")
            continue
        try:
            return label_from(sample, name, values[name])
        except DataError as error:
            say(error.message)


def _ask_kind(sample: Sample, label: LabelGuess, values: dict[str, ColumnValues]) -> LabelGuess:
    """Asks whether numbers of a label are values, or positive from one of them on."""
    from persia.cli.init.label_guess import label_from

    if not label.binary:
        return label
    question = printable(f"{label.column} has {label.reason}. Predict the value, or whether {label.binary}? value/rule")
    while (answer := typer.prompt(question, default="value")) not in ("value", "rule"):
        say("Answer value or rule.")
    return label if answer == "value" else label_from(sample, label.column, values[label.column], "binary")


def _ask(column: ColumnGuess) -> ColumnGuess:
    """Asks how a column of numbers is used, if that is not clear."""
    if column.sure:
        return column
    if column.role == "sample_weight":
        question = printable(f"{column.column} has {column.reason}. Does it say how much each sample counts?")
        if typer.confirm(question, default=True):
            return column
        return column._replace(role="number", reason="numbers, as you said")
    if column.role not in ("id", "number"):
        return column
    question = f"{column.column} has {column.distinct:,} different {column.reason}. Is it an id or a number?"
    question = printable(question)
    while (answer := typer.prompt(question, default=column.role)) not in ("id", "number"):
        say("Answer id or number.")
    return column if answer == column.role else column._replace(role=answer, reason="as you said")


def _working(guess: Guess, folder: Path) -> dict[str, str]:
    """Returns files whose configuration reads different labels in the training and in the held-out rows.

    Raises:
        DataError: the reader refuses the rows, or there are too few of one label, or of one class.
    """
    from persia.cli.init.files import file_texts

    splits = [
        guess.split,
        *({"test": share} for share in (0.2, 0.3, 0.5) if "by" in guess.split or guess.sample.complete),
    ]
    for split in splits:
        texts = file_texts(guess._replace(split=split), folder)
        if _reads_several_labels(texts["config.toml"]):
            return texts
    raise DataError(
        f"{guess.sample.path}: {guess.label.column!r} is the same in too many rows to train on some and test on "
        f"others ({guess.label.reason}); give more rows, or another column with --label.",
        path=guess.sample.path,
    )


def _reads_several_labels(config: str) -> bool:
    """Whether the training and the held-out rows have positive and negative labels, or different values."""
    import itertools
    import tomllib

    from persia.cli.run_config import RunConfig
    from persia.config import convert
    from persia.data.fit import fit_features

    run = convert(tomllib.loads(config), RunConfig, "config.toml")
    assert run.schema is not None
    schema = fit_features(run.schema, run.reader(), _FITTED_ROWS)
    assert run.eval_data is not None
    parts = []
    for section, name in ((run.data.in_order(), "data"), (run.eval_data, "eval_data")):
        seen: set[float] = set()
        try:
            for batch in itertools.islice(section.reader(schema, name), _TRIED_BATCHES):
                seen |= set((batch.labels > 0.5 if schema.binary else batch.labels).ravel().tolist())
        except DataError as error:
            if "select no rows" not in error.message:
                raise
        parts.append(len(seen) >= 2)
    return all(parts)


def _report(guess: Guess, config: str, folder: Path) -> None:
    """Prints the guesses, the files that were written, and the commands to run next."""
    import tomllib

    from persia.cli.init.files import FILES
    from persia.telemetry.terminal import DataConsole, Grid

    sample, label = guess.sample, guess.label
    split = tomllib.loads(config)["eval_data"]["options"]["split"]
    columns = ("column", "use", "because")
    table = Grid(*columns, text=columns, title=sample.path)
    table.add_row(label.column, "label" if label.kind == "binary" else f"label, {label.kind}", label.reason)
    for column in sorted(guess.columns, key=lambda c: list(_USES).index(c.role)):
        use = _USES[column.role]
        if column.role == "time":
            uses = [*column.parts, *(["split"] if split.get("column") == column.column else [])]
            use = ", ".join(uses) or "left out"
        table.add_row(column.column, use, "; ".join(filter(None, (column.reason, *_rules(column)))))
    DataConsole().print(table)
    said = []
    if sample.kind == "csv":
        lines = "the first line has the names" if sample.header else "no line of names"
        said.append(f"Fields are separated by {sample.delimiter!r}; {lines}.")
    if not sample.numerals.plain:
        said.append(f"Numbers are written with {_written(sample.numerals)}.")
    if sample.units:
        said.append(f"Amounts: {', '.join(f'{name} in {unit}' for name, unit in sample.units.items())}.")
    if said:
        say(" ".join(said))
    if split.get("by") == "hash":
        say(f"Held out for testing: {split['test']:.0%} of the rows, by {split['column']}, so that groups stay whole.")
    elif "by" in split:
        say(f"Held out for testing: the last tenth by {split['column']}, from {split['at']} on.")
    else:
        say(f"Held out for testing: {split['test']:.0%} of the rows, at random; `split` in config.toml says so.")
    say(f"Wrote {', '.join(FILES)} to {folder}. Next:\n")
    config, program, run = (_shown(folder, name) for name in ("config.toml", "train.py", "runs/config/latest"))
    say(f"  persia train {config}")
    say(f"  persia evaluate {config} --checkpoint {run} --step best")
    say(f"  persia predict {config} --checkpoint {run} --step best --data NEW_FILE --output predictions.csv")
    say(f"  python {program}\n")


def _rules(column: ColumnGuess) -> list[str]:
    """Returns the rules by which a number enters, for the table."""
    if column.role != "number":
        return []
    missing = [f"{column.missing:.2g} missing, filled with the mean"] if column.missing else []
    return [*missing, *(["skewed: logarithm"] if column.log else []), column.bucket_reason]


def _written(numerals: Numerals) -> str:
    parts = ["a decimal comma"] if numerals.decimal == "," else []
    if numerals.thousands:
        parts.append(f"{numerals.thousands!r} between thousands")
    return " and ".join(parts)


def _shown(folder: Path, name: str) -> str:
    """Returns the path of a file, quoted for a shell; relative if the file is inside the working directory."""
    import shlex

    here = Path.cwd()
    return shlex.quote(str((folder.relative_to(here) if folder.is_relative_to(here) else folder) / name))
