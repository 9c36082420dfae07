"""The exceptions of persia.

All derive from :class:`PersiaError`. The message says what is wrong, where, and what to do; `fields` carries the same
facts for programs. Errors can be pickled, so they cross processes unchanged.
"""

from __future__ import annotations

from typing import Any

from persia.printable import printable

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
    "OverloadedError",
    "PeerRestartedError",
    "PersiaError",
    "PublishError",
    "RemoteError",
    "RoleDiedError",
    "ServeError",
    "StaleBatchError",
    "StaleMapError",
    "StalePushError",
    "StoreError",
    "StoreFullError",
    "UnequalStepsError",
    "WireError",
]


class PersiaError(Exception):
    """Base class of all errors that persia raises.

    Args:
        message: what is wrong, where, and what to do about it. Control characters in it become escapes, as names of
            columns and files are part of messages.
        **fields: facts of the message by name (`feature`, `step`, `path`, ...).
    """

    def __init__(self, message: str, **fields: Any) -> None:
        self.message = printable(message)
        super().__init__(self.message)
        self.fields = fields

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.fields))


def _rebuild(cls: type[PersiaError], message: str, fields: dict[str, Any]) -> PersiaError:
    return cls(message, **fields)


class ConfigError(PersiaError):
    """A configuration, a schema or an argument is invalid; the message names the field."""


class DataError(PersiaError):
    """Input data do not match the schema. No part of the batch has been used."""


class StoreError(PersiaError):
    """The embedding store rejected a request. The store is unchanged."""


class StoreFullError(StoreError):
    """The memory regions of an embedding store cannot grow; the message names the place and its free space."""


class CheckpointError(PersiaError):
    """A checkpoint cannot be written or read. The store, the model and older checkpoints are unchanged."""


class PublishError(PersiaError):
    """The log of changes cannot be read, or its topic cannot be written. A reader keeps what it has."""


class ServeError(PersiaError):
    """A prediction server refused a request or could not answer it; nothing was changed.

    Fields: `status`, the HTTP status; `url`.
    """


class OverloadedError(ServeError):
    """A prediction server has more requests than it can answer in time, or is not ready. Try again later.

    Fields: `retry_after`, seconds after which to try again, and the fields of `ServeError`.
    """


class DeadlineError(PersiaError):
    """A wait passed its deadline; the message names the peer and the operation that were late.

    Fields of a call to another process: `peer`, `address`, `operation`, `seconds`.
    """


class RemoteError(PersiaError):
    """A method of another process raised an error other than PersiaError; a note holds the remote traceback.

    Fields: `kind` (class of the error), `peer`, `address`, `operation`.
    """


class PeerRestartedError(PersiaError):
    """The connection was lost during a call that must not be repeated. The call ran once or not at all.

    Fields: `peer`, `address`, `operation`.
    """


class RoleDiedError(PersiaError):
    """A process of the cluster died and is not restarted; the message shows the last lines of its output.

    Fields: `role`, `rank`.
    """


class NNWorkersDiedError(PersiaError):
    """Other NN workers died, and this one stopped at a step boundary. On a cluster, `fit` restarts the NN workers.

    Fields: `ranks`, `lost` (their `persia.types.Losses`, on one of the others).
    """


class NNWorkersChangeError(PersiaError):
    """Training has stopped at a step boundary, as another number of NN workers is to train. `fit` continues with them.

    Fields: `step` (global step).
    """


class UnequalStepsError(PersiaError):
    """An NN worker has a batch and others have none, so its all-reduce of gradients would block.

    Fields: `batch` (number in the pass), `ended` (ranks that ran out of batches), `left` (ranks that left their loop or
    failed), `having` (ranks that still had batches).
    """


class WireError(PersiaError):
    """A message violates the wire format or its limits, or a value cannot be sent. No part of it has been used."""


class ClosedError(PersiaError):
    """A stub or server was used after it was closed, or in a forked child of the process that created it."""


class DivergedError(PersiaError):
    """Logits, the loss of a batch, or gradients are not finite; the message names the batch, or tables and features.

    The network may hold NaN.
    """


class StaleBatchError(PersiaError):
    """A batch was used after its release, for example by a second backward after its gradient was pushed."""


class StaleMapError(PersiaError):
    """Ids were routed by a bucket map that the embedding PS does not have. Nothing was read or changed.

    Fields: `routed` (version of the map by which the ids were routed), `current` (version of the PS's map).
    """


class StalePushError(PersiaError):
    """A gradient comes from a replaced NN worker or belongs to a step that is not open. It is not applied."""


class MovedError(PersiaError):
    """The called member is leaving or no longer responsible. Refresh the membership and call another one."""


class MissingExtraError(PersiaError):
    """An optional dependency is not installed; the message gives the `pip install` line."""
