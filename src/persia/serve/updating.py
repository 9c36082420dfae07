"""Applies the log of changes to what is served, beside requests."""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from persia.checkpoint.compatibility import schema_differences
from persia.checks import without_userinfo
from persia.errors import CheckpointError, ClosedError, PublishError
from persia.nn.transfer import staging_for
from persia.publish import Change, Description, ModelDescription, NetworkUpdate, RowsUpdate, follow
from persia.schema import Schema
from persia.serve.cache import SnapshotCache, SnapshotKey
from persia.serve.compiling import Compiler, CompilerOptions
from persia.serve.drift import ServingDrift
from persia.serve.network import ModelSource, Network, NetworkBuilder
from persia.serve.options import ServeOptions, ServeState
from persia.serve.views import Readers, ServedRows, View
from persia.store.served import ServedTable

__all__ = ["ChangeListener", "Updater"]

LOG = logging.getLogger("persia.serve")

DRIFT_SECONDS = 30.0
"""Between two looks at the distributions of training."""


class ChangeListener(Protocol):
    """Is told of rows that have changed; `ItemIndex` is one. Its methods return at once."""

    def note_changes(self, table: str, ids: NDArray[np.uint64], removed: NDArray[np.uint64]) -> None:
        """Notes the rows of a table that were set, after others were removed."""

    def note_all(self) -> None:
        """Notes that any row may have changed."""


class _Epoch:
    """An epoch of the log: its rows by PS, its network, and the versions that wait for rows.

    Args:
        run: random identifier of the epoch.
        update: an update of it.
        schema: of the epoch.
        builder: of its networks.
        readers: of its schema.
        compiler: of its networks.
    """

    def __init__(
        self,
        run: str,
        update: RowsUpdate | NetworkUpdate,
        schema: Schema,
        builder: NetworkBuilder,
        readers: Readers,
        compiler: Compiler,
    ) -> None:
        self.run = run
        self.number = update.epoch
        self.count = update.servers
        self.dims = {name: table.dim for name, table in schema.resolved_tables().items()}
        self.builder = builder
        self.readers = readers
        self.compiler = compiler
        self.servers: dict[int, ServedRows] = {}
        self.network: Network | None = None
        self.waiting: list[NetworkUpdate] = []

    def offer(self, update: NetworkUpdate) -> None:
        """Adds a version that waits for rows. At most two wait: the first, so that one gets its turn, and the last."""
        self.waiting[1:] = [update]

    def take_network(self) -> NetworkUpdate | None:
        """Returns the newest version whose step the rows of all PSs contain, if one waits; older ones are dropped."""
        contained = min(server.step for server in self.servers.values())
        ready = [update for update in self.waiting if update.step <= contained]
        self.waiting = [update for update in self.waiting if update.step > contained]
        return ready[-1] if ready else None


