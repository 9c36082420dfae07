"""Checks whether a directory holds an earlier run, and formats the commands that can use it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from persia.cli.configured_run import command_line
from persia.errors import CheckpointError, PersiaError

if TYPE_CHECKING:
    from persia.checkpoint import CheckpointReader
    from persia.cli.run_config import RunConfig
    from persia.schema import Schema

__all__ = ["Command", "check_unused", "existing_step", "refusal", "remove", "ways_to_resume"]


class Command(NamedTuple):
    """The command line of this process, to print it with other directories.

    Attributes:
        config: path of the configuration.
        overrides: values of --set.
        json: value of --json.
    """

    config: str
    overrides: Sequence[str] | None
    json: str | None = None

    def line(self, *words: str) -> str:
        """Formats `persia train` with other directories."""
        return command_line(["train", self.config, *words], list(self.overrides or []), self.json)


def existing_step(output: str | None, resume: str | None) -> int | None:
    """Returns the step of the run that a directory holds; None if it holds no run, or the run that is resumed."""
    from persia.checkpoint import list_checkpoints

    # `realpath` treats a URL as a relative path, so equal URLs stay equal.
    if output is None or (resume is not None and os.path.realpath(resume) == os.path.realpath(output)):
        return None
    checkpoints = list_checkpoints(output)
    return checkpoints[-1].step if checkpoints else None


def check_unused(output: str) -> None:
    """Rejects a directory that holds a run, as a second run there would mix with it.

    Raises:
        CheckpointError: the directory holds a run.
    """
    step = existing_step(output, None)
    if step is not None:
        raise CheckpointError(
            f"{output} holds another run, trained to step {step}; give another directory as --output.", path=output
        )


def refusal(output: str, step: int, command: Command, run: RunConfig, schema: Schema) -> CheckpointError:
    """Returns the error for a directory that holds another run, with the commands that work.

    Args:
        output: the directory.
        step: last step of that run.
        command: the command line of this process.
        run: the configuration.
        schema: schema of the configuration's data.
    """
    obstacle, reader = _resume_obstacle(output, run, schema, new_optimizer=False)
    lines = [f"{output} holds another run, trained to step {step}. To train a new one elsewhere, or in its place:", ""]
    lines += [f"    {command.line('--output', _unused_path(output))}"]
    lines += [f"    {command.line('--output', output, '--overwrite')}", ""]
    if obstacle is None:
        lines += ["To continue it:", "", f"    {command.line('--resume', output)}"]
    else:
        lines += [f"It cannot be continued with this configuration: {obstacle}"]
        lines += _remedies(output, command, run, reader, schema)
    return CheckpointError("\n".join(lines), path=output)


def ways_to_resume(resume: str, command: Command, run: RunConfig, schema: Schema, *, new_optimizer: bool) -> str:
    """Returns how to continue from a checkpoint that does not match a configuration; empty if it matches or is damaged.

    Args:
        resume: directory of the checkpoint.
        command: the command line of this process.
        run: the configuration.
        schema: schema of the configuration's data.
        new_optimizer: whether the command line has --new-optimizer.
    """
    obstacle, reader = _resume_obstacle(resume, run, schema, new_optimizer=new_optimizer)
    return "" if obstacle is None else "\n".join(_remedies(resume, command, run, reader, schema))


def remove(directory: str) -> None:
    """Removes the checkpoints and the record of a run from a directory; other files stay.

    Raises:
        CheckpointError: one cannot be removed.
    """
    from persia.checkpoint.best import BEST
    from persia.checkpoint.format import LATEST, parse_step
    from persia.checkpoint.storage import Storage
    from persia.telemetry.run_record import RUN_FILE

    storage = Storage(directory)
    steps = [name for name in storage.names() if parse_step(name) is not None]
    for name in (LATEST, BEST, RUN_FILE, *steps):  # The pointers to the steps first.
        storage.remove(name)


def _resume_obstacle(
    directory: str, run: RunConfig, schema: Schema, *, new_optimizer: bool
) -> tuple[str | None, CheckpointReader | None]:
    """Returns what prevents resuming a run with a configuration, and the run's checkpoint if it can be read."""
    from persia.checkpoint import CheckpointReader
    from persia.schema import with_values_of
    from persia.trainer.loading import check_resumable
    from persia.trainer.options import Declared

    reader = None
    try:
        reader = CheckpointReader(directory)
        schema = with_values_of(schema, reader.schema)
        model = run.model.build(schema)
        optimizer = run.optimizer.factory()(model.parameters())
        declared = Declared(schema, run.embedding_optimizer, run.mode, run.trainer)
        check_resumable(reader, declared, model, optimizer, new_optimizer=new_optimizer)
    except PersiaError as error:
        differences = error.fields.get("differences")
        return (error.message if differences is None else f"{'; '.join(differences)}."), reader
    return None, reader


def _remedies(
    directory: str, command: Command, run: RunConfig, reader: CheckpointReader | None, schema: Schema
) -> list[str]:
    """Returns the commands that use what they can of a run that cannot be continued as it is."""
    lines = []
    if _resume_obstacle(directory, run, schema, new_optimizer=True)[0] is None:
        lines = ["", "To continue it with the new optimizer, whose state is reset:", ""]
        lines += [f"    {command.line('--resume', directory, '--new-optimizer')}"]
    return lines + _import_commands(directory, command, reader, schema)


def _import_commands(directory: str, command: Command, reader: CheckpointReader | None, schema: Schema) -> list[str]:
    """Returns the commands that start a run with the rows of another run; empty if the runs share no table."""
    if reader is None:
        return []
    there, here = reader.manifest.tables, schema.resolved_tables()
    common = [name for name, table in here.items() if name in there and there[name].dim == table.dim]
    if not common:
        return []
    some = [word for name in common for word in ("--table", name)] if set(common) != here.keys() & there.keys() else []
    rows, new = _unused_path(f"{directory.rstrip('/')}-rows"), _unused_path(directory)
    overrides = list(command.overrides or [])
    return [
        "",
        f"To start with its rows of {', '.join(common)}, and a new network:",
        "",
        f"    {command_line(['export', directory, rows, *some], [], None)}",
        f"    {command_line(['import', command.config, rows, '--output', new, *some], overrides, None)}",
        f"    {command.line('--resume', new)}",
    ]


def _unused_path(directory: str) -> str:
    """Returns the path of a directory, with a number appended if it exists."""
    name = directory.rstrip("/")
    number = 2
    while os.path.exists(f"{name}-{number}"):
        number += 1
    return name if not os.path.exists(name) and "://" not in name else f"{name}-{number}"
