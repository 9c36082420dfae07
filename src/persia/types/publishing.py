"""Records of publishing: its options, the order that a PS gets, and what it answers."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import msgspec

from persia.checks import check_choice, check_integer, check_kind, check_seconds, plain_fields, plain_paths

__all__ = ["ModelDescription", "PublishDtype", "PublishOptions", "PublishOrder", "PublishStatus"]

PublishDtype = Literal["float32", "float16", "int8"]


class ModelDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describes a network so that another process can build it, as `[model]` of a configuration does.

    Args:
        kind: a model of `persia.nn.models` by the name that configurations have for it, or "module:Class".
        options: arguments of the model, by name; values of JSON.
    """

    kind: str = "ffnn"
    options: dict[str, Any] = {}


class PublishOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a training run publishes the changes of its rows, and its network, and how often.

    Args:
        url: a directory of its own: a path, or any URL that fsspec supports; or a topic of its own,
            `kafka://HOST:PORT[,HOST:PORT]/TOPIC`. One run at a time publishes there.
        seconds: between two increments of a PS, and between two versions of the network.
        rows: a PS also publishes once so many gradients of rows were applied; None for no such bound.
        dtype: of published values. float16 rounds to the nearest; int8 has a scale for each row, and an error of at
            most 1/254 of the row's largest magnitude.
        keep: snapshots of each PS to keep, with the increments that follow them; older ones are removed.
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
    """Tells a PS to publish.

    Attributes:
        options: where and how often.
        epoch: number of the epoch.
        run: random identifier of the epoch, which its files repeat.
        server: number of this PS.
        step: global steps that its rows contain now, at least.
        approval: whether each entry waits for `EmbeddingPS.approve` before readers see it, unless it is the last.
    """

    options: PublishOptions
    epoch: int
    run: str
    server: int
    step: int
    approval: bool = False


class PublishStatus(NamedTuple):
    """How far a PS has published.

    Attributes:
        epoch: number of its epoch; -1 if it does not publish, or its rows have gone back.
        sequence: number of the last entry that is complete; -1 before the first.
        step: global steps that this entry contains.
        rows: rows published in this epoch.
        age: seconds since the rows were as they were published last; 0 before the first entry.
        error: why it cannot write at present; empty if it can.
        complete: whether it has ended, and all changes until then are published.
        waiting: ticket of the entry that waits for approval; 0 if there is none. Each entry that waits has another one.
    """

    epoch: int = -1
    sequence: int = -1
    step: int = 0
    rows: int = 0
    age: float = 0.0
    error: str = ""
    complete: bool = False
    waiting: int = 0
