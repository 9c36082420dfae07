"""The command `persia continual`: training day by day."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from persia.cli.configured_run import Config, Set, Step, closing_cluster, command_line, read_config, step_choice
from persia.cli.fitted import fitted_run
from persia.errors import ConfigError
from persia.printable import say

__all__ = ["continual"]


def continual(
    config: Config,
    days: Annotated[str, typer.Option(help="First and last day to train, inclusive: `0..6`.", metavar="A..B")],
    output: Annotated[str, typer.Option(help="Directory for checkpoints and the results of each day.", metavar="DIR")],
    overrides: Set = None,
    inherit: Annotated[
        str | None,
        typer.Option(
            help="Start the first day from a checkpoint of another run in this directory; `--step` says which.",
            metavar="DIR",
        ),
    ] = None,
    step: Step = None,
    restart_data: Annotated[
        bool,
        typer.Option("--restart-data", help="Begin an interrupted day at its first batch, with what it has trained."),
    ] = False,
    new_optimizer: Annotated[
        bool,
        typer.Option(
            "--new-optimizer",
            help="Allow another optimizer than the checkpoint's, and reset its state.",
        ),
    ] = False,
    json: Annotated[str | None, typer.Option(help="Write the table to this file as JSON.", metavar="FILE")] = None,
) -> None:
    """Train day by day; test on each next day before training on it.

    This is how production systems keep a model fresh. The reader needs a `day` option, and the data must be sorted by
    day. Rows, network and optimizer state carry over from day to day, and each day ends with a checkpoint. Run the
    same command again to resume after an interruption. Run it with `--days 7..13` and the same `--output` to add days.

    `continual.modes` sets the mode from a given day on. The GBA paper switches modes in this way, without re-tuning.

        persia continual run.toml --days 0..15 --output runs/c --set mode.kind=sync
            --set 'continual.modes.8={kind="gba", global_batch_size=8192}'
    """
    from persia.cli import continual as recipe
    from persia.cli import ui as out

    requested = recipe.parse_days(days)
    if step is not None and inherit is None:
        raise ConfigError("--step names the checkpoint of --inherit; give --inherit DIR too.", field="step")
    which = step_choice(step)
    run = read_config(config, overrides, output)
    ignored = [name for name in recipe.STEERING if getattr(run.trainer, name) is not None]
    if ignored:
        names = ", ".join(f"trainer.{name}" for name in ignored)
        say(f"Continual training scores each day before it trains on it, and ignores {names}.", error=True)
        trainer_options = msgspec.structs.replace(run.trainer, **dict.fromkeys(ignored))
        run = msgspec.structs.replace(run, trainer=trainer_options)
    out.check_writable(json)
    directory, continued = recipe.continued(output, inherit, which)
    run = fitted_run(run, directory, step=continued)
    todo = recipe.Recipe(run, output)
    trainer = run.build_trainer(run.reader().schema)
    words = ["continual", config, "--days", days, "--output", output, *(["--inherit", inherit] if inherit else [])]
    words += ["--step", step] if step else []
    trainer.resume_line = lambda *_: command_line(words, overrides or [], json)
    with closing_cluster(trainer, trains=True):
        trained = 0
        records = todo.run(
            trainer, requested, inherit, step=which, restart_data=restart_data, new_optimizer=new_optimizer
        )
        for record in records:
            trained += 1
            say(f"day {record.day} is trained in {type(record.mode).__name__}")
    out.CONSOLE.print(recipe.table(todo.records))
    if json is not None:
        out.write_json(json, [msgspec.to_builtins(record) for record in todo.records])
    if not trained:
        say(f"Nothing was left to train: days {days} are trained in {output}. To train on, give later --days.")
