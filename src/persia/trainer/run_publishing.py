"""Publishing of a training run: begins its epochs, has the embedding PSs publish rows, and publishes the network."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch

from persia.batching.batch import Batch
from persia.checks import without_userinfo
from persia.errors import CheckpointError, PublishError
from persia.metrics.drift import DriftReference
from persia.nn.dense_step import DenseStep
from persia.nn.models.registry import description_of
from persia.publish.epochs import begin_epoch, remove_older_epochs, write_drift
from persia.publish.format import NETWORK, Epoch
from persia.publish.log_storage import open_storage
from persia.publish.publisher import reason
from persia.publish.stream import StreamWriter
from persia.retry import Deadline, retry
from persia.rpc.fan_out import call_all
from persia.services import EmbeddingPS
from persia.telemetry.logs import get_logger
from persia.trainer.drift_recorder import DriftRecorder
from persia.trainer.finite_state import FiniteState
from persia.trainer.options import Declared
from persia.trainer.state import TrainingState
from persia.types import ModelDescription, PublishOptions, PublishOrder, RegisteredBatch

__all__ = ["Publishing"]

LOG = get_logger("persia.publish")

KEPT_NETWORKS = 2
"""Versions of the network that stay, so that a reader of the one before is not disturbed."""

POLL_SECONDS = 0.2
"""Between two looks whether to stop, and whether a PS waits for approval."""

LAST_SECONDS = 60.0
"""Time that the last entries may take at the end of a `fit` call."""

RETRY_SECONDS = 20.0
"""The last network is retried for so long; the PSs retry their last rows by themselves."""


_Read = TypeVar("_Read", bound=Batch | RegisteredBatch | None)


class _Network(NamedTuple):
    """A copy of the network: its step, when it was made, and its tensors in CPU memory."""

    step: int
    at: float
    tensors: dict[str, torch.Tensor]


class Publishing:
    """Publishes one call of `fit` after the other; each begins an epoch. Used by the training thread of NN worker 0.

    A thread does all the work but the copies of the network, so training never waits for the file system. It begins a
    new epoch once a PS does not publish any more: it has restarted, or rows were loaded into it.

    Readers see rows and networks only once training has computed finite logits with them, or with later ones.

    Args:
        declared: the declarations of the run; without `TrainerOptions.publish`, nothing is published.
        network: the dense network.
        state: has the global step.
        finite: has the time until which rows and network have given finite logits.
        servers: the embedding PSs.
    """

    def __init__(
        self,
        declared: Declared,
        network: DenseStep,
        state: TrainingState,
        finite: FiniteState,
        servers: Sequence[EmbeddingPS],
    ) -> None:
        self._declared = declared
        self._options = declared.options.publish
        self._network = network
        self._state = state
        self._finite = finite
        self._servers = servers
        self._thread: threading.Thread | None = None
        self._approving: threading.Thread | None = None
        self._last = False  # Publish once more at the end.
        self._stop = threading.Event()
        self._wanted = threading.Event()
        self._copied = threading.Event()
        self._copy = _Network(0, 0.0, {})
        self._fresh: float | None = None
        """When the network was as it is published."""
        self._error = ""
        self._unseen = False
        """Whether rows or a network wait for finite logits."""
        self.drift = None if self._options is None else DriftRecorder(declared.schema)
        """Counts what is trained; None if nothing is published."""

    def begin(self) -> None:
        """Begins a new epoch, in the background.

        Raises:
            CheckpointError: the URL is not a file system's.
            ConfigError: the URL is not a topic's.
            MissingExtraError: a package for the URL is not installed.
        """
        if self._options is None:
            return
        model = description_of(self._network.model)
        run = _Run(self._options, self._declared, model, self._state, self._servers)
        self._stop = threading.Event()
        self._take_copy()
        self._thread = threading.Thread(
            target=self._publish, args=(run, self._stop), name="persia-publish-network", daemon=True
        )
        self._thread.start()
        self._approving = threading.Thread(
            target=self._approve, args=(run, self._stop), name="persia-publish-approve", daemon=True
        )
        self._approving.start()

    @property
    def active(self) -> bool:
        """Whether anything is published."""
        return self._options is not None

    def counted(self, read: Callable[[int], _Read]) -> Callable[[int], _Read]:
        """Returns a function that reads the batch of a number, and counts it for drift if anything is published."""
        drift = self.drift
        if drift is None:
            return read

        def counting(number: int) -> _Read:
            batch = read(number)
            if batch is not None:
                drift.read(number, batch)
            return batch

        return counting

    def offer(self) -> None:
        """Copies the network if the thread wants it. Call it after each batch."""
        if self._wanted.is_set():
            self._take_copy()

    def idle(self) -> None:
        """Looks whether the state gives finite logits, if readers wait for that and no batch comes."""
        if self._unseen:
            self._unseen = False
            self._finite.look()

    def end(self, *, last: bool) -> None:
        """Ends the publishing of a call of `fit`. Blocks for 60 s at most.

        Args:
            last: publish the rows and the network of this moment before.
        """
        thread, approving = self._thread, self._approving
        if thread is None or approving is None:
            return
        if last:
            self._take_copy()
        self._last = last
        self._stop.set()
        deadline = Deadline(LAST_SECONDS)
        for each in (thread, approving):
            each.join(deadline.left)
        if thread.is_alive():
            assert self._options is not None
            LOG.warning(
                "Publishing to %s has not ended within %g s; its last rows and network may be missing. Look for what "
                "hangs: the place, or an embedding PS.",
                without_userinfo(self._options.url),
                LAST_SECONDS,
            )
        self._thread = None

    def metrics(self) -> dict[str, float]:
        """Returns the age of the published network, and whether publishing fails; empty without. Thread-safe."""
        if self._options is None:
            return {}
        metrics: dict[str, float] = {"publish_failing": bool(self._error)}
        if self._fresh is not None:
            metrics["publish_age_seconds"] = time.monotonic() - self._fresh
        return metrics

    def _take_copy(self) -> None:
        tensors = {
            name: tensor.detach().to("cpu", copy=True)
            for name, tensor in self._network.model.state_dict().items()
            if isinstance(tensor, torch.Tensor)
        }
        self._copy = _Network(self._state.global_step, time.monotonic(), tensors)
        self._wanted.clear()
        self._copied.set()

    # --- the thread ---------------------------------------------------------------------------------------------

    def _publish(self, run: _Run, stop: threading.Event) -> None:
        assert self._options is not None
        while True:
            try:
                run.check_servers()
                if not self._await_finite(stop):
                    break
                run.write_network(self._copy)
                run.write_drift(self._reference())
                run.remove_old_epochs()
                self._fresh = self._copy.at
                if self._error:
                    LOG.warning("The network is published to %s again.", without_userinfo(self._options.url))
                    self._error = ""
            except Exception as error:  # Training must not end by it, nor publishing.
                if not self._error:
                    LOG.warning(
                        "Cannot publish the network to %s; training goes on: %s",
                        without_userinfo(self._options.url),
                        reason(error),
                    )
                self._error = reason(error)
            if stop.wait(self._options.seconds):
                break
            self._copied.clear()
            self._wanted.set()
            while not (self._copied.wait(POLL_SECONDS) or stop.is_set()):
                pass  # There may be no batch for a while.
        if threading.current_thread() is not self._thread:  # It hung in the file system for too long.
            return
        try:
            run.end(self._copy if self._last else None)
            if self._last:
                run.write_drift(self._reference())
        except Exception as error:
            LOG.warning(
                "The last changes are not published to %s: %s", without_userinfo(self._options.url), reason(error)
            )
            self._error = reason(error)

    def _await_finite(self, stop: threading.Event) -> bool:
        """Waits until a later batch than the copy of the network has had finite logits; False when stopped instead."""
        while self._finite.since <= self._copy.at:
            self._unseen = True
            if stop.wait(self._poll_seconds):
                return False
        return True

    def _approve(self, run: _Run, stop: threading.Event) -> None:
        """Lets readers see the rows that PSs have written, once a later lookup has led to finite logits. A thread."""
        while not stop.wait(self._poll_seconds):
            with contextlib.suppress(Exception):  # A PS that does not answer is asked again.
                self._unseen |= run.approve(self._finite.since)

    @property
    def _poll_seconds(self) -> float:
        assert self._options is not None
        return min(POLL_SECONDS, self._options.seconds / 4)

    def _reference(self) -> DriftReference | None:
        return None if self.drift is None else self.drift.reference()


class _Run:
    """The epochs of one call of `fit`, and the stream of the network in the last one."""

    def __init__(
        self,
        options: PublishOptions,
        declared: Declared,
        model: ModelDescription | None,
        state: TrainingState,
        servers: Sequence[EmbeddingPS],
    ) -> None:
        self._options = options
        self._declared = declared
        self._model = model
        self._input_rules = state.input_rules
        self._step = state.global_step
        """Global steps that the rows of all PSs contain."""
        self._storage = open_storage(options.url)
        self._servers = servers
        self._epoch: Epoch | None = None
        self._writer: StreamWriter | None = None
        self._written = -1
        """Step of the last version of the network in this epoch; -1 before the first."""
        self._alone = False
        """Whether older epochs have been removed."""
        self._waiting: dict[int, tuple[str, int, float]] = {}
        """By PS, the run and the ticket of the entry that waits for approval, and when it was seen first."""
        self._drift: tuple[Epoch, DriftReference] | None = None
        """Epoch and distributions that were written last."""

    def check_servers(self) -> None:
        """Begins an epoch, unless all PSs publish in the current one."""
        if self._epoch is None or any(server.published().epoch != self._epoch.epoch for server in self._servers):
            self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._epoch = None
        options = self._declared.options
        epoch = begin_epoch(
            self._storage,
            self._servers[0].buckets(),
            self._declared.schema,
            options.precision,
            self._model,
            self._input_rules,
        )
        number, run = epoch.epoch, epoch.run
        for rank, server in enumerate(self._servers):
            server.publish(PublishOrder(self._options, number, run, rank, self._step, approval=True))
        self._step = 0  # In the middle of training, pushes of the last steps may be on their way.
        self._writer = StreamWriter(self._storage, number, run, NETWORK, keep=KEPT_NETWORKS)
        self._epoch, self._written, self._alone = epoch, -1, False

    def approve(self, since: float) -> bool:
        """Lets readers see the entries that were waiting at some time before `since`. Returns whether others wait."""
        epoch, wait = self._epoch, False
        if epoch is None:
            return False
        for rank, server in enumerate(self._servers):
            ticket = server.published().waiting
            known = self._waiting.get(rank, ("", 0, 0.0))
            if not ticket:
                continue
            if known[:2] != (epoch.run, ticket):
                self._waiting[rank] = epoch.run, ticket, time.monotonic()
                wait = True
            elif known[2] < since:
                server.approve(epoch.run, ticket)
            else:
                wait = True
        return wait

    def write_network(self, network: _Network) -> None:
        """Writes a version of the network, if it is a new one."""
        assert self._writer is not None
        if network.step == self._written:
            return
        self._writer.discard()
        self._writer.add_part(network.tensors)
        self._writer.commit("network", network.step, network.at, [])
        self._written = network.step
        self._writer.remove_old()

    def write_drift(self, reference: DriftReference | None) -> None:
        """Writes the distributions of training next to the network, if they have changed."""
        if reference is None or self._epoch is None or self._drift == (self._epoch, reference):
            return
        write_drift(self._storage, self._epoch, reference)
        self._drift = self._epoch, reference

    def remove_old_epochs(self) -> None:
        """Removes older epochs, once each PS has published a snapshot in this one."""
        if not self._alone and all(server.published().sequence >= 0 for server in self._servers):
            self._remove_others()

    def _remove_others(self) -> None:
        assert self._epoch is not None
        remove_older_epochs(self._storage, self._epoch.epoch)
        self._alone = True

    def end(self, network: _Network | None) -> None:
        """Ends the publishing of all PSs, after the last changes and this network, if there is one.

        Raises:
            PublishError: a PS could not publish its last rows. Nor is the network then: readers would wait for them.
        """
        last = network is not None
        ended = call_all([functools.partial(server.end_publishing, last) for server in self._servers])
        if network is None or self._epoch is None:
            return
        missing = [
            f"PS {rank} ({status.error or 'it does not publish any more'})"
            for rank, status in enumerate(ended)
            if not status.complete or status.epoch != self._epoch.epoch
        ]
        if missing:
            raise PublishError(
                f"{', '.join(missing)} could not publish the last rows, so the network of step {network.step} is not "
                "published, either. Readers keep what they have. Publish a checkpoint, or call fit again, once this "
                "is repaired.",
                missing=missing,
            )
        retry(
            lambda: self.write_network(network),
            transient=lambda error: isinstance(error, CheckpointError | PublishError),
            deadline=Deadline(RETRY_SECONDS),
        )
        if not self._alone:
            self._remove_others()
