"""Keeps the view that requests use up to date with the log of changes."""

from __future__ import annotations

import threading
import time
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from persia.batching.item_codes import read_code_files
from persia.checkpoint.compatibility import schema_differences
from persia.checks import without_userinfo
from persia.errors import CheckpointError, PublishError
from persia.nn.staging import staging_for
from persia.publish import Change, Description, ModelDescription, NetworkUpdate, follow
from persia.publish.epoch_reader import EpochReader, Update
from persia.serve.cache import SnapshotCache
from persia.serve.compiling import Compiler, CompilerOptions
from persia.serve.device_rows import DeviceRows
from persia.serve.inputs import InputCounts
from persia.serve.network_builder import ModelSource, Network, NetworkBuilder
from persia.serve.options import ServeOptions, ServeState
from persia.serve.remote_rows import RemoteEpoch, RowServers
from persia.serve.serving_drift import ServingDrift
from persia.serve.updates import EpochRows, RowReading
from persia.serve.views import Readers, View
from persia.telemetry.logs import get_logger

__all__ = ["ChangeListener", "ViewUpdater"]

LOG = get_logger("persia.serve")

DRIFT_SECONDS = 30.0
"""Interval of reading the distributions of training."""


class ChangeListener(Protocol):
    """Receives notice of changed rows; `ItemIndex` is one. Its methods must not block."""

    def note_changes(self, table: str, ids: NDArray[np.uint64], removed: NDArray[np.uint64]) -> None:
        """Records the rows of a table that were set, after others were removed."""

    def note_all(self) -> None:
        """Records that any row may have changed."""


class _Epoch:
    """An epoch of the log: its rows, its network, and the versions that wait for rows.

    Args:
        run: random identifier of the epoch.
        number: number of the epoch.
        rows: rows of the epoch, in this process or at row servers.
        builder: builder of its networks.
        readers: readers of its schema.
        compiler: compiler of its networks.
    """

    def __init__(
        self,
        run: str,
        number: int,
        rows: EpochRows | RemoteEpoch,
        builder: NetworkBuilder,
        readers: Readers,
        compiler: Compiler,
    ) -> None:
        self.run = run
        self.number = number
        self.rows = rows
        self.builder = builder
        self.readers = readers
        self.compiler = compiler
        self.network: Network | None = None
        self.waiting: list[NetworkUpdate] = []
        """Versions that wait for rows: the first, so that a version is eventually served, and the last."""

    def apply(self, update: Update) -> list[Change] | None:
        """See `EpochState.apply`. A version of the network waits until the rows contain its step."""
        if isinstance(update, NetworkUpdate):
            self.waiting[1:] = [update]
        elif isinstance(self.rows, EpochRows):
            return self.rows.apply(update)
        return []

    def take_network(self, contained: int) -> NetworkUpdate | None:
        """Returns the newest waiting version whose step the rows contain, or None; drops older ones."""
        ready = [update for update in self.waiting if update.step <= contained]
        self.waiting = [update for update in self.waiting if update.step > contained]
        return ready[-1] if ready else None


