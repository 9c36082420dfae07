"""Checks, before anything is trained, that a run can write its outputs."""

from __future__ import annotations

from collections.abc import Callable

from persia.checkpoint.storage import Storage
from persia.checks import without_userinfo
from persia.errors import CheckpointError, ConfigError, PublishError
from persia.publish.storage import open_storage
from persia.trainer.options import TrainerOptions

__all__ = ["check_outputs"]


def check_outputs(options: TrainerOptions) -> None:
    """Creates the directories of a run, and writes a file to each for a moment; asks for the topic to publish to.

    A disk may still become full, and a server go away; then a message of its own says so.

    Raises:
        ConfigError: an output cannot be written; the message names its option.
        CheckpointError: a URL is not that of a file system.
        MissingExtraError: a package for a URL is not installed.
    """
    for name in ("checkpoint_dir", "log_dir", "record_dir"):
        place = getattr(options, name)
        if place is not None and (name == "checkpoint_dir" or "://" not in place):  # TensorBoard has URLs of its own.
            _probe(name, place, Storage(place).probe)
    if options.publish is not None:
        _probe("publish.url", options.publish.url, open_storage(options.publish.url).probe)


def _probe(name: str, place: str, probe: Callable[[], None]) -> None:
    try:
        probe()
    except (CheckpointError, PublishError) as error:
        raise ConfigError(
            f"{name} = {without_userinfo(place)!r} cannot be written, so nothing was trained: {error.message}",
            field=name,
            path=place,
        ) from error
