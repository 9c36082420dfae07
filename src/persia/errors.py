"""Every error that persia raises on purpose.

One root, :class:`PersiaError`. The message says what is wrong, where, and what to do; `fields` carries the same
facts for programs. Errors survive pickling, so they cross processes unchanged.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CheckpointError",
    "ClosedError",
    "ConfigError",
    "DataError",
    "DeadlineError",
    "DivergedError",
    "MissingExtraError",
    "MovedError",
    "NNWorkersDiedError",
    "PeerRestartedError",
    "PersiaError",
    "RemoteError",
    "RoleDiedError",
    "StaleBatchError",
    "StalePushError",
    "StoreError",
    "StoreFullError",
    "UnequalStepsError",
    "WireError",
]


class PersiaError(Exception):
    """Root of all errors of persia.

    Args:
        message: what is wrong, where, and what to do about it.
        **fields: the facts of the message by name (`feature`, `step`, `path`, ...).
    """

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.fields))


def _rebuild(cls: type[PersiaError], message: str, fields: dict[str, Any]) -> PersiaError:
    return cls(message, **fields)


class ConfigError(PersiaError):
    """A configuration, a schema or an argument is not valid; the message names the field."""


class DataError(PersiaError):
    """Input data does not fit the schema: nothing of the batch has been used."""


class StoreError(PersiaError):
    """The embedding store refuses a request; it is unchanged."""


class StoreFullError(StoreError):
    """The regions of an embedding store cannot grow; the message says where, and how much is free there."""


class CheckpointError(PersiaError):
    """A checkpoint cannot be written or read; the store, the model and older checkpoints are unchanged."""


class DeadlineError(PersiaError):
    """A wait has passed its deadline; the message names who was late, and with what.

    From a call to another process it has the fields `peer`, `address`, `operation` and `seconds`.
    """


class RemoteError(PersiaError):
    """A method of another process raised something that is no PersiaError; a note has the remote traceback.

    Fields: `kind` (class of the error), `peer`, `address`, `operation`.
    """


class PeerRestartedError(PersiaError):
    """The connection was lost during a call that must not be repeated: it ran once, or not at all.

    Fields: `peer`, `address`, `operation`.
    """


class RoleDiedError(PersiaError):
    """A process of the cluster has died for good; the message shows its last lines.

    Fields: `role`, `rank`.
    """


class NNWorkersDiedError(PersiaError):
    """Other NN workers have died; this one has trained to a rest without them. On a cluster, `fit` makes it good.

    Fields: `ranks`.
    """


class UnequalStepsError(PersiaError):
    """An NN worker has a batch to train, and others have none: it would wait for them in the all-reduce of gradients.

    Fields: `batch` (number in the pass), `ended` (ranks that ran out of batches), `left` (ranks that left their loop or
    failed), `having` (ranks that still had batches).
    """


class WireError(PersiaError):
    """A message breaks the wire format or its limits, or a value cannot be sent; nothing of it has been used."""


class ClosedError(PersiaError):
    """A stub or server is used after it was closed, or in a forked child of the process that made it."""


class DivergedError(PersiaError):
    """Logits or loss of a batch are not finite; the message names the batch. The network may hold NaN by now."""


class StaleBatchError(PersiaError):
    """A batch is used after it has been released, for example a second backward after its gradient was pushed."""


class StalePushError(PersiaError):
    """A gradient is of NN workers that have been replaced, or of a step that is not in work; it is not applied."""


class MovedError(PersiaError):
    """The one that was asked is leaving, or no longer responsible: get the membership and ask another."""


class MissingExtraError(PersiaError):
    """An optional dependency is missing; the message gives the `pip install` line."""