class ViewUpdater:
    """Follows the log of changes, and updates the view that requests use. Thread-safe.

    Args:
        url: URL of the log.
        model: see `ModelSource`.
        options: device, threads, ...

    Attributes:
        stop: once set, a refresh in progress raises ClosedError.
        view: the newest view; None before the first.

    Raises:
        CheckpointError: the URL does not name a file system.
        MissingExtraError: a package for the URL's file system is not installed.
        ConfigError: the device does not exist.
    """

    def __init__(self, url: str, model: ModelSource, options: ServeOptions) -> None:
        self._follower = follow(url, rows=not options.rows)
        self._model = model
        self._options = options
        self._staging = staging_for(options.device)
        self._lock = threading.Lock()
        self._reader = EpochReader(self._follower, self._begin)
        self._network_problem = ""
        self._problem = ""
        self._retired: list[View] = []
        """Earlier views, which requests may still use."""
        self._updates = self._snapshots = 0
        self.stop = threading.Event()
        cache = None if options.cache_dir is None or options.rows else SnapshotCache(options.cache_dir, url)
        self._reading = RowReading(cache, self.stop)
        self._servers = RowServers(options.rows, options.rows_seconds) if options.rows else None
        self.view: View | None = None
        self.drift: ServingDrift | None = None
        """Compares requests with training; None before the first epoch."""
        self.inputs: InputCounts | None = None
        """Counts what arrives unlike in training; None before the first epoch."""
        self._drift_due = 0.0
        self._compiler: tuple[tuple[ModelDescription | None, str], Compiler] | None = None
        """Description and precision of the networks, and their compiler."""
        self.copies: DeviceRows | None = None
        """Copies of rows on the device, of the current view; all epochs have the same tables. None without."""
        self.listeners: list[ChangeListener] = []
        """Notified of changed rows, once requests see the changes."""

    def ready(self) -> bool:
        """Returns whether there is a view."""
        return self.view is not None

    @property
    def refusal(self) -> str:
        """Why the epoch of the log cannot be served; empty if it can."""
        return self._reader.refusal

    def refresh(self) -> None:
        """Applies new entries of the log. Calls are serialized."""
        with self._lock:
            self._free_views()
            for epoch, changes in self._reader.read():
                self._updates += 1
                self._snapshots += changes is None
                if changes and self.copies is not None:
                    self.copies.forget(changes)  # Before a request sees a network that needs these rows.
                self._adopt(epoch)
                if changes is not None and epoch is self._reader.current:
                    self._notify(changes)  # `_adopt` notifies of rows that others replace.
            problem = self._reader.problem
            if self._servers is not None:
                self._poll(self._servers)
                problem = problem or self._servers.problem
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
            view.rows.steps(),
            max(0.0, now - view.rows.time()),
            max(0.0, now - view.network.time),
            len(view.rows),
            self._updates,
            self._snapshots,
            self._problem,
            {} if self.drift is None else self.drift.result,
            {} if self.inputs is None else self.inputs.result,
        )

    def _poll(self, servers: RowServers) -> None:
        """Polls the row servers, and adopts epochs that waited for their rows.

        Raises:
            ConfigError: a row server's part does not match its position in the addresses.
        """
        servers.poll()
        for epoch in (self._reader.current, self._reader.next):
            if epoch is not None:
                self._adopt(epoch)

    def _notify(self, changes: list[Change] | None) -> None:
        """Notifies listeners of changes; None if any row may have changed."""
        for listener in list(self.listeners):  # Other threads add and remove listeners.
            if changes is None:
                listener.note_all()
                continue
            for change in changes:
                listener.note_changes(change.table, change.ids, change.removed)

    def _compare(self) -> None:
        """Compares requests with the distributions of training, which are read every `DRIFT_SECONDS`."""
        if self.drift is None or self.inputs is None or self.view is None:
            return
        if time.monotonic() >= self._drift_due:
            self._drift_due = time.monotonic() + DRIFT_SECONDS
            try:
                reference = self._follower.drift()
                self.drift.load(reference)
                self.inputs.load(reference)
            except (PublishError, CheckpointError) as error:
                LOG.warning("Drift is measured against older data, or not at all: %s", error.message)
        self.drift.count()
        self.inputs.count(self.view.rows if self._servers is None else None)

    @property
    def problem(self) -> str:
        """Why the last refresh could not apply everything; empty if it could."""
        return self._problem

    def release(self) -> None:
        """Drops all rows and networks, once requests do not use them any more."""
        with self._lock:
            self.view = None
            self._reader.clear()
            self._retired.clear()
            if self._servers is not None:
                self._servers.close()

    # --- epochs -------------------------------------------------------------------------------------------------

    def _begin(self, run: str, update: Update, description: Description | None) -> _Epoch:
        """Returns an epoch. Raises PublishError if it cannot be served, ConfigError if its copies do not fit."""
        assert description is not None
        if self.view is not None:
            differences = schema_differences(
                description.schema, self.view.schema, saved_in="the new epoch", used_in="what is served"
            )
            if differences:
                raise PublishError(
                    "its schema differs from the one that is served: " + "; ".join(differences) + ". Start another "
                    "server for it.",
                    differences=differences,
                )
        options = self._options
        builder = NetworkBuilder(self._model, description, self._staging.device, options.imports)
        schema = description.schema
        read_code_files(schema)  # No request shall wait for them.
        rows: EpochRows | RemoteEpoch
        if self._servers is None:
            rows = EpochRows(run, update, schema, self._reading)
        else:
            dims = {name: table.dim for name, table in schema.resolved_tables().items()}
            rows = RemoteEpoch(self._servers, run, dims)
        if (self.copies is None or self.view is None) and options.device_rows and not self._staging.on_host:
            dims = {name: table.dim for name, table in schema.resolved_tables().items()}
            self.copies = DeviceRows(dims, options.device_rows, self._staging.free_bytes(), self._staging.device)
        readers = Readers(schema, rows.buckets, self._staging, options.threads, self.copies)
        compiler_options = CompilerOptions(
            options.compile, options.cache_dir, self._staging.device, description.precision
        )
        key = description.model, description.precision
        if self._compiler is None or self._compiler[0] != key:  # Otherwise the code is valid for the new epoch, too.
            self._compiler = key, Compiler(description.schema, compiler_options)
        if self.drift is None:
            self.drift = ServingDrift(description.schema)
            self.inputs = InputCounts(description.schema)
        return _Epoch(run, update.epoch, rows, builder, readers, self._compiler[1])

    def _adopt(self, epoch: _Epoch) -> None:
        """Creates the view of an epoch, if it is complete and anything but the values of rows has changed.

        Notifies listeners if the new view has other rows: a new epoch's, or those of a snapshot.
        """
        contained = epoch.rows.contained()
        if contained is None:
            return
        update = epoch.take_network(contained)
        if update is not None:
            try:
                epoch.network = epoch.builder.load(update)
                epoch.compiler.adopt(epoch.network)
                self._network_problem = ""
            except PublishError as error:
                self._network_problem = error.message
        if epoch.network is None:
            return
        rows, view = epoch.rows.source(epoch.network.step), self.view
        same_rows = view is not None and view.rows == rows
        if view is not None and view.network is epoch.network and same_rows:
            return
        if self.copies is not None and not same_rows:
            self.copies.begin(rows)
        self.view = View(epoch.number, epoch.network, rows, epoch.readers)
        if view is not None:
            self._retired.append(view)
        self._reader.adopt(epoch)
        if not same_rows:
            self._notify(None)  # Not before: listeners read the rows of the view.

    def _free_views(self) -> None:
        self._retired = [view for view in self._retired if view.used]
