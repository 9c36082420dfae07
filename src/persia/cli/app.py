"""The commands of `persia`. Each imports its dependencies when it runs, so that `--help` is fast."""

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

from persia import __version__
from persia.cli.checkpoint import checkpoint_app, export
from persia.cli.export_onnx import export_onnx
from persia.cli.health import health
from persia.cli.init import init
from persia.cli.plan import plan, rates
from persia.cli.regions import cluster_app
from persia.cli.report import report
from persia.cli.serve import serve
from persia.cli.serve_rows import serve_rows
from persia.cli.top import top
from persia.cli.trace import trace
from persia.errors import CheckpointError, ConfigError, MissingExtraError, PersiaError

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
    help="Train recommenders with unbounded embedding tables in plain PyTorch.",
    epilog="Start with `persia init YOUR_FILE.csv`, which writes files that train as they are.",
)
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(cluster_app, name="cluster")
app.command()(init)
app.command()(export)  # Also `persia checkpoint export`.
app.command("export-onnx")(export_onnx)
app.command()(health)
app.command()(plan)
app.command()(top)
app.command()(trace)
app.command()(report)
app.command()(serve)
app.command("serve-rows")(serve_rows)
control_app = typer.Typer(no_args_is_help=True, help="Control a running job.")
app.add_typer(control_app, name="control")
bench_app = typer.Typer(no_args_is_help=True, help="Measure rates, compare training modes, and rehearse mode choice.")
app.add_typer(bench_app, name="bench")
bench_app.command()(rates)

Config = Annotated[str, typer.Argument(help="TOML file; see examples/*.toml.", metavar="CONFIG")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Override a field, for example `--set mode.kind=sync`. Repeatable.", metavar="KEY=VALUE"
    ),
]
Checkpoint = Annotated[
    str, typer.Option(help="Checkpoint directory written by `train --output` or `trainer.save`.", metavar="DIR")
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"persia {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Holds the options of `persia` itself; every other option belongs to a command."""


@app.command()
def train(
    config: Config,
    overrides: Set = None,
    output: Annotated[
        str | None,
        typer.Option(
            help="Directory for checkpoints. Defaults to that of --resume. Must not hold another run.", metavar="DIR"
        ),
    ] = None,
    json: Annotated[str | None, typer.Option(help="Write the result to this file as JSON.", metavar="FILE")] = None,
    resume: Annotated[
        str | None, typer.Option(help="Continue from the latest checkpoint in this directory.", metavar="DIR")
    ] = None,
    ui: Annotated[
        bool, typer.Option("--ui", help="Show the run on a page at 127.0.0.1, while it trains; see `observe.ui_port`.")
    ] = False,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Run the trials of [sweep] in folders of --output, and keep the best.")
    ] = False,
    dump_config: Annotated[
        bool, typer.Option("--dump-config", help="Print the resolved configuration with all defaults, and exit.")
    ] = False,
) -> None:
    """Train a model; report progressive AUC and rows per second.

    Progressive metrics score each batch before training on it, so they measure quality on unseen data.
    """
    from persia.cli import ui as out

    run = _read(config, overrides, output or resume)
    if dump_config:
        out.print_toml(run.dump())
        return
    _check_unused(run.trainer.checkpoint_dir, resume)
    if json is not None:
        out.check_writable(json)
    if sweep:
        _sweep(config, overrides, output, resume, json)
        return
    reader = run.reader()
    trainer = run.build_trainer(reader.schema)
    with _ending(trainer, trains=True):
        if run.cluster.kind == "ray":
            typer.echo(
                f"Control address for `persia health` and `persia control`: {_control_address(trainer)}", err=True
            )
        if resume is not None:
            trainer.load(resume)
        trainer.resume_line = _resume_line(trainer.global_step, run.train.max_steps, config, overrides, json)
        evaluation = run.eval_data.reader(reader.schema, "eval_data") if run.eval_data is not None else None
        with _page(trainer, run.observe.ui_port) if ui else contextlib.nullcontext():
            result = trainer.fit(reader, evaluation, epochs=run.train.epochs, max_steps=run.train.max_steps)
    out.print_fit(result, trainer.options.checkpoint_dir)
    if json is not None:
        out.write_json(json, out.fit_record(result))


