"""The command `persia train`: one run, or with --sweep the trials of a search."""

from __future__ import annotations

import contextlib
import json as jsonlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from persia.cli.configured_run import Config, Set, check_unused, closing_cluster, command_line, read_config
from persia.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from persia.trainer import Trainer

__all__ = ["train"]


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
    again: Annotated[
        bool, typer.Option("--again", help="With --resume, train the data as if none of them had been trained.")
    ] = False,
    restart_data: Annotated[
        bool,
        typer.Option(
            "--restart-data", help="With --resume, begin an incomplete pass over the data at its first batch."
        ),
    ] = False,
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

    With --resume, the same data continue at the next batch, and other data at their first one. Data of which some files
    were trained continue with the new files. Where nothing is left to train, the last line says so; the exit status is
    0, so the command may be repeated as data come.
    """
    from persia.cli import ui as out

    run = read_config(config, overrides, output or resume)
    if dump_config:
        out.print_toml(run.dump())
        return
    check_unused(run.trainer.checkpoint_dir, resume)
    if json is not None:
        out.check_writable(json)
    if sweep:
        _sweep(config, overrides, output, resume, json)
        return
    reader = run.reader()
    trainer = run.build_trainer(reader.schema)
    with closing_cluster(trainer, trains=True):
        if run.cluster.kind == "ray":
            address = _control_address(trainer)
            typer.echo(f"Control address for `persia top`, `health`, `trace` and `control`: {address}", err=True)
        if resume is not None:
            trainer.load(resume)
        trainer.resume_line = _resume_line(trainer.global_step, run.train.max_steps, config, overrides, json)
        evaluation = run.eval_data.reader(reader.schema, "eval_data") if run.eval_data is not None else None
        with _page(trainer, run.observe.ui_port) if ui else contextlib.nullcontext():
            epochs, steps = run.train.epochs, run.train.max_steps
            result = trainer.fit(
                reader, evaluation, epochs=epochs, max_steps=steps, again=again, restart_data=restart_data
            )
    out.print_fit(result, trainer.options.checkpoint_dir)
    if json is not None:
        out.write_json(json, out.fit_record(result))
    if result.nothing_left:
        typer.echo(result.nothing_left)


def _sweep(config: str, overrides: list[str] | None, output: str | None, resume: str | None, json: str | None) -> None:
    from persia.cli import ui as out
    from persia.config import load

    if output is None or resume is not None:
        raise ConfigError("--sweep needs --output, and does not go with --resume.", field="sweep")
    try:
        from persia.cli.sweep import Sweep
    except ImportError as error:
        raise MissingExtraError('--sweep needs Optuna: pip install "persia[optuna]".', extra="optuna") from error
    tree = load(config, overrides or [])
    trials = Sweep(tree, output, closing_cluster)
    trials.run(lambda r: typer.echo(f"trial {r.number} {r.state}: {r.metric:.4f} with {jsonlib.dumps(r.values)}"))
    out.CONSOLE.print(trials.table())
    if trials.best is not None:
        name, own, _ = tree.get("model", {}).get("kind", "").partition(":")
        module = Path(config).parent / f"{name}.py"
        if own and module.is_file():  # Modules of one's own are looked for beside a configuration.
            shutil.copy2(module, output)
        typer.echo(f"Best configuration: {output}/best.toml, trained in {trials.folder(trials.best.number)}/checkpoint")
    if json is not None:
        out.write_json(json, [record._asdict() for record in trials.records])


def _resume_line(
    first: int, most: int | None, config: str, overrides: list[str] | None, json: str | None
) -> Callable[[str, int], str]:
    """Formats the command that resumes a `persia train` which started at step `first` with `max_steps` = `most`."""

    def line(directory: str, step: int) -> str:
        changes = [o for o in overrides or [] if not o.startswith("train.max_steps=")]
        if most is not None:
            changes.append(f"train.max_steps={max(1, first + most - step)}")
        return command_line(["train", config, "--resume", directory], changes, json)

    return line


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
