"""Options and state of a prediction server."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, NoneType
from typing import Literal, NamedTuple

import msgspec

from persia.checks import MAX_THREADS, check_flag, check_integer, check_kind, check_seconds, plain_fields, plain_paths
from persia.errors import ConfigError

__all__ = ["RowServerOptions", "ServeOptions", "ServeState"]

MAX_DEVICE_ROWS = (1 << 31) - 2
"""Places of copies are int32."""


class ServeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a `Predictor` that have defaults.

    Args:
        poll_seconds: interval of polling the log of changes, in seconds.
        device: device of the network: "cpu", "cuda", "cuda:1", or "auto" for CUDA if available.
        threads: threads of each request for removing duplicates and pooling. Requests run in parallel in any case.
        cache_dir: local directory for rows of snapshots as files, which processes of this host map and share, so that
            they start faster. Without it, rows are in the memory of each process.
        imports: modules whose classes the description of a model in the log may name, as "module:Class". They are
            imported from `sys.path`; without them, a log cannot name code.
        compile: whether to run compiled code in place of the Python of the network: true waits for the compiler at the
            start, auto serves eagerly until it is done. Needs g++; see `compile_network`. `rank` always runs eagerly.
            The code is cached in `cache_dir`, if it is set, for the next start.
        rows: addresses of all row servers (`persia serve-rows`), in the order of their parts, such as
            "tcp://10.0.0.1:7000": rows are looked up there, for tables that do not fit this host. Without them, all
            rows are in this process.
        rows_seconds: deadline of a lookup at the row servers, in seconds.
        device_rows: maximum number of rows of each table of which the GPU of the network keeps copies, those that
            requests have used: they do not cross to it again until they change. 0 for none. No effect on a CPU; not
            with `rows`, as row servers do not report changes.
    """

    poll_seconds: float = 1.0
    device: str = "cpu"
    threads: int = 1
    cache_dir: str | None = None
    imports: tuple[str, ...] = ()
    compile: bool | Literal["auto"] = False
    rows: tuple[str, ...] = ()
    rows_seconds: float = 1.0
    device_rows: int = 0

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
        check_integer("device_rows", self.device_rows, 0, MAX_DEVICE_ROWS)
        if self.device_rows and self.rows:
            raise ConfigError(
                f"device_rows = {self.device_rows} needs the rows in this process, and `rows` has the addresses of row "
                "servers, which do not report which rows have changed. Set device_rows to 0, or leave `rows` out.",
                field="device_rows",
            )
        if self.compile != "auto":
            check_flag("compile", self.compile)


class RowServerOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a `RowServer`.

    Args:
        poll_seconds: interval of polling the log of changes, in seconds.
        grace_seconds: seconds for which the rows of an epoch are kept once the rows of the next epoch are complete, so
            that all predictors can switch to it.
        cache_dir: local directory for rows of snapshots as files, which a restarted server maps. Without it, rows are
            in memory only.
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
        row_steps: minimum number of global steps that the rows contain, by PS or by row server.
        rows_age_seconds: age of the oldest served rows of a PS; infinite if no row server has the rows.
        network_age_seconds: age of the served network.
        rows: number of rows of all tables.
        updates: number of applied entries of the log, of rows and of the network.
        snapshots: number of applied entries that replaced all rows of a PS.
        problem: why something newer in the log is not served; empty if everything is.
        drift: PSI of recent requests against training, by feature; see `DriftCounts.compared`. Empty while there are
            too few rows on either side, or if the log lacks the distributions of training.
        inputs: what arrives unlike in training, by column: shares of values that are "missing" (and
            "missing_in_training", where it is known), of texts with a "separator" in a feature without `split`, and of
            distinct ids that are "unseen": they have no row. Shares of 0 are left out.
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
    inputs: Mapping[str, Mapping[str, float]] = MappingProxyType({})
