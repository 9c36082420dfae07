"""`TrainingState`: everything that training changes, besides rows and the network's tensors."""

from __future__ import annotations

import contextlib
import logging
import random
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import torch

from persia.checkpoint.packing import pack, unpack
from persia.checkpoint.tensors import decode, encode
from persia.metrics import merged_metrics
from persia.modes import Mode
from persia.modes import decode as decode_mode
from persia.modes import encode as encode_mode
from persia.nn.collection import EmbeddingCollection
from persia.nn.dense_step import DenseStep
from persia.nn.push_log import PushCounts
from persia.schema import NO_RULES, InputRules, Label
from persia.services import StreamPosition, fingerprint_of
from persia.telemetry.logs import get_logger
from persia.trainer.data_progress import (
    OBJECT,
    Begun,
    DataProgress,
    begin_source,
    begin_stream,
    fingerprint_of_object,
)
from persia.trainer.evaluations import Evaluations
from persia.trainer.scores import TrainingScores
from persia.types import Offsets, SourceFingerprint, SourcePart

__all__ = [
    "RandomState",
    "RecordCover",
    "RunTotals",
    "TrainingState",
    "random_states",
    "same_random_state",
    "set_random_state",
]

LOG = get_logger("persia.data")

RecordCover: TypeAlias = Literal["training", "checkpoint", "recovery point"]
"""The oldest state that a run goes back to."""

RandomState: TypeAlias = dict[str, Any]
"""States of the generators of torch (and of each GPU), numpy and Python in one process."""


def random_states(gather: Callable[[bytes], list[bytes]]) -> list[RandomState]:
    """Returns the random states of all NN workers, by rank. Blocks until all have called it.

    Args:
        gather: of `persia.nn.replicas.Replicas`.
    """
    payloads = gather(b"".join(encode(pack(_random_state(), "random"))))
    return [unpack(decode(memoryview(bytearray(payload)), "random"), "random") for payload in payloads]


def _random_state() -> RandomState:
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


@contextlib.contextmanager
def same_random_state() -> Iterator[None]:
    """Restores the generators of this process after the block."""
    state = _random_state()
    try:
        yield
    finally:
        set_random_state(state)


