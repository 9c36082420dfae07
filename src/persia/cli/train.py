"""The command `persia train`: one run, or with --sweep the trials of a search."""

from __future__ import annotations

import contextlib
import json as jsonlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from persia.cli import earlier_run
from persia.cli.configured_run import (
    Config,
    Set,
    Step,
    closing_cluster,
    command_line,
    load_config,
    read_config,
    step_choice,
)
from persia.cli.earlier_run import Command
from persia.cli.run_folder import RunFolder
from persia.errors import CheckpointError, ConfigError, MissingExtraError
from persia.printable import say

if TYPE_CHECKING:
    from persia.checkpoint import StepChoice
    from persia.cli.run_config import RunConfig
    from persia.trainer import Trainer

__all__ = ["train"]


def train(
    config: Config,
    overrides: Set = None,
    output: Annotated[
        str | None,
        typer.Option(
            help="Directory for checkpoints. Defaults to the one of --resume, else to a new folder next to CONFIG.",
            metavar="DIR",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Remove the run that --output holds, once training can begin.")
    ] = False,
    json: Annotated[str | None, typer.Option(help="Write the result to this file as JSON.", metavar="FILE")] = None,
    resume: Annotated[
        str | None, typer.Option(help="Continue from a checkpoint in this directory.", metavar="DIR")
    ] = None,
    continue_: Annotated[
        bool,
        typer.Option(
            "--continue",
            help="Continue the run that --output holds, if there is one; for supervisors that repeat the command.",
        ),
    ] = False,
    step: Step = None,
    again: Annotated[
        bool, typer.Option("--again", help="With --resume, train the data as if none of them had been trained.")
    ] = False,
    restart_data: Annotated[
        bool,
        typer.Option(
            "--restart-data", help="With --resume, begin an incomplete pass over the data at its first batch."
        ),
    ] = False,
    new_optimizer: Annotated[
        bool,
        typer.Option(
            "--new-optimizer",
            help="With --resume, allow another optimizer than the checkpoint's, and reset its state.",
        ),
    ] = False,
    refit: Annotated[
        bool,
        typer.Option(
            "--refit", help="With --resume, fit the rules of features to these data, not as the checkpoint has them."
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

    Progressive metrics score each batch before training on it, so they measure quality on unseen data. Without --output
    a run is saved in a new folder next to CONFIG, runs/NAME/TIME; runs/NAME/latest links to the last one.

    With --resume, the same data continue at the next batch, and other data at their first one. Data of which some files
    were trained continue with the new files. Where nothing is left to train, the last line says so; the exit status is
    0, so the command may be repeated as data come.

    Rules of features that need statistics are fitted to the data first. A continued run keeps those of its checkpoint.
    """
    from persia.cli import ui as out

    resume, output = _resolve_link(resume), _resolve_link(output)
    run = read_config(config, overrides, output or resume)
    if dump_config:
        out.print_toml(run.dump())
        return
    out.check_writable(json)
    if continue_:
        resume = _earlier_output(output, resume, overwrite)
    if step is not None and resume is None:
        raise ConfigError("--step names the checkpoint of --resume; give --resume DIR too.", field="step")
    which = step_choice(step)
    if sweep:
        _sweep(config, overrides, output, resume, json, overwrite)
        return
    saved = run.trainer.checkpoint_dir or ""
    if overwrite and resume is not None and os.path.realpath(saved) == os.path.realpath(resume):
        raise ConfigError("--overwrite would remove the run of --resume; give another --output.", field="overwrite")
    for name in ("keep_best", "eval_every_steps", "eval_every_epochs"):
        if getattr(run.trainer, name) is not None and run.eval_data is None:
            raise ConfigError(f"trainer.{name} needs a section [eval_data] to evaluate on.", field="eval_data")
    with RunFolder(config) if run.trainer.checkpoint_dir is None else contextlib.nullcontext() as folder:
        if folder is not None:
            run = run.saving_to(str(folder.path))
        command = Command(config, overrides, json)
        options = _TrainOptions(ui, overwrite, again, restart_data, new_optimizer, refit, which)
        _train(run, command, resume, folder, options)


def _earlier_output(output: str | None, resume: str | None, overwrite: bool) -> str | None:
    """Returns the directory of --output if it holds a run, for --continue.

    Raises:
        ConfigError: the options name no directory to continue, or another one.
    """
    if output is None or resume is not None or overwrite:
        raise ConfigError("--continue needs --output, and does not go with --resume or --overwrite.", field="continue")
    return output if earlier_run.existing_step(output, None) is not None else None


class _TrainOptions(NamedTuple):
    """Options of `train` that are neither in its configuration nor paths."""

    ui: bool
    overwrite: bool
    again: bool
    restart_data: bool
    new_optimizer: bool
    refit: bool
    step: StepChoice


def _train(
    run: RunConfig,
    command: Command,
    resume: str | None,
    folder: RunFolder | None,
    options: _TrainOptions,
) -> None:
    """Trains one run, and prints its result."""
    from persia.cli import ui as out
    from persia.cli.fitted import fitted_run
    from persia.nn.output import are_log_odds
    from persia.trainer.fit_checks import check_outputs

    if run.cluster.kind == "embedded":  # With Ray, the process that writes checks, perhaps on another host.
        check_outputs(run.trainer)
    reader = run.reader()
    directory = run.trainer.checkpoint_dir
    assert directory is not None
    step = None if run.cluster.goes_on else earlier_run.existing_step(directory, resume)
    if step is not None and not options.overwrite:
        raise earlier_run.refusal(directory, step, command, run, reader.schema)
    fitted = fitted_run(run, resume, step=options.step, refit=options.refit)
    if fitted is not run:
        run, reader = fitted, fitted.reader()
    trainer = run.build_trainer(reader.schema)
    with closing_cluster(trainer, trains=True):
        if run.cluster.kind == "ray":
            address = _control_address(trainer)
            say(f"Control address for `persia top`, `health`, `trace` and `control`: {address}", error=True)
        if resume is not None:
            _load(trainer, resume, command, run, options)
        trainer.resume_line = _resume_line(trainer.global_step, run.train.max_steps, command)
        evaluation = run.eval_data.reader(reader.schema, "eval_data") if run.eval_data is not None else None
        if step is not None:
            earlier_run.remove(directory)
        if folder is not None:
            folder.link()
        with _page(trainer, run.observe.ui_port) if options.ui else contextlib.nullcontext():
            epochs, steps = run.train.epochs, run.train.max_steps
            result = trainer.fit(
                reader,
                evaluation,
                epochs=epochs,
                max_steps=steps,
                again=options.again,
                restart_data=options.restart_data,
            )
    out.print_fit(result, directory, log_odds=are_log_odds(trainer.model))
    if command.json is not None:
        out.write_json(command.json, out.fit_record(result))
    if result.best is not None and run.trainer.keeps_best:
        purpose, lines = _next_commands(result.watched, command, out.near_path(directory), run.model.kind)
        best = f"step {result.best_step:,}, {result.watched} {result.best:.4f}"
        say(f"Best on held-out rows: {best}. {purpose}")
        for line in lines:
            say(f"    {line}")
    if result.nothing_left or result.stopped_early:
        say(result.nothing_left or result.stopped_early)


def _next_commands(watched: str, command: Command, directory: str, model: str) -> tuple[str, list[str]]:
    """Returns what the best checkpoint is for, and the commands that use it.

    A metric of retrieval ranks all rows of the item's table, and so do these commands.
    """
    if watched.startswith("retrieval_"):
        changes = f"{directory.rstrip('/')}/changes"
        publish = ["checkpoint", "publish", directory, "--step", "best", "--output", changes]
        module, own, _ = model.partition(":")
        serve = ["serve", changes, "--retrieve", *(["--import", module] if own else [])]
        return "To find items with it:", [command_line(words, [], None) for words in (publish, serve)]
    predict = ["predict", command.config, "--checkpoint", directory, "--step", "best", "--output", "predictions.csv"]
    return "To predict with it:", [command_line(predict, list(command.overrides or []), None)]


def _resolve_link(directory: str | None) -> str | None:
    """Resolves a link such as `latest`, which the next run points elsewhere."""
    if directory is None or not os.path.islink(directory.rstrip("/")):
        return directory
    return os.path.realpath(directory)


def _load(trainer: Trainer, resume: str, command: Command, run: RunConfig, options: _TrainOptions) -> None:
    """Loads a checkpoint. If it does not match, the error lists commands that work."""
    try:
        trainer.load(resume, step=options.step, new_optimizer=options.new_optimizer, refit=options.refit)
    except CheckpointError as error:
        remedy = earlier_run.ways_to_resume(resume, command, run, trainer.schema, new_optimizer=options.new_optimizer)
        raise CheckpointError(f"{error.message}\n{remedy}" if remedy else error.message, **error.fields) from error


def _sweep(
    config: str,
    overrides: list[str] | None,
    output: str | None,
    resume: str | None,
    json: str | None,
    overwrite: bool,
) -> None:
    from persia.cli import ui as out

    if output is None or resume is not None or overwrite:
        raise ConfigError("--sweep needs --output, and does not go with --resume or --overwrite.", field="sweep")
    try:
        from persia.cli.sweep import Sweep
    except ImportError as error:
        raise MissingExtraError('--sweep needs Optuna: pip install "persia-recsys[optuna]".', extra="optuna") from error
    tree = load_config(config, overrides)
    trials = Sweep(tree, output, closing_cluster)
    trials.run(lambda r: say(f"trial {r.number} {r.state}: {r.metric:.4f} with {jsonlib.dumps(r.values)}"))
    out.CONSOLE.print(trials.table())
    if trials.best is not None:
        name, own, _ = tree.get("model", {}).get("kind", "").partition(":")
        module = Path(config).parent / f"{name}.py"
        if own and module.is_file():  # User modules are imported from the folder of a configuration.
            shutil.copy2(module, output)
        say(f"Best configuration: {output}/best.toml, trained in {trials.folder(trials.best.number)}/checkpoint")
    if json is not None:
        out.write_json(json, [record._asdict() for record in trials.records])


def _resume_line(first_step: int, max_steps: int | None, command: Command) -> Callable[[str, int], str]:
    """Returns a function that formats the command to resume this run from a directory and a step."""

    def line(directory: str, step: int) -> str:
        changes = [o for o in command.overrides or [] if not o.startswith("train.max_steps=")]
        if max_steps is not None:
            changes.append(f"train.max_steps={max(1, first_step + max_steps - step)}")
        return command._replace(overrides=changes).line("--resume", directory)

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
        say(f"Page of this run: {url}", error=True)
        yield
