"""Commands of `persia`. Each imports what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

import contextlib
import json as jsonlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from persia.cli.checkpoint import checkpoint_app
from persia.cli.health import health
from persia.cli.regions import cluster_app
from persia.errors import CheckpointError, ConfigError, PersiaError

if TYPE_CHECKING:
    from persia.cli.run_config import RunConfig
    from persia.trainer import Trainer

__all__ = ["app", "main"]

CONTROL_SECONDS = 10.0

app = typer.Typer(
    name="persia",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    help="Train recommenders with unbounded embedding tables. Start with `persia train examples/globo.toml`.",
)
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(cluster_app, name="cluster")
app.command()(health)
control_app = typer.Typer(no_args_is_help=True, help="Steer a run that is under way.")
app.add_typer(control_app, name="control")
bench_app = typer.Typer(no_args_is_help=True, help="Measure on this machine.")
app.add_typer(bench_app, name="bench")

Config = Annotated[str, typer.Argument(help="TOML file; see examples/*.toml.", metavar="CONFIG")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a field, e.g. `--set mode.kind=sync`; repeatable.", metavar="KEY=VALUE"),
]
Checkpoint = Annotated[str, typer.Option(help="Directory that `train --output` or `trainer.save` wrote.")]


@app.command()
def train(
    config: Config,
    overrides: Set = None,
    output: Annotated[
        str | None,
        typer.Option(
            help="Directory for checkpoints; that of --resume by default. It may not hold another run.", metavar="DIR"
        ),
    ] = None,
    json: Annotated[str | None, typer.Option(help="Write the result as JSON here.", metavar="FILE")] = None,
    resume: Annotated[
        str | None, typer.Option(help="Go on from the latest checkpoint of this directory.", metavar="DIR")
    ] = None,
    dump_config: Annotated[
        bool, typer.Option("--dump-config", help="Print the complete resolved configuration and stop.")
    ] = False,
) -> None:
    """Train a model and print its progressive AUC and speed.

    Progressive means that each batch is scored before it is trained, so the figure is on unseen data.
    """
    from persia.cli import ui as out

    run = _read(config, overrides, output or resume)
    if dump_config:
        out.print_toml(run.dump())
        return
    _check_unused(run.trainer.checkpoint_dir, resume)
    if json is not None:
        out.check_writable(json)
    reader = run.reader()
    trainer = run.build_trainer(reader.schema)
    with _ending(trainer, trains=True):
        if run.cluster.kind == "ray":
            typer.echo(f"persia health and persia control reach this run at {_control_address(trainer)}", err=True)
        if resume is not None:
            trainer.load(resume)
        trainer.resume_line = _resume_line(trainer.global_step, run.train.max_steps, config, overrides, json)
        evaluation = run.eval_data.reader(reader.schema, "eval_data") if run.eval_data is not None else None
        result = trainer.fit(reader, evaluation, epochs=run.train.epochs, max_steps=run.train.max_steps)
    out.print_fit(result, trainer.options.checkpoint_dir)
    if json is not None:
        out.write_json(json, out.fit_record(result))


@app.command()
def continual(
    config: Config,
    days: Annotated[str, typer.Option(help="First and last day to train, as in `0..6`.", metavar="A..B")],
    output: Annotated[str, typer.Option(help="Directory for checkpoints and the table of days.", metavar="DIR")],
    overrides: Set = None,
    inherit: Annotated[
        str | None,
        typer.Option(
            help="Directory of another run, from whose latest checkpoint the first day goes on.", metavar="DIR"
        ),
    ] = None,
    json: Annotated[str | None, typer.Option(help="Write the table as JSON here.", metavar="FILE")] = None,
) -> None:
    """Train a day, test on the next one before it is trained, go on; as models are kept fresh in production.

    The data must have days (an option `day` of the reader) and lie in their order. Rows, network and optimizers go on
    from day to day, with a checkpoint at the end of each. What was cut goes on with the same command; `--days 7..13`
    with the same `--output` adds days.

    A day may have a mode of its own, kept until the next entry: the GBA paper switches in this way, without tuning.

        persia continual run.toml --days 0..15 --output runs/c --set mode.kind=sync
            --set 'continual.modes.8={kind="gba", global_batch_size=8192}'
    """
    from persia.cli import continual as recipe
    from persia.cli import ui as out

    wanted = recipe.parse_days(days)
    run = _read(config, overrides, output)
    if json is not None:
        out.check_writable(json)
    todo = recipe.Recipe(run, output)
    trainer = run.build_trainer(run.reader().schema)
    again = ["continual", config, "--days", days, "--output", output, *(["--inherit", inherit] if inherit else [])]
    trainer.resume_line = lambda *_: _command(again, overrides or [], json)
    with _ending(trainer, trains=True):
        for record in todo.run(trainer, wanted, inherit):
            typer.echo(f"day {record.day} is trained in {type(record.mode).__name__}")
    out.CONSOLE.print(recipe.table(todo.records))
    if json is not None:
        out.write_json(json, [msgspec.to_builtins(record) for record in todo.records])


@app.command()
def evaluate(
    config: Config,
    checkpoint: Checkpoint,
    overrides: Set = None,
    json: Annotated[str | None, typer.Option(help="Write the result as JSON here.", metavar="FILE")] = None,
) -> None:
    """Evaluate a checkpoint on `eval_data` (or `data`, where the configuration has none); nothing is changed.

    All samples are read: `drop_last` and `shuffle_rows` of the data do not count here.
    """
    from persia.cli import ui as out

    trainer, reader = _restored(config, overrides, checkpoint)
    with _ending(trainer):
        result = trainer.evaluate(reader)
    out.print_metrics("evaluation", result)
    if json is not None:
        out.write_json(json, out.metrics_record(result))


@app.command()
def predict(
    config: Config,
    checkpoint: Checkpoint,
    output: Annotated[str, typer.Option(help="Parquet or .csv file for the probabilities.", metavar="FILE")],
    overrides: Set = None,
) -> None:
    """Write the predicted probability of every label for each sample of `eval_data` (or `data`).

    Line i belongs to sample i of the source: `shuffle_rows` and `drop_last` of the data do not count here.
    """
    from persia.cli import ui as out

    trainer, reader = _restored(config, overrides, checkpoint)
    with _ending(trainer):
        rows = out.write_predictions(output, list(trainer.schema.labels), trainer.predict(reader))
    typer.echo(f"{rows:,} predictions in {output}")


@control_app.command()
def switch(
    address: Annotated[str, typer.Argument(help="`cluster.control_address` of the run: tcp://host:port.")],
    kind: Annotated[str, typer.Argument(help="sync, hybrid, async, bsp, hop_bs, hop_bw or gba.", metavar="MODE")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="An argument of the mode: `--set global_batch_size=4096`; repeatable."),
    ] = None,
) -> None:
    """Change the mode of a running job at its next step boundary; rows, hyper-parameters and optimizer state stay.

    Where the cluster has keys, set PERSIA_CURVE_KEYS as there.
    """
    from persia import rpc
    from persia.modes import decode, encode
    from persia.services import Tokens

    arguments: dict[str, Any] = {"kind": kind}
    for override in overrides or []:
        name, found, value = override.partition("=")
        if not found:
            raise ConfigError(f"--set {override}: write NAME=VALUE.", field="set")
        try:
            arguments[name] = jsonlib.loads(value)
        except jsonlib.JSONDecodeError:
            arguments[name] = value
    mode = decode(jsonlib.dumps(arguments))
    tokens = rpc.connect(address, Tokens, peer="the run", timeout=CONTROL_SECONDS)
    try:
        tokens.request(encode(mode))
    finally:
        rpc.close(tokens)
    typer.echo(f"The run at {address} goes over to {mode} at its next step boundary.")


@bench_app.command()
def modes(
    workers: Annotated[int, typer.Option(help="Emulated NN workers.")] = 8,
    slow: Annotated[str, typer.Option(help="So many are so much slower: `2:4x`.")] = "2:4x",
    compute: Annotated[str, typer.Option(help="How long a batch computes: it is waited.")] = "20ms",
    trace: Annotated[
        str | None,
        typer.Option(help="In place of --workers and --slow: the file of a cluster day.", metavar="FILE"),
    ] = None,
    steps: Annotated[int, typer.Option(help="Batches per NN worker, on average.")] = 60,
    json: Annotated[str | None, typer.Option(help="Write the table as JSON here.", metavar="FILE")] = None,
) -> None:
    """Compare all modes while some NN workers are slow. Computing is emulated by waiting."""
    from persia.cli import ui as out
    from persia.testing import emulation

    found = emulation.compare(emulation.Emulation.parse(workers, slow, compute, trace), steps)
    typer.echo(emulation.table(found))
    if json is not None:
        out.write_json(json, [emulation.record(line) for line in found])


@bench_app.command()
def rehearse(
    evidence: Annotated[str, typer.Argument(help="`auto.json` in the `log_dir` of a run.", metavar="FILE")],
    config: Config,
    overrides: Set = None,
) -> None:
    """Say what the mode Auto of a configuration would have decided in a run that is over, window by window."""
    from persia.modes import Auto, load_evidence
    from persia.modes import rehearse as decisions

    mode = _read(config, overrides).mode
    if not isinstance(mode, Auto):
        raise ConfigError(f"The mode of {config} is {mode}; set one of kind = 'auto'.", field="mode")
    for verdict in decisions(mode, load_evidence(evidence).steps):
        typer.echo(str(verdict))


def main() -> Any:
    """Runs the command line; errors of persia are one line, not a traceback."""
    try:
        return app()
    except (PersiaError, OSError) as error:
        print(f"persia: {error}", file=sys.stderr)
        return sys.exit(1)


def _read(config: str, overrides: list[str] | None, output: str | None = None) -> RunConfig:
    from persia.cli.run_config import RunConfig
    from persia.config import read

    changes = list(overrides or [])
    if output is not None:
        changes.append(f"trainer.checkpoint_dir={jsonlib.dumps(output)}")
    return read(config, changes, RunConfig)


@contextlib.contextmanager
def _ending(trainer: Trainer, trains: bool = False) -> Iterator[None]:
    """Ends the processes of the trainer's cluster, if it has any, after the block.

    SIGINT and SIGTERM end the program with status 130 and 143; where it trains, they tell what is kept.
    """
    from persia.services import ProcessCluster
    from persia.trainer import signals

    with signals.terminable():
        try:
            yield
        except (KeyboardInterrupt, SystemExit) as error:
            if trains and signals.TOLD not in getattr(error, "__notes__", []):  # Not in `fit`, which has said so.
                signals.say(f"Stopped. {signals.kept(trainer)}")
            if isinstance(error, KeyboardInterrupt):
                raise SystemExit(130) from None
            raise
        finally:
            if isinstance(trainer.cluster, ProcessCluster):
                trainer.cluster.close()


def _resume_line(
    first: int, most: int | None, config: str, overrides: list[str] | None, json: str | None
) -> Callable[[str, int], str]:
    """The command that goes on with `persia train`, which began at step `first` and was to make `most` steps."""

    def line(directory: str, step: int) -> str:
        changes = [o for o in overrides or [] if not o.startswith("train.max_steps=")]
        if most is not None:
            changes.append(f"train.max_steps={max(1, first + most - step)}")
        return _command(["train", config, "--resume", directory], changes, json)

    return line


def _command(words: list[str], overrides: list[str], json: str | None) -> str:
    options = [word for override in overrides for word in ("--set", override)]
    return shlex.join(["persia", *words, *options, *(["--json", json] if json is not None else [])])


def _control_address(trainer: Trainer) -> str:
    from persia.cluster import Ray

    assert isinstance(trainer.cluster, Ray)
    return trainer.cluster.control_address


def _check_unused(output: str | None, resume: str | None) -> None:
    """Refuses a directory with checkpoints of a run other than the one that is resumed: they would be mixed."""
    from persia.checkpoint import list_checkpoints

    # Equal URLs stay equal under `realpath`, for which they are strange relative paths.
    if output is None or (resume is not None and os.path.realpath(resume) == os.path.realpath(output)):
        return
    if found := list_checkpoints(output):
        raise CheckpointError(
            f"{output} holds another run, trained to step {found[-1].step}. Go on with that one by --resume {output}, "
            "or give another directory as --output (or trainer.checkpoint_dir).",
            path=output,
        )


def _restored(config: str, overrides: list[str] | None, checkpoint: str) -> tuple[Trainer, Any]:
    run = _read(config, overrides)
    source = (run.eval_data or run.data).in_order()
    schema = run.schema if run.schema is not None or run.eval_data is None else run.reader().schema
    reader = source.reader(schema, "eval_data" if run.eval_data else "data")
    trainer = run.build_trainer(reader.schema)
    trainer.load(checkpoint)
    return trainer, reader
