"""The commands `persia evaluate` and `persia predict`, which score data with a checkpoint."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from persia.cli.configured_run import Checkpoint, Config, Set, Step, closing_cluster, read_config, step_choice
from persia.cli.fitted import fitted_as_checkpoint
from persia.errors import ConfigError
from persia.printable import say

if TYPE_CHECKING:
    from persia.batching.batch import Batch
    from persia.cli.run_config import DataConfig, RunConfig
    from persia.trainer import Trainer

__all__ = ["evaluate", "predict", "restored", "scored_source"]

Data = Annotated[
    str | None,
    typer.Option("--data", help="Score this file, directory, glob or URL instead, without a split.", metavar="FILE"),
]

MAX_VALUES = 20
"""Default of --max-values."""


def evaluate(
    config: Config,
    checkpoint: Checkpoint,
    step: Step = None,
    overrides: Set = None,
    data: Data = None,
    group_by: Annotated[
        str | None,
        typer.Option(help="Also GAUC, recall@k and NDCG@k within each id of this feature.", metavar="FEATURE"),
    ] = None,
    at: Annotated[list[int] | None, typer.Option(help="k of these (repeatable; 10 by default).", metavar="K")] = None,
    by: Annotated[
        str | None,
        typer.Option("--by", help="Also all metrics for each value of this column of the source.", metavar="COLUMN"),
    ] = None,
    max_values: Annotated[
        int | None,
        typer.Option(
            help="With --by: most frequent values with a line of their own.", metavar="N", show_default=str(MAX_VALUES)
        ),
    ] = None,
    retrieval: Annotated[
        bool,
        typer.Option(
            "--retrieval",
            help="Rank each sample's item among all items instead: HR@k, NDCG@k, MRR and coverage@k. For models with "
            "two towers, such as `two_tower` and `next_item`.",
        ),
    ] = False,
    items: Annotated[
        str | None,
        typer.Option(
            help="With --retrieval: Parquet files with the features of the items that compete, as a file, directory, "
            "glob or URL. By default all rows of the item's table do.",
            metavar="FILES",
        ),
    ] = None,
    item_key: Annotated[
        str | None,
        typer.Option(help="With --retrieval: feature that identifies an item, if it has several.", metavar="NAME"),
    ] = None,
    leave_out: Annotated[
        list[str] | None,
        typer.Option(
            help="With --retrieval: ids of this feature, such as the history, do not compete (repeatable).",
            metavar="FEATURE",
        ),
    ] = None,
    json: Annotated[str | None, typer.Option(help="Write the result to this file as JSON.", metavar="FILE")] = None,
) -> None:
    """Evaluate a checkpoint on `eval_data`, or on `data` if there is none.

    The checkpoint is not modified. All samples are read: `drop_last`, `shuffle_rows` and `similar_lengths` are ignored,
    and with --data `split`, too. `where` still says which rows are samples.

        persia evaluate run.toml --checkpoint runs/a --retrieval --at 10 --at 50 --leave-out history
    """
    from persia.cli import ui as out
    from persia.nn.output import are_log_odds

    of_retrieval = {"--items": items, "--item-key": item_key, "--leave-out": leave_out}
    of_metrics = {"--group-by": group_by, "--by": by, "--max-values": max_values}
    _check_options(of_metrics if retrieval else of_retrieval, retrieval)
    out.check_writable(json)
    run = read_config(config, overrides)
    trainer, reader = restored(run, scored_source(run, data, labels=True), checkpoint, step)
    with closing_cluster(trainer):
        if retrieval:
            figures = trainer.evaluate_retrieval(
                reader, items=_items(trainer, items), key=item_key, at=at or (10,), leave_out=leave_out or ()
            )
        else:
            values = MAX_VALUES if max_values is None else max_values
            result = trainer.evaluate(reader, group_by=group_by, at=at or (10,), metrics_by=by, max_values=values)
    if retrieval:
        out.print_retrieval(f"retrieval at step {trainer.global_step:,}", figures)
        record = {"retrieval": dataclasses.asdict(figures)}
    else:
        log_odds = are_log_odds(trainer.model)
        out.print_metrics(f"evaluation at step {trainer.global_step:,}", result, log_odds=log_odds)
        record = out.metrics_record(result)
        if result.binary and math.isnan(result.auc) and _has_towers(trainer):
            say("Labels of one class have no AUC. With --retrieval, each sample's item is ranked among all items.")
    if json is not None:
        out.write_json(json, record)


def _check_options(others: dict[str, Any], retrieval: bool) -> None:
    """Raises ConfigError if an option of another evaluation is given."""
    for name, value in others.items():
        if value is not None:
            raise ConfigError(
                f"{name} {'does not fit' if retrieval else 'needs'} --retrieval; "
                f"leave {name if retrieval else 'it'} out{'' if retrieval else ', or add --retrieval'}.",
                field=name.removeprefix("--").replace("-", "_"),
            )


def _has_towers(trainer: Trainer) -> bool:
    """Returns whether the model can be evaluated with --retrieval."""
    from persia.nn.item_catalogue import with_towers

    try:
        with_towers(trainer.model)
    except ConfigError:
        return False
    return True


def _items(trainer: Trainer, files: str | None) -> Iterator[Batch] | None:
    """Returns the items that compete; None for the rows of their table."""
    from persia.nn.item_catalogue import item_features, towers_of
    from persia.serve.item_files import read_items

    if files is None:
        return None
    trainer.model.eval()
    features = item_features(towers_of(trainer.model), trainer.schema)
    return read_items(files, trainer.schema, features, trainer.state.input_rules)


def predict(
    config: Config,
    checkpoint: Checkpoint,
    output: Annotated[str, typer.Option(help="File for the predictions: .csv or .parquet.", metavar="FILE")],
    step: Step = None,
    overrides: Set = None,
    data: Data = None,
    keep: Annotated[
        list[str] | None,
        typer.Option("--keep", help="Also write this column of the source, first. Repeatable.", metavar="COLUMN"),
    ] = None,
) -> None:
    """Write predictions for `eval_data`, or for `data` if there is none.

    They are probabilities of binary labels, or for a model without probabilities, such as `two_tower`, logits, which
    rank; values of regressions and counts; and a probability for each class of other labels.
    The file has a column per label, named by its rule if it has one, or one per class, `LABEL:CLASS`; and a row per
    sample, in the order of the source: `drop_last`, `shuffle_rows` and `similar_lengths` are ignored, and with --data
    `split` and `where`, too. That file needs no labels.

        persia predict run.toml --checkpoint runs/a --data new.csv --keep user_id --output p.csv
    """
    from persia.cli import ui as out
    from persia.cli.predictions import check_keep, check_output, write_predictions

    run = read_config(config, overrides)
    source = scored_source(run, data, labels=False)
    rules = source.options.get("labels", {})
    check_output(output)
    out.check_writable(output)
    trainer, reader = restored(run, source, checkpoint, step)
    names = [
        name if answer.classes else rules.get(name, name)
        for answer in trainer.answers.of
        for name in trainer.answers.columns[answer.columns]
    ]
    check_keep(keep or [], names)
    with closing_cluster(trainer):
        rows = write_predictions(output, names, trainer.predict(reader), reader.columns(keep) if keep else None)
    say(f"Wrote {rows:,} predictions to {output}")


def scored_source(run: RunConfig, data: str | None, labels: bool) -> DataConfig:
    """Returns the source of all samples to score, in order."""
    source = (run.eval_data or run.data).in_order()
    if data is None:
        return source
    source = source.of_file(data)
    return source if labels else source.unlabelled(run.schema.label_names if run.schema is not None else ())


def restored(run: RunConfig, source: DataConfig, checkpoint: str, step: str | None) -> tuple[Trainer, Any]:
    """Returns a trainer with the checkpoint, and the reader of a source."""
    which = step_choice(step)
    run = fitted_as_checkpoint(run, checkpoint, which)
    schema = run.schema if run.schema is not None or run.eval_data is None else run.reader().schema
    reader = source.reader(schema, "eval_data" if run.eval_data else "data")
    trainer = run.build_trainer(reader.schema)
    trainer.load(checkpoint, step=which)
    return trainer, reader
