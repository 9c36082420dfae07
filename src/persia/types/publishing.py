"""Records of publishing: its options, the order to a PS, and the status that it returns."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import msgspec

from persia.checks import check_choice, check_integer, check_kind, check_seconds, plain_fields, plain_paths

__all__ = ["ModelDescription", "PublishDtype", "PublishOptions", "PublishOrder", "PublishStatus"]

PublishDtype = Literal["float32", "float16", "int8"]


class ModelDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describes a network so that another process can build it, like `[model]` of a configuration.

    Args:
        kind: a model of `persia.nn.models` by its name in configurations, or "module:Class".
        options: arguments of the model by name; JSON values.
    """

    kind: str = "ffnn"
    options: dict[str, Any] = {}


class PublishOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where and how often a training run publishes changes of its rows and its network.

    Args:
        url: a directory, as a path or any URL that fsspec supports, or a topic, `kafka://HOST:PORT[,HOST:PORT]/TOPIC`.
            It must not be used for anything else; one run at a time publishes there.
        seconds: seconds between two increments of a PS, and between two versions of the network.
        rows: a PS also publishes after applying gradients to this number of rows; None for no such bound.
        dtype: dtype of published values. float16 rounds to the nearest; int8 has a scale for each row, and an error of
            at most 1/254 of the row's largest magnitude.
        keep: number of snapshots of each PS to retain, with the increments that follow them; older ones are removed.
    """

    url: str
    seconds: float = 10.0
    rows: int | None = None
    dtype: PublishDtype = "float32"
    keep: int = 2

    def __post_init__(self) -> None:
        plain_fields(self)
        plain_paths(self, "url")
        check_kind("url", self.url, str, "a path or URL")
        check_seconds("seconds", self.seconds)
        if self.rows is not None:
            check_integer("rows", self.rows, 1)
        check_choice("dtype", self.dtype, get_args(PublishDtype))
        check_integer("keep", self.keep, 1)


class PublishOrder(NamedTuple):
    """An order to a PS to publish.

    Attributes:
        options: where and how often to publish.
        epoch: number of the epoch.
        run: random identifier of the epoch, also in its files.
        server: number of this PS.
        step: minimum number of global steps that its rows contain now.
        approval: whether each entry except the last waits for `EmbeddingPS.approve` before readers see it.
    """

    options: PublishOptions
    epoch: int
    run: str
    server: int
    step: int
    approval: bool = False


class PublishStatus(NamedTuple):
    """Publishing progress of a PS.

    Attributes:
        epoch: number of its epoch; -1 if it does not publish, or its rows were reset to an earlier state.
        sequence: number of the last complete entry; -1 before the first.
        step: number of global steps that this entry contains.
        rows: number of rows published in this epoch.
        age: age of the last published state of the rows in seconds; 0 before the first entry.
        error: reason why it currently cannot write; empty if it can.
        complete: whether it has ended, with all changes until then published.
        waiting: ticket of the entry that waits for approval; 0 if there is none. Each entry has a different ticket.
    """

    epoch: int = -1
    sequence: int = -1
    step: int = 0
    rows: int = 0
    age: float = 0.0
    error: str = ""
    complete: bool = False
    waiting: int = 0
