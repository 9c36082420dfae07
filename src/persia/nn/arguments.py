"""Type checks of the arguments of `Trainer` and `EmbeddingCollection`, so that a wrong one is named immediately."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from persia.batching.batch import Batch
from persia.checks import described
from persia.errors import ConfigError
from persia.modes import Auto, Mode
from persia.nn.prepared import PreparedBatch
from persia.schema import EmbeddingOptimizer, Schema

__all__ = [
    "BATCH",
    "CLUSTER",
    "DENSE_OPTIMIZER",
    "EMBEDDING_OPTIMIZER",
    "GRAD_SCALER",
    "MODE",
    "MODEL",
    "MODE_OR_AUTO",
    "NEW_MODE",
    "SCHEMA",
    "Expected",
    "check_arguments",
    "needs_trainer",
    "options_of",
]


class Expected(NamedTuple):
    """The kind of value that an argument takes.

    Attributes:
        accepts: returns whether a value is of this kind.
        words: describe it, for errors.
    """

    accepts: Callable[[Any], bool]
    words: str


def _optional(*types: Any) -> Callable[[Any], bool]:
    """Returns a check for None or an instance. Classes are no modes, though they have all methods of the Protocol."""
    return lambda value: value is None or (isinstance(value, types) and not isinstance(value, type))


BATCH = Expected(
    lambda value: isinstance(value, (PreparedBatch, Batch)),
    "a batch that `prefetch` yields, or persia.Batch.from_columns(schema, columns)",
)
MODEL = Expected(lambda value: isinstance(value, torch.nn.Module), "a torch.nn.Module")
SCHEMA = Expected(lambda value: isinstance(value, Schema), "a persia.Schema, such as the `schema` of a reader")
DENSE_OPTIMIZER = Expected(
    lambda value: callable(value) and not isinstance(value, torch.optim.Optimizer),
    "a function that makes it: lambda params: torch.optim.Adam(params, 1e-3)",
)
EMBEDDING_OPTIMIZER = Expected(
    lambda value: isinstance(value, EmbeddingOptimizer), "one of persia.optim, such as persia.optim.Adagrad(lr=0.05)"
)
MODE = Expected(_optional(Mode), "one of persia.modes, such as persia.modes.Sync()")
NEW_MODE = Expected(lambda value: value is not None and MODE.accepts(value), MODE.words)
MODE_OR_AUTO = Expected(_optional(Mode, Auto), MODE.words)
CLUSTER = Expected(
    lambda value: value is None or (callable(getattr(value, "connect", None)) and not isinstance(value, type)),
    "one of persia.cluster, such as persia.cluster.Embedded()",
)
GRAD_SCALER = Expected(_optional(torch.amp.GradScaler), "a torch.amp.GradScaler")


def options_of(record: type) -> Expected:
    """Returns the kind of an argument that takes a record of options."""
    return Expected(_optional(record), f"{record.__name__}(...)")


def check_arguments(**arguments: tuple[object, Expected]) -> None:
    """Checks arguments: by name, each value and the kind that is expected.

    Raises:
        ConfigError: a value is not of its kind; the message and `field` name the first such argument.
    """
    for name, (value, expected) in arguments.items():
        if not expected.accepts(value):
            raise ConfigError(f"Invalid {name} = {described(value)}; expected {expected.words}.", field=name)


def needs_trainer(mode: Mode) -> ConfigError:
    """Returns the error of a loop without a `Trainer` in a mode that needs one."""
    name = type(mode).__name__
    return ConfigError(f"The mode {name} keeps the network on dense PSs, so a `Trainer` has to run it.", field="mode")
