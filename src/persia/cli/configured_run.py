"""The arguments of commands that take a CONFIG, how it is read, and how a command ends."""

from __future__ import annotations

import contextlib
import json as jsonlib
import os
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from persia.errors import ConfigError

if TYPE_CHECKING:
    from persia.checkpoint import StepChoice
    from persia.cli.run_config import RunConfig
    from persia.trainer import Trainer

__all__ = [
    "Checkpoint",
    "Config",
    "Set",
    "Step",
    "closing_cluster",
    "command_line",
    "load_config",
    "read_config",
    "step_choice",
]

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

Step = Annotated[
    str | None,
    typer.Option(
        help="Which checkpoint: a step, `best` (by trainer.keep_best), or `latest`, the default.",
        metavar="N|best|latest",
    ),
]


def step_choice(step: str | None, option: str = "--step") -> StepChoice:
    """Converts the value of --step.

    Raises:
        ConfigError: it is no step, nor "best" or "latest".
    """
    if step is None:
        return None
    if step in ("best", "latest"):
        return cast("StepChoice", step)
    if not (step.isascii() and step.isdecimal()):
        raise ConfigError(f"Invalid {option} {step}; expected a step, best or latest.", field="step")
    return int(step)


def load_config(config: str, overrides: list[str] | None, output: str | None = None) -> dict[str, Any]:
    """Reads a configuration into plain data. Paths in the file are relative to it, others to the working directory.

    Args:
        config: path of the file.
        overrides: values of --set.
        output: directory for checkpoints; overrides the file.

    Raises:
        ConfigError: the file cannot be read, or is one of data; or an override has no path.
    """
    from persia.cli.config_paths import directory_of, resolve_paths
    from persia.config import load, override

    try:
        tree = load(config, [])
    except ConfigError as error:
        if not _is_data(config):
            raise
        raise ConfigError(
            f"{config} is a file of data, not a configuration. To write a configuration for it: "
            f"{shlex.join(['persia', 'init', config])}",
            path=config,
        ) from error
    resolve_paths(tree, directory_of(config))
    for assignment in overrides or []:
        override(tree, assignment)
    if output is not None:
        override(tree, f"trainer.checkpoint_dir={jsonlib.dumps(output)}")
    return tree


def _is_data(path: str) -> bool:
    """Returns whether a file has a suffix of data."""
    from persia.data.from_csv import CSV_SUFFIXES
    from persia.data.from_parquet import PARQUET_SUFFIXES
    from persia.data.json_lines import JSONL_SUFFIXES

    return os.path.isfile(path) and path.endswith((*CSV_SUFFIXES, *PARQUET_SUFFIXES, *JSONL_SUFFIXES))


def read_config(config: str, overrides: list[str] | None, output: str | None = None) -> RunConfig:
    """Reads a configuration, after importing the modules that it names; see `load_config`.

    Raises:
        ConfigError: a field is invalid, or a module cannot be imported; the message names it.
    """
    from persia.cli.imports import Imports, add_folder, import_modules
    from persia.cli.run_config import RunConfig
    from persia.config import convert

    tree = load_config(config, overrides, output)
    add_folder(config)
    import_modules(convert(tree, Imports, config).imports)
    return convert(tree, RunConfig, config)


@contextlib.contextmanager
def closing_cluster(trainer: Trainer, trains: bool = False) -> Iterator[None]:
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


def command_line(words: list[str], overrides: list[str], json: str | None) -> str:
    """Formats a command of `persia` for the shell, with its options --set and --json."""
    options = [word for override in overrides for word in ("--set", override)]
    return shlex.join(["persia", *words, *options, *(["--json", json] if json is not None else [])])
