"""The components of a training run on one NN worker, and how they are connected."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from persia.batching.batch import Batch
from persia.dense import AllReduce, AllReduceOptions
from persia.dense.torch_threads import TorchThreads
from persia.metrics import MetricsResult
from persia.nn.collection import EmbeddingCollection
from persia.nn.dense_step import DenseStep, OptimizerFactory, StepOptions
from persia.nn.options import CollectionOptions, check_gpus
from persia.nn.owned_tables import check_outputs_of_run
from persia.nn.staging import Staging, staging_for
from persia.optim import APMSqueeze
from persia.services import Cluster, ProcessCluster
from persia.telemetry.tracking import Tracker
from persia.trainer.callbacks import Callback, Callbacks
from persia.trainer.checkpointing import Checkpointing
from persia.trainer.evaluation import Evaluator
from persia.trainer.finite_state import FiniteState
from persia.trainer.monitor import Monitor
from persia.trainer.options import Declared
from persia.trainer.phases import Phases
from persia.trainer.retrieval_evaluation import RetrievalEvaluator, RetrievalOptions
from persia.trainer.run_publishing import Publishing
from persia.trainer.state import TrainingState

__all__ = ["Components", "assemble"]


class Components(NamedTuple):
    """The components of a training run on one NN worker.

    Attributes:
        declared: the declarations of the run.
        staging: moves tensors to the device of the network and back.
        network: the dense network, its optimizer, and its replicas.
        embeddings: the embedding tables, and the connection to the other roles.
        state: what training changes, besides rows and the network's tensors.
        phases: runs the phases of the run, each in one mode.
        checkpointing: writes checkpoints.
        publishing: publishes rows and the network, if the options say so.
        monitor: collects the metrics of this NN worker.
        evaluator: scores data without training.
        finite: finds out whether the state of training gives finite logits.
        trackers: receive metrics.
        callbacks: the user's callbacks.
    """

    declared: Declared
    staging: Staging
    network: DenseStep
    embeddings: EmbeddingCollection
    state: TrainingState
    phases: Phases
    checkpointing: Checkpointing
    publishing: Publishing
    monitor: Monitor
    evaluator: Evaluator
    finite: FiniteState
    trackers: list[Tracker]
    callbacks: Callbacks

    @property
    def retrieval(self) -> RetrievalEvaluator:
        """Ranks the items of samples among all items."""
        return RetrievalEvaluator(self.evaluator, self.network, self.embeddings, self.staging.device)

    def evaluate_watched(self, data: Iterable[Batch], *, may_be_empty: bool = False) -> MetricsResult:
        """Returns metrics on held-out data, the watched one among them. All NN workers call it.

        Args:
            data: as for `Trainer.evaluate`, or for `Trainer.evaluate_retrieval` if a metric of retrieval is watched.
            may_be_empty: whether data without a sample are no error.
        """
        watched = self.declared.watched
        if watched.retrieval:
            options = RetrievalOptions(None, (watched.at,), self.declared.options.retrieval_leave_out)
            return MetricsResult.of_retrieval(self.retrieval.evaluate(data, None, options, may_be_empty=may_be_empty))
        groups = self.declared.schema.group if watched.grouped else None
        return self.evaluator.evaluate(data, groups, (watched.at,), may_be_empty=may_be_empty)


def assemble(
    model: torch.nn.Module,
    optimizer: OptimizerFactory,
    declared: Declared,
    cluster: Cluster | None,
    callbacks: Sequence[Callback] = (),
) -> Components:
    """Makes the components of a run, and connects this process to the cluster.

    Args:
        model: the user's network.
        optimizer: makes the dense optimizer.
        declared: the declarations of the run.
        cluster: where the roles run; None for this process.
        callbacks: the user's callbacks; those of NN worker 0 are called.

    Raises:
        ConfigError: the cluster or the device cannot run what is declared.
    """
    options = declared.options
    publishes, records = options.publish is not None, options.record_dir is not None
    check_outputs_of_run(declared.schema, publishes=publishes, records=records)
    trains_in_other_processes = isinstance(cluster, ProcessCluster)
    if isinstance(cluster, ProcessCluster):
        check_gpus(options.device, cluster.gpus)  # Before processes are started.
    # NN workers resolve the device where they run; this process may have others.
    staging = staging_for("cpu" if trains_in_other_processes else options.device)
    # The copy of the driver does not train.
    compiled = None if trains_in_other_processes else options.compile
    network = DenseStep(
        model,
        optimizer,
        staging.device,
        StepOptions(options.schedule, options.precision, options.accumulation_steps, options.clip_norm, compiled),
        declared.schema,
    )
    embeddings = EmbeddingCollection(
        declared.schema,
        optimizer=declared.embedding_optimizer,
        mode=declared.first_mode,
        cluster=cluster,
        grad_scaler=network.scaler,
        options=CollectionOptions(
            str(staging.device),
            options.seed,
            options.accumulation_steps,
            options.timeout,
            options.clip_embedding_norm,
            options.one_thread,
        ),
    )
    _connect_replicas(network, embeddings, staging.device, options.timeout)
    servers = embeddings.connection.servers
    state = TrainingState(network, embeddings, declared.schema.labels, options.seed)
    phases = Phases(state, network, embeddings, declared, trains_in_other_processes=trains_in_other_processes)
    evaluator = Evaluator(network, embeddings)
    finite = FiniteState(network, state, evaluator)
    checkpointing = Checkpointing(network, state, finite, servers, declared)
    phases.busy = lambda: checkpointing.busy
    if embeddings.connection.rounds is not None:
        embeddings.connection.rounds.busy = phases.busy
    events = Callbacks(callbacks if embeddings.connection.rank == 0 else ())
    checkpointing.on_written = events.written.append
    publishing = Publishing(declared, network, state, finite, servers)
    monitor = Monitor(state, network, embeddings, checkpointing, publishing)
    if embeddings.connection.observe is not None:
        embeddings.connection.observe(monitor.observe)
    return Components(
        declared=declared,
        staging=staging,
        network=network,
        embeddings=embeddings,
        state=state,
        phases=phases,
        checkpointing=checkpointing,
        publishing=publishing,
        monitor=monitor,
        evaluator=evaluator,
        finite=finite,
        trackers=options.make_trackers(),
        callbacks=events,
    )


def _connect_replicas(
    network: DenseStep, embeddings: EmbeddingCollection, device: torch.device, timeout: float
) -> None:
    """Connects the network to its replicas on the other NN workers."""
    connection = embeddings.connection
    network.tracer = embeddings.tracer
    if device.type == "cpu":
        network.threads = TorchThreads(connection.nn_workers if connection.replicas is not None else 1)
    if connection.replicas is not None:
        network.replicas = connection.replicas(network.trained, timeout)
    elif connection.nn_workers > 1:
        average = not isinstance(network.optimizer, APMSqueeze)  # APMSqueeze averages gradients itself.
        replicas = AllReduce(network.trained, connection.nn_workers, AllReduceOptions(timeout, average=average))
        replicas.tracer = embeddings.tracer
        network.replicas = replicas