def set_random_state(state: RandomState) -> None:
    """Restores the generators of this process."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])


class RunTotals(msgspec.Struct, frozen=True):
    """Counters of all NN workers together. They continue from call to call, and over a resume.

    Attributes:
        staleness_sum: sum of the staleness of all lookups, in own steps.
        lookups: number of lookups.
        staleness_max: largest staleness.
        pushed: outcome of gradients and batches.
    """

    staleness_sum: int = 0
    lookups: int = 0
    staleness_max: int = 0
    pushed: PushCounts = PushCounts()

    def __add__(self, other: RunTotals) -> RunTotals:
        return RunTotals(
            self.staleness_sum + other.staleness_sum,
            self.lookups + other.lookups,
            max(self.staleness_max, other.staleness_max),
            PushCounts(*map(sum, zip(self.pushed, other.pushed, strict=True))),
        )


class _Given:
    """A source without a fingerprint, by the object. It is kept alive only if it cannot be referenced weakly.

    Args:
        data: the source.
    """

    def __init__(self, data: object) -> None:
        self.fingerprint = fingerprint_of_object(data)
        self._length = _length(data)
        self._object: Callable[[], object]
        try:
            self._object = weakref.ref(data)
        except TypeError:
            self._object = lambda: data

    def same(self, data: object) -> bool:
        """Returns whether an object is this source, with as many batches as before."""
        return self._object() is data and self._length == _length(data)


def _length(data: object) -> int | None:
    return len(data) if isinstance(data, Sequence) else None


class TrainingState:
    """Step, epoch, position, mode, optimizer, random states, metrics and counts of a run, on one NN worker.

    One trainer owns it. The training thread changes it; numbers may be read by any thread.

    Args:
        network: the dense network with its optimizer, schedule and loss scale; its replicas gather.
        embeddings: the collection, which has the global step, the depth of the gate, and its own counts.
        labels: the labels, for the metrics.
        seed: of the run.
    """

    def __init__(
        self, network: DenseStep, embeddings: EmbeddingCollection, labels: Sequence[str | Label], seed: int
    ) -> None:
        self._network = network
        self._embeddings = embeddings
        self._seed = seed
        self.schedule_entry: tuple[int, Mode] | None = None
        """Last entry of `mode_schedule` that was followed. A mode requested after it holds until the next entry."""
        self.data = DataProgress()
        """Passes over the source, and over those before it."""
        self._given: _Given | None = None
        """The object that the last call of `fit` read, if it has no fingerprint."""
        self.position = 0
        """Batches of the current epoch that are trained, by all NN workers together."""
        self.local_batch = 0
        """Rows of a batch that is not partial; 0 if unknown. It decides how many gradients make a step of `Gba`."""
        self.input_rules = NO_RULES
        """Rules of the reader for missing values and lists, which go into checkpoints and the log of changes."""
        self.scores = TrainingScores(labels)
        """Metrics of the logits of training, of this NN worker."""
        self.evaluations = Evaluations()
        """Evaluations on held-out data so far."""
        self.earlier = RunTotals()
        """Counts of all NN workers from before this process counted: up to a resume, or in earlier calls of `fit`."""
        self.other_random: list[RandomState] = []
        """Random generators of NN workers 1, 2, ... of a cluster, until they start again."""
        self.stream: StreamPosition | None = None
        """The stream that `fit` reads, or has read last; None for other data."""
        self._offsets: Offsets = {}
        """Positions of streams at the beginning of `stream`, at its end, and of those read before."""
        self._in_stream = False
        """Whether a pass over `stream` has begun and not ended."""
        self.record_covered_by: RecordCover = "training"
        """The state that makes recorded batches of `stream` dispensable, as no restart goes back to before it."""
        self.failed_after: tuple[int, int] | None = None
        """Global step and position after the last update of a phase with all-reduce that has failed; None otherwise."""
        self.finished = False
        """Whether the last call of `fit` came to the end of its epochs. Not in checkpoints."""
        self.loaded = False
        """Whether a checkpoint was loaded since the last call of `fit`. Not in checkpoints."""
        self.rank = embeddings.connection.rank
        """Rank of this NN worker."""

    @property
    def global_step(self) -> int:
        """Updates so far."""
        return self._embeddings.global_step

    @global_step.setter
    def global_step(self, step: int) -> None:
        self._embeddings.global_step = step

    @property
    def epoch(self) -> int:
        """Number of the pass over the source that is under way; between passes, the number of complete ones."""
        return self.data.epoch

    @property
    def pass_number(self) -> int:
        """Number of the pass under way; it counts those over all sources."""
        assert self.data.current is not None  # `FitCall` begins one before it reads.
        return self.data.current.number

    @property
    def interrupted(self) -> bool:
        """Whether a pass ended only because its stream was asked to stop."""
        return self.stream is not None and self.stream.interrupted

    @property
    def offsets(self) -> Offsets:
        """Offsets of all streams so far, at the current position."""
        if self.stream is None or not self._in_stream:
            return self._offsets
        return self._offsets | self.stream.offsets(self.position)

    def begin_source(
        self, data: object, *, stream: bool, again: bool = False, restart: bool = False, patience: int | None = None
    ) -> None:
        """Decides where a call of `fit` begins in its source. Blocks until all NN workers have called it.

        Args:
            data: see `Trainer.fit`; None where data loaders read what the driver of a cluster has decided on.
            stream: whether the data are a stream.
            again: see `Trainer.fit`.
            restart: see `restart_data` of `Trainer.fit`.
            patience: see `TrainerOptions`; once it is used up, the count begins again on other data.

        Raises:
            ConfigError: a pass is under way, and the source has changed so that its position has no meaning.
            DataError: the source's own fingerprint is not valid.
        """

        def begin() -> Begun:
            given = self._fingerprint(data, stream)
            if stream:
                return begin_stream(self.data, self.position, given)
            begun = begin_source(self.data, self.position, given, again=again, restart=restart)
            if begun.notice is not None:
                LOG.log(logging.WARNING if begun.surprising or self.loaded else logging.INFO, "%s", begun.notice)
            return begun

        begun = self._network.replicas.run_on_rank0(begin, Begun)
        other = again or self.data.source != begun.progress.source
        if other and patience is not None and self.evaluations.unimproved >= patience:
            self.evaluations = self.evaluations.waiting_again()
        self.data, self.position = begun.progress, begun.position
        if again or restart:
            self.scores.again = begun.repeated
        self.finished = False

    def adopt_source(self, data: object, *, stream: bool) -> None:
        """Lets data without a fingerprint count as those that a driver before read, whose call of `fit` goes on.

        Args:
            data: see `Trainer.fit`.
            stream: whether the data are a stream.
        """
        known = self.data.source
        if known is not None and known.kind == OBJECT and not stream and fingerprint_of(data) is None:
            self._given = _Given(data)
            self._given.fingerprint = known

    def _fingerprint(self, data: object, stream: bool) -> SourceFingerprint:
        """Returns the fingerprint of the data; of an object without one, a name that it keeps in this process."""
        if data is None:
            return self.data.source or SourceFingerprint("loaders", (SourcePart("data loaders"),))
        fingerprint = fingerprint_of(data)
        if fingerprint is None and stream:
            return SourceFingerprint("stream", (SourcePart(type(data).__name__),))
        if fingerprint is None:
            if self._given is None or not self._given.same(data):
                self._given = _Given(data)
            return self._given.fingerprint
        self._given = None
        return fingerprint

    def begin_data(self, stream: StreamPosition | None, stopping: Callable[[], bool]) -> None:
        """Begins to read, after `begin_source`. A stream goes on at its offsets.

        Args:
            stream: the stream that is read, perhaps by data loaders; None for other data.
            stopping: polled by a stream that waits for data; whether the call is to end.
        """
        self._offsets = self.offsets
        self.stream = stream
        self._in_stream = self.stream is not None
        if self.stream is not None:
            self.stream.begin(self.position, self._offsets, stopping)

    @property
    def goes_on(self) -> bool:
        """Whether the data are a stream of which something was read before this call began."""
        return self.stream is not None and bool(self._offsets)

    def end_pass(self) -> None:
        """Ends a pass over the data. The next one goes on at the offsets of a stream."""
        self._offsets, self._in_stream = self.offsets, False
        self.data, self.position = self.data.end_pass(), 0

    def covered(self, by: RecordCover, position: int) -> None:
        """Lets the stream forget batches before a position, if that is what makes them dispensable."""
        if self.stream is not None and by == self.record_covered_by:
            self.stream.forget(position)

    @property
    def mode(self) -> Mode:
        """The current mode; the collection owns it."""
        return self._embeddings.mode

    def change_mode(self, mode: Mode) -> None:
        """Trains in another mode from now on. Call it between two phases."""
        if mode != self.mode:
            self._embeddings.change_mode(mode)

    def totals(self) -> RunTotals:
        """Counts so far, of all NN workers. Blocks until all have called it."""
        staleness = self._embeddings.staleness
        own_totals = RunTotals(
            round(staleness.mean * staleness.lookups), staleness.lookups, staleness.max, self._embeddings.pushed
        )
        payloads = self._network.replicas.gather(msgspec.json.encode(own_totals))
        return sum((msgspec.json.decode(payload, type=RunTotals) for payload in payloads), self.earlier)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of all NN workers for a checkpoint, the same on each. Blocks until all have called it.

        Its keys are part of the format of checkpoints.
        """
        network, entry = self._network, self.schedule_entry
        gather = network.replicas.gather
        return {
            "seed": self._seed,
            "optimizer_class": type(network.optimizer).__qualname__,
            "optimizer": network.optimizer_state(),
            "hyperparameters": network.hyperparameters,
            "scheduler": network.scheduler.state_dict() if network.scheduler else None,
            "scaler": network.scaler.state_dict() if network.scaler else None,
            "global_step": self.global_step,
            "mode": encode_mode(self.mode),
            "entry": [entry[0], encode_mode(entry[1])] if entry is not None else None,
            "depth": self._embeddings.gate.depth,
            "local_batch": self.local_batch,
            "input_rules": msgspec.to_builtins(self.input_rules),
            "position": self.position,
            "data": msgspec.to_builtins(self.data),
            "offsets": self.offsets,
            "evaluations": msgspec.to_builtins(self.evaluations),
            "random": [*random_states(gather), *self.other_random],
            "metrics": merged_metrics(self.scores.history(), gather).state_dict(),
            "counts": msgspec.to_builtins(self.totals()),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, trains_in_other_processes: bool) -> None:
        """Restores what `state_dict` returned: this NN worker's own state, and on rank 0 what exists once.

        Args:
            state: a result of `state_dict`.
            trains_in_other_processes: whether this process only drives NN workers; then the random states of NN workers
                1, 2, ... are kept for them.
        """
        network, rank = self._network, self.rank
        network.optimizer.load_state_dict(state["optimizer"])
        if network.scheduler is not None and state["scheduler"] is not None:
            network.scheduler.load_state_dict(state["scheduler"])
        if network.scaler is not None and state["scaler"] is not None:
            network.scaler.load_state_dict(state["scaler"])
        self.global_step = state["global_step"]
        self.change_mode(decode_mode(state["mode"]))
        if (entry := state["entry"]) is not None:
            self.schedule_entry = entry[0], decode_mode(entry[1])
        if isinstance(state["depth"], int):
            self._embeddings.gate.restore(state["depth"])
        self.local_batch = state["local_batch"]
        self.input_rules = msgspec.convert(state["input_rules"], InputRules)
        self.position = state["position"]
        self.data = msgspec.convert(state["data"], DataProgress)
        self._offsets = state["offsets"]
        self.evaluations = msgspec.convert(state.get("evaluations", {}), Evaluations)  # Older ones have none.
        self.earlier = msgspec.convert(state["counts"], RunTotals)
        if rank == 0:
            self.scores.load_history(state["metrics"])
        generators = state["random"]
        if rank < len(generators):
            set_random_state(generators[rank])
        else:  # Its own seed: else its dropout would equal the dropout of another NN worker.
            torch.manual_seed(state["seed"] + rank)
        if trains_in_other_processes:
            self.other_random = generators[1:]