def _sweep(config: str, overrides: list[str] | None, output: str | None, resume: str | None, json: str | None) -> None:
    from persia.cli import ui as out
    from persia.config import load

    if output is None or resume is not None:
        raise ConfigError("--sweep needs --output, and does not go with --resume.", field="sweep")
    try:
        from persia.cli.sweep import Sweep
    except ImportError as error:
        raise MissingExtraError('--sweep needs Optuna: pip install "persia[optuna]".', extra="optuna") from error
    trials = Sweep(load(config, overrides or []), output, _ending)
    trials.run(lambda r: typer.echo(f"trial {r.number} {r.state}: {r.metric:.4f} with {jsonlib.dumps(r.values)}"))
    out.CONSOLE.print(trials.table())
    if trials.best is not None:
        typer.echo(f"Best configuration: {output}/best.toml, trained in {trials.folder(trials.best.number)}/checkpoint")
    if json is not None:
        out.write_json(json, [record._asdict() for record in trials.records])


@app.command()
def continual(
    config: Config,
    days: Annotated[str, typer.Option(help="First and last day to train, inclusive: `0..6`.", metavar="A..B")],
    output: Annotated[str, typer.Option(help="Directory for checkpoints and the results of each day.", metavar="DIR")],
    overrides: Set = None,
    inherit: Annotated[
        str | None,
        typer.Option(
            help="Start the first day from the latest checkpoint of another run, in this directory.", metavar="DIR"
        ),
    ] = None,
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


@app.command("import")
def import_(
    config: Config,
    source: Annotated[
        str,
        typer.Argument(
            help="Directory of TABLE.parquet or TABLE.safetensors files, or of torch.distributed.checkpoint.",
            metavar="SOURCE",
        ),
    ],
    output: Annotated[str, typer.Option(help="Directory for the checkpoint. Must not hold a run.", metavar="DIR")],
    overrides: Set = None,
    table: Annotated[
        list[str] | None, typer.Option("--table", help="Table to import. Repeatable. Defaults to all.", metavar="NAME")
    ] = None,
) -> None:
    """Start a run with the embeddings of another one, or of another library.

    Writes a checkpoint with these rows and a new network, which `persia train CONFIG --resume DIR` continues. The files
    are those that `persia export` writes; see `persia.interop.import_rows`. A directory that
    torch.distributed.checkpoint wrote needs tables of TorchRec; read only those that you trust.
    """
    from pathlib import Path

    from persia.interop import import_rows
    from persia.interop.torchrec import import_dcp

    run = _read(config, overrides, output)
    _check_unused(output, None)
    read = import_dcp if (Path(source) / ".metadata").exists() else import_rows
    trainer = run.build_trainer(run.reader().schema)
    with _ending(trainer):
        done = read(trainer.embeddings, source, tables=table)
        path = trainer.save(output)
    for name, rows in done.items():
        evicted = f", {rows.evicted:,} of them evicted" if rows.evicted else ""
        typer.echo(f"{name}: {rows.inserted + rows.replaced:,} rows{evicted}")
    typer.echo(f"Wrote {path}. Next: {_command(['train', config, '--resume', output], overrides or [], None)}")


@app.command()
def evaluate(
    config: Config,
    checkpoint: Checkpoint,
    overrides: Set = None,
    group_by: Annotated[
        str | None,
        typer.Option(help="Also GAUC, recall@k and NDCG@k within each id of this feature.", metavar="FEATURE"),
    ] = None,
    at: Annotated[list[int] | None, typer.Option(help="k of these (repeatable; 10 by default).", metavar="K")] = None,
    json: Annotated[str | None, typer.Option(help="Write the result to this file as JSON.", metavar="FILE")] = None,
) -> None:
    """Evaluate a checkpoint on `eval_data`, or on `data` if there is none.

    The checkpoint is not modified. All samples are read: `drop_last` and `shuffle_rows` are ignored.
    """
    from persia.cli import ui as out

    trainer, reader = _restored(config, overrides, checkpoint)
    with _ending(trainer):
        result = trainer.evaluate(reader, group_by=group_by, at=at or (10,))
    out.print_metrics("evaluation", result)
    if json is not None:
        out.write_json(json, out.metrics_record(result))


@app.command()
def predict(
    config: Config,
    checkpoint: Checkpoint,
    output: Annotated[str, typer.Option(help="File for the probabilities: .csv, else Parquet.", metavar="FILE")],
    overrides: Set = None,
) -> None:
    """Write predicted probabilities for `eval_data`, or for `data` if there is none.

    The file has a column per label and a row per sample, in the order of the source: `drop_last` and `shuffle_rows`
    are ignored.
    """
    from persia.cli import ui as out

    trainer, reader = _restored(config, overrides, checkpoint)
    with _ending(trainer):
        rows = out.write_predictions(output, list(trainer.schema.labels), trainer.predict(reader))
    typer.echo(f"Wrote {rows:,} predictions to {output}")


@control_app.command()
def switch(
    address: Annotated[str, typer.Argument(help="`cluster.control_address` of the run: tcp://host:port.")],
    kind: Annotated[
        str,
        typer.Argument(help="sync, hybrid, async, bsp, hop_bs, hop_bw, gba, or one of --import.", metavar="MODE"),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Set an argument of the mode: `--set global_batch_size=4096`. Repeatable."),
    ] = None,
    modules: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            help="Import a module with a mode of your own; the job must import it too. Repeatable.",
            metavar="MODULE",
        ),
    ] = None,
) -> None:
    """Switch a running job to another mode at its next step boundary.

    Rows, hyper-parameters and optimizer state are kept. If the cluster uses CURVE keys, set PERSIA_CURVE_KEYS as the
    cluster does.
    """
    from persia import rpc
    from persia.cli.imports import import_modules
    from persia.modes import decode
    from persia.services import Tokens

    arguments: dict[str, Any] = {"kind": kind}
    for override in overrides or []:
        name, found, value = override.partition("=")
        if not found:
            raise ConfigError(f"Invalid --set {override}; expected NAME=VALUE.", field="set")
        try:
            arguments[name] = jsonlib.loads(value)
        except jsonlib.JSONDecodeError:
            arguments[name] = value
    import_modules(modules or [])
    mode = decode(jsonlib.dumps(arguments))
    tokens = rpc.connect(address, Tokens, peer="the run", timeout=CONTROL_SECONDS)
    try:
        tokens.request(mode)
    finally:
        rpc.close(tokens)
    typer.echo(f"The run at {address} switches to {mode} at its next step boundary.")