class Updater:
    """Follows the log of changes, and has the view that requests use. Thread-safe.

    Args:
        url: of the log.
        model: see `ModelSource`.
        options: device, threads, ...

    Attributes:
        stop: once set, a refresh in work raises ClosedError.
        view: the newest view; None before the first.

    Raises:
        CheckpointError: the URL is not valid.
        MissingExtraError: a package for the URL's file system is not installed.
        ConfigError: the device does not exist.
    """

    def __init__(self, url: str, model: ModelSource, options: ServeOptions) -> None:
        self._follower = follow(url)
        self._model = model
        self._options = options
        self._staging = staging_for(options.device)
        self._cache = None if options.cache_dir is None else SnapshotCache(options.cache_dir, url)
        self._lock = threading.Lock()
        self._epoch: _Epoch | None = None
        self._next: _Epoch | None = None
        """The epoch that is being read, before all of it is there."""
        self._refused: tuple[str, str] = "", ""
        """The run of an epoch that cannot be served, and why."""
        self._network_problem = ""
        self._problem = ""
        self._retired: list[View] = []
        """Earlier views, which requests may still use."""
        self._updates = self._snapshots = 0
        self.stop = threading.Event()
        self.view: View | None = None
        self.drift: ServingDrift | None = None
        """Compares requests with training; None before the first epoch."""
        self._drift_due = 0.0
        self._compiler: tuple[tuple[ModelDescription | None, str], Compiler] | None = None
        """Compiles networks, and what it compiles: description and precision."""
        self.listeners: list[ChangeListener] = []
        """Are told of rows that have changed, after requests see them."""

    def ready(self) -> bool:
        """Returns whether there is a view."""
        return self.view is not None

    @property
    def refusal(self) -> str:
        """Why the epoch of the log cannot be served; empty if it can."""
        run, problem = self._refused
        return problem if run and run == self._follower.run else ""

    def refresh(self) -> None:
        """Applies what is new in the log. Calls run one after the other."""
        with self._lock:
            self._free_views()
            problem = ""
            for update in self._follower.updates():
                try:
                    epoch = self._epoch_of(update)
                    changes: list[Change] | None = []
                    if isinstance(update, RowsUpdate):
                        changes = self._apply(epoch, update)
                    else:
                        epoch.offer(update)
                except (PublishError, CheckpointError) as error:
                    problem = problem or error.message
                    if self.refusal or not isinstance(update, RowsUpdate):
                        break
                    update.changes.reject(error.message)
                else:
                    self._updates += 1
                    self._adopt(epoch)
                    self._tell(changes)
            self._problem = without_userinfo(problem or self._network_problem or self._follower.problem)
            self._free_views()
            self._compare()

    def state(self) -> ServeState | None:
        """Returns what is served; None before the first view."""
        view, now = self.view, time.time()
        if view is None:
            return None
        return ServeState(
            view.epoch,
            view.network.step,
            {number: server.step for number, server in enumerate(view.servers)},
            max(0.0, now - min(server.time for server in view.servers)),
            max(0.0, now - view.network.time),
            sum(len(table) for server in view.servers for table in server.tables.values()),
            self._updates,
            self._snapshots,
            self._problem,
            {} if self.drift is None else self.drift.result,
        )

    def _tell(self, changes: list[Change] | None) -> None:
        """Tells listeners of changes; None if all rows of a PS may have changed."""
        for listener in self.listeners:
            if changes is None:
                listener.note_all()
                continue
            for change in changes:
                listener.note_changes(change.table, change.ids, change.removed)

    def _compare(self) -> None:
        """Reads how inputs are distributed in training, now and then, and compares requests with it."""
        if self.drift is None or self.view is None:
            return
        if time.monotonic() >= self._drift_due:
            self._drift_due = time.monotonic() + DRIFT_SECONDS
            try:
                self.drift.load(self._follower.drift())
            except (PublishError, CheckpointError) as error:
                LOG.warning("Drift is measured against older data, or not at all: %s", error.message)
        self.drift.count()

    @property
    def problem(self) -> str:
        """Why the last refresh could not apply everything; empty if it could."""
        return self._problem

    def release(self) -> None:
        """Drops all rows and networks, once requests do not use them any more."""
        with self._lock:
            self.view = self._epoch = self._next = None
            self._retired.clear()

    # --- epochs -------------------------------------------------------------------------------------------------

    def _epoch_of(self, update: RowsUpdate | NetworkUpdate) -> _Epoch:
        """Returns the epoch of an update, which is a new one if it is the first.

        Raises:
            PublishError: the epoch cannot be served.
        """
        run = self._follower.run
        for known in (self._epoch, self._next):
            if known is not None and known.run == run:
                return known
        if self.refusal:
            raise PublishError(self.refusal)
        self._next = None  # Of an epoch that was never complete.
        description = self._follower.description()
        try:
            self._next = self._begin(run, update, description)
        except PublishError as error:
            self._refused = run, f"Epoch {update.epoch} is not served: {error.message}"
            raise PublishError(self._refused[1], epoch=update.epoch) from error
        return self._next

    def _begin(self, run: str, update: RowsUpdate | NetworkUpdate, description: Description | None) -> _Epoch:
        if description is None:
            raise PublishError(
                "it has no model.json, so its schema is not known: it was written by an earlier version of persia. "
                "Publish again with this one."
            )
        if self.view is not None:
            found = schema_differences(
                description.schema, self.view.schema, there="the new epoch", here="what is served"
            )
            if found:
                raise PublishError(
                    "its schema differs from the one that is served: " + "; ".join(found) + ". Start another server "
                    "for it.",
                    differences=found,
                )
        options = self._options
        builder = NetworkBuilder(self._model, description, self._staging.device, options.imports)
        readers = Readers(description.schema, update.servers, self._staging, options.threads)
        how = CompilerOptions(options.compile, options.cache_dir, self._staging.device, description.precision)
        made_of = description.model, description.precision
        if self._compiler is None or self._compiler[0] != made_of:  # Else its code fits the new epoch, too.
            self._compiler = made_of, Compiler(description.schema, how)
        if self.drift is None:
            self.drift = ServingDrift(description.schema)
        return _Epoch(run, update, description.schema, builder, readers, self._compiler[1])

    # --- rows ---------------------------------------------------------------------------------------------------

    def _apply(self, epoch: _Epoch, update: RowsUpdate) -> list[Change] | None:
        """Applies the rows of an update: those of a whole one to new tables, which then replace those of its PS.

        Returns:
            The changes of an increment; None for a whole update.
        """
        if update.whole:
            tables = self._read(epoch, update) if self._cache is None else self._cached(self._cache, epoch, update)
            epoch.servers[update.server] = ServedRows(tables, update.step, update.time)
            self._snapshots += 1
            return None
        served = epoch.servers[update.server]
        changes = list(update.changes)  # In memory anyway. It is checked before any of it is applied.
        for change in changes:
            _check(change, epoch)
        changes = _without_readmitted(changes)
        for change in changes:
            served.tables[change.table].remove(change.removed)
            served.tables[change.table].set(change.ids, change.values)
        served.step, served.time = max(served.step, update.step), update.time
        return changes

    def _read(self, epoch: _Epoch, update: RowsUpdate) -> dict[str, ServedTable]:
        """Returns new tables with the rows of a whole update."""
        tables = {name: ServedTable(dim) for name, dim in epoch.dims.items()}
        for change in update.changes:
            self._check_open()
            _check(change, epoch)
            tables[change.table].set(change.ids, change.values)
        return tables

    def _cached(self, cache: SnapshotCache, epoch: _Epoch, update: RowsUpdate) -> dict[str, ServedTable]:
        """Returns the same, as files that are shared with other processes of this host."""
        key = SnapshotKey(epoch.run, epoch.number, update.server, update.sequence, epoch.count)
        with cache.locked(update.server, self._check_open):
            found = cache.open(key, epoch.dims)
            if found is not None:
                update.changes.skip()
                return found
            tables = self._read(epoch, update)
            return cache.keep(key, tables) or tables

    def _check_open(self) -> None:
        if self.stop.is_set():
            raise ClosedError("The predictor was closed while it read a snapshot.")

    def _adopt(self, epoch: _Epoch) -> None:
        """Makes the view of an epoch, if all of it is there and anything but the values of rows has changed."""
        if len(epoch.servers) < epoch.count:
            return
        update = epoch.take_network()
        if update is not None:
            try:
                epoch.network = epoch.builder.load(update)
                epoch.compiler.adopt(epoch.network)
                self._network_problem = ""
            except PublishError as error:
                self._network_problem = error.message
        if epoch.network is None:
            return
        servers = [epoch.servers[number] for number in range(epoch.count)]
        view = self.view
        if view is not None and view.network is epoch.network and view.servers == tuple(servers):
            return
        self.view = View(epoch.number, epoch.network, servers, epoch.readers)
        if view is not None:
            self._retired.append(view)
        if epoch is self._next:
            self._epoch, self._next = epoch, None

    def _free_views(self) -> None:
        self._retired = [view for view in self._retired if view.used]


def _check(change: Change, epoch: _Epoch) -> None:
    """Raises PublishError if a change does not fit the schema of its epoch."""
    dim = epoch.dims.get(change.table)
    if dim is None or change.values.shape[1] != dim:
        has = "is unknown to" if dim is None else f"has dim {change.values.shape[1]}, not {dim}, as in"
        raise PublishError(f"Table {change.table!r} {has} the schema of epoch {epoch.number}.", table=change.table)


def _without_readmitted(changes: list[Change]) -> list[Change]:
    """Returns the changes without removals of rows that they set again: requests would miss these in between."""
    later: dict[str, list[NDArray[np.uint64]]] = {}
    kept = []
    for change in reversed(changes):
        later.setdefault(change.table, []).append(change.ids)
        if len(change.removed):
            gone = np.isin(change.removed, np.concatenate(later[change.table]), invert=True)
            change = change._replace(removed=change.removed[gone])
        kept.append(change)
    return kept[::-1]
