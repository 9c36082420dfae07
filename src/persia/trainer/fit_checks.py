"""Checks that `Trainer.fit` can train on its data and write its outputs, before anything begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import GeneratorType

from persia.batching.batch import Batch
from persia.batching.items import check_data
from persia.checkpoint.storage import Storage
from persia.checks import without_userinfo
from persia.errors import CheckpointError, ConfigError, DataError, PublishError
from persia.publish.log_storage import open_storage
from persia.services import Connection, SharedStream, Stream, StreamPosition
from persia.trainer.options import TrainerOptions

__all__ = ["check_begin", "check_eval_data", "check_outputs", "check_stream", "check_train_data"]


def check_train_data(
    data: Iterable[Batch] | None, epochs: int, connection: Connection, *, in_other_processes: bool
) -> None:
    """Checks that `fit` can train on data.

    Args:
        data: see `Trainer.fit`; None where data loaders read.
        epochs: number of passes.
        connection: of this process.
        in_other_processes: whether NN workers train in other processes.

    Raises:
        ConfigError: an iterator would have to be read twice; a stream cannot be trained on; or there are no data, and
            no data loaders that have some.
        DataError: the data are not iterable.
    """
    if data is None:
        if connection.loader is None:
            raise ConfigError("train_data is None, and the cluster has no data loaders.", field="train_data")
        return
    check_data("train_data", data)
    if (epochs > 1 or connection.nn_workers > 1) and isinstance(data, Iterator):
        raise ConfigError(
            "train_data is an iterator and cannot be read twice; give a reader or a list.", field="train_data"
        )
    check_stream(data, epochs, connection, in_other_processes=in_other_processes)


def check_begin(data: object, *, again: bool, restart_data: bool) -> None:
    """Checks that `fit` can begin its data again, if it is to.

    Raises:
        ConfigError: an argument is no bool, or the data are a stream, which goes on at its offsets.
    """
    for name, value in (("again", again), ("restart_data", restart_data)):
        if not isinstance(value, bool):
            raise ConfigError(f"Invalid {name} = {value!r}; expected True or False.", field=name)
        if value and isinstance(data, StreamPosition):
            raise ConfigError(
                f"{name} = True, and train_data is a stream, which goes on at its offsets. Leave {name} out; to read "
                "it from its beginning, begin a new run.",
                field=name,
            )


def check_eval_data(data: Iterable[Batch] | None, options: TrainerOptions) -> None:
    """Checks that `fit` can evaluate on data as often as it is going to.

    Raises:
        ConfigError: `fit` evaluates more than once, and the data can be read only once.
        DataError: the data are not iterable, or empty.
    """
    if data is None:
        return
    check_data("eval_data", data)
    often = [
        name for name in ("keep_best", "eval_every_steps", "eval_every_epochs") if getattr(options, name) is not None
    ]
    if often and isinstance(data, Iterator):
        what = "evaluates each checkpoint" if often == ["keep_best"] else "evaluates again and again"
        raise ConfigError(
            f"eval_data is an iterator, which can be read only once, and {often[-1]} {what}; give a reader or a list.",
            field="eval_data",
        )
    used_up = isinstance(data, GeneratorType) and data.gi_frame is None
    if used_up:
        raise DataError("eval_data is an iterator that was read before; give a reader or a list.")
    if isinstance(data, Sequence) and not len(data) and not options.allow_empty:
        raise DataError(
            "eval_data are empty; give batches, or None. If there may be none, set TrainerOptions(allow_empty=True)."
        )


def check_stream(data: object, epochs: int, connection: Connection, *, in_other_processes: bool) -> None:
    """Checks that a stream, if the data are one, can be trained on.

    Args:
        data: of `fit`.
        epochs: number of passes.
        connection: of this process.
        in_other_processes: whether NN workers train in other processes.

    Raises:
        ConfigError: there are several epochs; or the stream cannot be shared, and would have to.
    """
    if not isinstance(data, Stream):
        return
    if epochs > 1:
        raise ConfigError(
            f"epochs = {epochs}, and train_data is a stream, which has one pass; call `fit` again to go on with it.",
            field="epochs",
        )
    if (in_other_processes or connection.nn_workers > 1) and not isinstance(data, SharedStream):
        raise ConfigError(
            f"train_data is a {type(data).__name__}, a stream that only a single NN worker can read, in its own "
            "process. Train with cluster=persia.cluster.Embedded(), give it a method `share` (see "
            "persia.services.SharedStream), or write the stream to files first.",
            field="train_data",
        )
    if connection.nn_workers > 1 and connection.stream is None and not in_other_processes:
        raise ConfigError(
            "train_data is a stream, and the NN workers of this run have no data loaders that read it. Call `fit` in "
            "the program that made the cluster, rather than within `run`.",
            field="train_data",
        )


def check_outputs(options: TrainerOptions) -> None:
    """Creates the directories of a run, and writes a file to each for a moment; asks for the topic to publish to.

    A disk may still become full, and a server go away; then another message says so.

    Raises:
        ConfigError: an output cannot be written; the message names its option.
        CheckpointError: a URL is not a file system's.
        MissingExtraError: a package for a URL is not installed.
    """
    for name in ("checkpoint_dir", "log_dir", "record_dir"):
        place = getattr(options, name)
        if place is not None and (name == "checkpoint_dir" or "://" not in place):  # TensorBoard has its own URLs.
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
