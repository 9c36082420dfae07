"""Options of a prediction server, and what it tells of its state."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, NoneType
from typing import Literal, NamedTuple

import msgspec

from persia.checks import MAX_THREADS, check_flag, check_integer, check_kind, check_seconds, plain_fields, plain_paths

__all__ = ["RowServerOptions", "ServeOptions", "ServeState"]


class ServeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a `Predictor` that have defaults.

    Args:
        poll_seconds: seconds between two looks at the log of changes.
        device: where the network runs: "cpu", "cuda", "cuda:1", or "auto" for CUDA where there is a device.
        threads: threads of each request for removing duplicates and pooling. Requests run beside one another anyway.
        cache_dir: local directory for rows of snapshots as files, which processes of this host map and share, so that
            they start faster. Without it, rows are in the memory of each process.
        imports: modules whose classes the description of a model in the log may name, as "module:Class". They are
            imported from `sys.path`; without them, a log cannot name code.
        compile: whether to run compiled code in place of the Python of the network: true waits for the compiler at the
            start, auto serves eagerly until it is done. Needs g++; see `compile_network`. `rank` runs eagerly in any
            case. Code goes to `cache_dir`, if there is one, and is then there at the next start.
        rows: addresses of row servers (`persia serve-rows`), all of them and in the order of their parts, such as
            "tcp://10.0.0.1:7000": rows are looked up there, for tables that do not fit this host. Without them, all
            rows are in this process.
        rows_seconds: deadline of a lookup at the row servers, in seconds.
    """

    poll_seconds: float = 1.0
    device: str = "cpu"
    threads: int = 1
    cache_dir: str | None = None
    imports: tuple[str, ...] = ()
    compile: bool | Literal["auto"] = False
    rows: tuple[str, ...] = ()
    rows_seconds: float = 1.0

    def __post_init__(self) -> None:
        plain_fields(self)
        plain_paths(self, "cache_dir")
        check_seconds("poll_seconds", self.poll_seconds)
        from persia.nn.options import check_device  # Imports torch, which the help text of a command does not need.

        check_device(self.device)
        check_integer("threads", self.threads, 1, MAX_THREADS)
        check_kind("cache_dir", self.cache_dir, (str, NoneType), "a path, or None")
        check_kind("imports", self.imports, (tuple, list), "a tuple of names of modules")
        for name in self.imports:
            check_kind("imports", name, str, "a tuple of names of modules")
        check_kind("rows", self.rows, (tuple, list), "a tuple of addresses of row servers")
        for address in self.rows:
            check_kind("rows", address, str, "a tuple of addresses of row servers")
        check_seconds("rows_seconds", self.rows_seconds)
        if self.compile != "auto":
            check_flag("compile", self.compile)


class RowServerOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a `RowServer`.

    Args:
        poll_seconds: seconds between two looks at the log of changes.
        grace_seconds: seconds for which the rows of an epoch are kept once those of the next one are complete, so that
            predictors can change to it together.
        cache_dir: local directory for rows of snapshots as files, which a server that restarts maps. Without it, rows
            are in memory only.
    """

    poll_seconds: float = 1.0
    grace_seconds: float = 300.0
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        plain_paths(self, "cache_dir")
        check_seconds("poll_seconds", self.poll_seconds)
        check_seconds("grace_seconds", self.grace_seconds)
        check_kind("cache_dir", self.cache_dir, (str, NoneType), "a path, or None")


class ServeState(NamedTuple):
    """The state of a `Predictor`.

    Attributes:
        epoch: number of the epoch.
        network_step: global step of the network.
        row_steps: by PS, or by row server, the global steps that its rows contain, at least.
        rows_age_seconds: since the oldest rows of a PS were as they are served; infinite if no row server has them.
        network_age_seconds: since the network was as it is served.
        rows: number of rows of all tables.
        updates: entries of the log that were applied so far, of rows and of the network.
        snapshots: those of them that replaced all rows of a PS.
        problem: why something newer in the log is not served; empty if everything is.
        drift: PSI of recent requests against training, by feature; see `DriftCounts.compared`. Empty while there are
            too few rows on either side, or the log does not say how inputs are distributed in training.
    """

    epoch: int
    network_step: int
    row_steps: dict[int, int]
    rows_age_seconds: float
    network_age_seconds: float
    rows: int
    updates: int
    snapshots: int
    problem: str
    drift: Mapping[str, float] = MappingProxyType({})
