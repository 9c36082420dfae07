"""The command `persia importance`: the metric lost without each feature."""

from __future__ import annotations

from typing import Annotated

import typer

from persia.cli.configured_run import Set, Step, closing_cluster, read_config
from persia.cli.evaluate import restored, scored_source

__all__ = ["importance"]


def importance(
    run: Annotated[str, typer.Argument(help="Checkpoint directory of a run, such as runs/NAME/latest.", metavar="RUN")],
    config: Annotated[
        str | None,
        typer.Option(help="TOML file of the run; of runs/NAME/... it is NAME.toml by default.", metavar="CONFIG"),
    ] = None,
    step: Step = None,
    overrides: Set = None,
    data: Annotated[
        str | None,
        typer.Option("--data", help="Score this file, directory, glob or URL, without a split.", metavar="FILE"),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help='Metric, such as "log_loss", "LABEL:rmse" or "ndcg@10". By default the one for the kind of the first '
            "label, as in trainer.keep_best.",
            metavar="NAME",
        ),
    ] = None,
    group_by: Annotated[
        str | None, typer.Option(help="Feature whose ids are the groups of gauc, recall@k and ndcg@k.", metavar="NAME")
    ] = None,
    rows: Annotated[int, typer.Option(help="Number of rows, the first ones of the data.", metavar="N")] = 50_000,
    repeats: Annotated[int, typer.Option(help="Permutations of each feature.", metavar="N")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of permutations and intervals.", metavar="N")] = 0,
    json: Annotated[str | None, typer.Option(help="Write the result to this file as JSON.", metavar="FILE")] = None,
) -> None:
    """Show how much of a metric is lost without each feature.

    Scores `eval_data`, or `data` if there is none, as they are, and again with one feature permuted among the rows,
    or carrying nothing. The checkpoint is not modified. `persia report RUN` then has the result as a chart.

        persia importance runs/config/latest --metric log_loss
    """
    import msgspec

    from persia.cli import ui as out
    from persia.cli.run_folder import config_of

    out.check_writable(json)
    of_run = read_config(config or config_of(run), overrides, run)
    trainer, reader = restored(of_run, scored_source(of_run, data, labels=True), run, step)
    with closing_cluster(trainer):
        result = trainer.importance(
            reader, metric=metric, group_by=group_by, rows=rows, repeats=repeats, seed=seed, progress=True
        )
    out.CONSOLE.print(result.table())
    if json is not None:
        out.write_json(json, msgspec.to_builtins(result))