@bench_app.command()
def modes(
    workers: Annotated[int, typer.Option(help="Number of emulated NN workers.")] = 8,
    slow: Annotated[str, typer.Option(help="Number of slow workers and their slowdown: `2:4x`.")] = "2:4x",
    compute: Annotated[str, typer.Option(help="Emulated compute time per batch.")] = "20ms",
    trace: Annotated[
        str | None,
        typer.Option(
            help="Replay the worker speeds recorded in this file; replaces --workers and --slow.", metavar="FILE"
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Mean number of batches per NN worker.")] = 60,
    json: Annotated[str | None, typer.Option(help="Write the table to this file as JSON.", metavar="FILE")] = None,
) -> None:
    """Compare the speed of all modes while some NN workers are slow.

    Compute time is emulated by sleeping, so one machine can stand for many. Hybrid is compared as it is after its
    warm-up.
    """
    from persia.cli import ui as out
    from persia.testing import emulation

    found = emulation.compare(emulation.Emulation.parse(workers, slow, compute, trace), steps)
    typer.echo(emulation.table(found))
    if json is not None:
        out.write_json(json, [emulation.record(line) for line in found])


@bench_app.command()
def rehearse(
    evidence: Annotated[str, typer.Argument(help="`auto.json` from the `log_dir` of a run.", metavar="FILE")],
    config: Config,
    overrides: Set = None,
) -> None:
    """Show which modes `auto` would have chosen in a finished run.

    Prints one decision per window of recorded step timings.
    """
    from persia.modes import Auto, load_evidence
    from persia.modes import rehearse as decisions

    mode = _read(config, overrides).mode
    if not isinstance(mode, Auto):
        raise ConfigError(f"Invalid mode {mode} in {config}; rehearse needs mode.kind = 'auto'.", field="mode")
    for choice in decisions(mode, load_evidence(evidence).steps):
        typer.echo(str(choice))


def main() -> Any:
    """Runs the command line. Prints a PersiaError or OSError as one line, without a traceback."""
    try:
        return app()
    except (PersiaError, OSError) as error:
        print(f"persia: {error}", file=sys.stderr)
        return sys.exit(1)


def _read(config: str, overrides: list[str] | None, output: str | None = None) -> RunConfig:
    from persia.cli.imports import Imports, add_folder, import_modules
    from persia.cli.run_config import RunConfig
    from persia.config import convert, load

    changes = list(overrides or [])
    if output is not None:
        changes.append(f"trainer.checkpoint_dir={jsonlib.dumps(output)}")
    tree = load(config, changes)
    add_folder(config)
    import_modules(convert(tree, Imports, config).imports)
    return convert(tree, RunConfig, config)


@contextlib.contextmanager
def _ending(trainer: Trainer, trains: bool = False) -> Iterator[None]:
    """Closes the trainer's cluster after the block.

    SIGINT and SIGTERM end the program with status 130 and 143. If the command trains, it also prints which state has
    been saved.
    """
    from persia.services import ProcessCluster
    from persia.trainer import signals

    with signals.terminable():
        try:
            yield
        except (KeyboardInterrupt, SystemExit) as error:
            if trains and signals.REPORTED not in getattr(error, "__notes__", []):  # Not within `fit`.
                signals.say(f"Stopped. {signals.saved(trainer.options.checkpoint_dir, trainer.resume_line)}")
            if isinstance(error, KeyboardInterrupt):
                raise SystemExit(130) from None
            raise
        finally:
            if isinstance(trainer.cluster, ProcessCluster):
                trainer.cluster.close()


def _resume_line(
    first: int, most: int | None, config: str, overrides: list[str] | None, json: str | None
) -> Callable[[str, int], str]:
    """Formats the command that resumes a `persia train` which started at step `first` with `max_steps` = `most`."""

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


@contextlib.contextmanager
def _page(trainer: Trainer, port: int) -> Iterator[None]:
    """Serves the page of the trainer's cluster, and prints its address."""
    from persia.dashboard.server import serve_page
    from persia.dashboard.view import asking

    assert trainer.cluster is not None
    with serve_page(asking(trainer.cluster), port) as url:
        typer.echo(f"Page of this run: {url}", err=True)
        yield


def _check_unused(output: str | None, resume: str | None) -> None:
    """Rejects a directory with checkpoints of a run other than the resumed one, as the two would mix.

    Raises:
        CheckpointError: the directory holds another run.
    """
    from persia.checkpoint import list_checkpoints

    # `realpath` treats a URL as a relative path, so equal URLs stay equal.
    if output is None or (resume is not None and os.path.realpath(resume) == os.path.realpath(output)):
        return
    if found := list_checkpoints(output):
        raise CheckpointError(
            f"{output} holds another run, trained to step {found[-1].step}. Continue that run with --resume {output}, "
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
