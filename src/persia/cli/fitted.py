"""Fits the rules of a configuration's features before training, or takes what an earlier run has fitted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from persia.printable import say

if TYPE_CHECKING:
    from persia.checkpoint import StepChoice
    from persia.cli.run_config import RunConfig

__all__ = ["fitted_as_checkpoint", "fitted_run"]


def fitted_as_checkpoint(run: RunConfig, directory: str, step: StepChoice = None) -> RunConfig:
    """Returns a configuration whose features have the fitted values of a checkpoint, by default the latest.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    if run.schema is None or not run.schema.needs_fit:
        return run
    from persia.checkpoint import CheckpointReader

    return run.fitted_as(CheckpointReader(directory, step).schema)


def fitted_run(run: RunConfig, resume: str | None = None, *, step: StepChoice = None, refit: bool = False) -> RunConfig:
    """Returns a configuration whose features are fitted; prints what was found. Reads the training data once if needed.

    Args:
        run: the configuration.
        resume: directory of the checkpoint that is continued, whose values are kept.
        step: which checkpoint; None for the latest.
        refit: whether to fit all features to the data, in place of the checkpoint's values.

    Raises:
        ConfigError: the training data have no columns to which rules can be fitted.
        DataError: they cannot be read, or a topic has no messages.
    """
    if run.schema is None:
        return run
    from persia.checkpoint import CheckpointReader
    from persia.cli import ui as out
    from persia.data.fit import fit_features
    from persia.schema import fitted_values, without_values
    from persia.services import Stream

    if refit:
        run = run.of_schema(without_values(run.schema))
    elif resume is not None:
        run = fitted_as_checkpoint(run, resume, step)
    assert run.schema is not None
    names = run.schema.needs_fit
    if not names:
        return run
    features = "1 feature" if len(names) == 1 else f"{len(names)} features"
    say(f"Fitting the rules of {features} to {run.data.path}", error=True)
    reader = run.reader()
    if resume is not None and isinstance(reader, Stream):  # Fits to what will be trained.
        reader.begin(0, CheckpointReader(resume, step).state("training")["offsets"], stopping=lambda: False)
    schema = fit_features(run.schema, reader, run.train.fit_rows)
    out.print_fitted([each for each in fitted_values(schema) if each.feature in names])
    return run.of_schema(schema)
