"""The training loop: each batch from the data source to its update, top to bottom.

There are two kinds of loop; `Mode.dense()` decides which one a mode has:

- `TrainingLoop.synchronous` (Sync, Hybrid): each NN worker holds a replica of the network. NN workers take batches in
  turn and average their gradients, so all make the same updates.
- `TrainingLoop.token_driven` (Async, Bsp, HopBs, HopBw, Gba): dense PSs hold the network. An NN worker that is ready
  draws a batch and a token, computes gradients with the parameters of that moment, and pushes them.

Both train one phase: batches in one mode, between two points at which all NN workers have quiesced. `FitCall` runs one
phase after the other, with checkpoints in between; `phases.py` decides on the mode of each.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple

import torch

from persia.batching.batch import Batch
from persia.modes import Gba, Mode
from persia.nn.collection import EmbeddingCollection
from persia.nn.dense_step import DenseStep
from persia.nn.prepared import PreparedBatch
from persia.nn.token_client import TokenClient
from persia.services import Connection
from persia.telemetry.logs import get_logger
from persia.telemetry.trace_events import STEP
from persia.trainer.progress import FitProgress
from persia.trainer.run_publishing import Publishing
from persia.trainer.sources import BatchSource
from persia.trainer.state import TrainingState
from persia.types import RegisteredBatch

__all__ = ["PhaseEnd", "TrainingLoop", "advise"]

LOG = get_logger("persia.modes")


class PhaseEnd(NamedTuple):
    """How a synchronous phase ended.

    Attributes:
        pass_ended: whether the data of the pass are used up.
        stopped_at: time at which NN workers agreed to stop before the planned end; None if they did not.
    """

    pass_ended: bool
    stopped_at: float | None


class TrainingLoop:
    """Trains the batches of one phase on one NN worker.

    Args:
        state: what training changes, besides rows and the network's tensors.
        network: the dense network, its optimizer, and its replicas.
        embeddings: looks up rows ahead; the backward pass makes it push their gradients.
        progress: scores batches and shows progress.
        should_stop: whether training is to end after the step.
        publishing: publishes the network, and counts what is read; None for neither.
    """

    def __init__(
        self,
        state: TrainingState,
        network: DenseStep,
        embeddings: EmbeddingCollection,
        progress: FitProgress,
        should_stop: Callable[[], bool],
        publishing: Publishing | None,
    ) -> None:
        self._state = state
        self._network = network
        self._embeddings = embeddings
        self._progress = progress
        self._should_stop = should_stop
        self._publishing = publishing

    def synchronous(self, source: BatchSource, batches: int | None, switch_requested: Callable[[], bool]) -> PhaseEnd:
        """Trains this NN worker's share of the pass, `batches` batches at most. All NN workers make the same steps.

        Args:
            source: has the batches.
            batches: on each NN worker; None for any number.
            switch_requested: whether this NN worker knows that training has to quiesce, for another mode or map.
        """
        state, network, replicas = self._state, self._network, self._network.replicas
        drawn, stopped_at, complete = 0, None, False
        updated_at, state.failed_after = (state.global_step, state.position), None
        read = self._counted(source)
        own_batches = _in_turn(read, state.position, batches, self._embeddings.connection)
        # As far ahead as the mode's gate allows, in background threads: read a batch, look up its rows at the embedding
        # workers. With nothing to hide, the loop does so itself as it draws a batch; see `nn/inline_pass.py`.
        prepared = self._embeddings.prefetch(own_batches, replicas, start=state.position, endless=source.endless)
        try:
            with _closing_with_error(prepared):
                for batch in prepared:
                    step = state.global_step + 1
                    with self._embeddings.tracer.span(STEP, step, batch.batch_id or 0):
                        # The backward pass pushes the gradients of rows, and averages the network's.
                        logits, loss = self._forward_backward(batch, all_reduce=True)
                        updated = network.apply()  # At the last batch of a step: clipping, optimizer.
                    if updated:  # Whatever fails after it: the network has the update.
                        updated_at = step, state.position + replicas.nn_workers
                    drawn += 1
                    state.position += replicas.nn_workers
                    source.forget(state.position)
                    self._trained(step, batch, logits, loss)
                    # One request to stop suffices: it is sent with the next batch, and all stop after that step.
                    if self._should_stop() or switch_requested():
                        replicas.request_stop()
                    if updated and replicas.stop_requested():
                        stopped_at = time.monotonic()
                        break
            self._embeddings.flush()  # After a `break`: raises what a push has failed with meanwhile.
            complete = True
        except Exception:
            state.failed_after = updated_at
            raise
        finally:
            # After an error the PSs apply the gradients that were computed, and so does a single NN worker. Several
            # cannot: the others do not know of the error, and would not take part in the average.
            if complete or replicas.nn_workers == 1:
                network.finish()
            else:
                network.discard()
            self._end()
        return PhaseEnd(stopped_at is None and (batches is None or drawn < batches), stopped_at)

    def token_driven(self, source: BatchSource, client: TokenClient, moves_wait: Callable[[], bool]) -> None:
        """Trains the batches that the token scheduler hands out, until the phase ends.

        Args:
            source: has the batches.
            client: draws batches and tokens, and pulls parameters of the network; ends the phase if asked to.
            moves_wait: whether this NN worker knows that training has to quiesce for another bucket map.
        """
        state = self._state
        # In background threads: take a batch, look up its rows. Token and parameters come when the network is free.
        read = self._counted(source)
        prepared = self._embeddings.prefetch(client.batches(read), tokens=client, endless=source.endless)
        try:
            with contextlib.closing(prepared):
                for batch in prepared:
                    step = state.global_step + 1
                    with self._embeddings.tracer.span(STEP, step, batch.batch_id or 0):
                        # The backward pass hands all gradients to the push thread: rows go first, then the network.
                        logits, loss = self._forward_backward(batch, all_reduce=False)
                    self._trained(step, batch, logits, loss)
                    if self._should_stop() or moves_wait():
                        client.stop()
        finally:
            self._end()

    def _end(self) -> None:
        if self._network.threads is not None:
            self._network.threads.suit(ahead=False)
        self._progress.score_rest()

    def _counted(self, source: BatchSource) -> Callable[[int], Batch | RegisteredBatch | None]:
        return source.read if self._publishing is None else self._publishing.counted(source.read)

    def _forward_backward(self, batch: PreparedBatch, *, all_reduce: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Pools the rows of a batch, and computes logits, loss and gradients."""
        if self._network.threads is not None:
            self._network.threads.suit(ahead=self._embeddings.ahead)
        return self._network.forward_backward(batch, self._embeddings(batch), all_reduce=all_reduce)

    def _trained(self, step: int, batch: PreparedBatch, logits: torch.Tensor, loss: torch.Tensor) -> None:
        """Updates the local batch, the counts and the progress after a batch of global step `step`."""
        state, connection = self._state, self._embeddings.connection
        first = not state.local_batch
        state.local_batch = max(state.local_batch, batch.samples)
        if first and connection.rank == 0:
            advise(state.mode, connection.nn_workers, state.local_batch)
        self._progress.trained(step, batch, logits, loss)
        if self._publishing is not None:
            self._publishing.offer()


@contextlib.contextmanager
def _closing_with_error(prepared: Generator[PreparedBatch, None, None]) -> Iterator[None]:
    """Ends a training pass with the loop over it; with the loop's error, which shortens the wait for its pushes."""
    with contextlib.closing(prepared):
        try:
            yield
        except BaseException as error:
            prepared.throw(error)
            raise


def _in_turn(
    read: Callable[[int], Batch | RegisteredBatch | None], position: int, batches: int | None, connection: Connection
) -> Iterator[Batch | RegisteredBatch]:
    """Reads every `nn_workers`-th batch, from `position` plus the rank on."""
    number, left = position + connection.rank, batches
    while left is None or left > 0:
        batch = read(number)
        if batch is None:
            return
        yield batch
        number += connection.nn_workers
        left = None if left is None else left - 1


def advise(mode: Mode, nn_workers: int, local_batch: int) -> None:
    """Logs advice for `Gba` if its global batch and the local batches do not go well together."""
    if isinstance(mode, Gba) and local_batch:
        advice = mode.advice(nn_workers, local_batch)
        if advice is not None:
            LOG.warning("%s", advice)
