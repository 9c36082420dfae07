"""Optional settings of a cluster on Ray; importable without ray."""

from __future__ import annotations

from types import NoneType
from typing import Literal

import msgspec

from persia.checks import (
    MAX_COUNT,
    MAX_THREADS,
    check_choice,
    check_flag,
    check_integer,
    check_kind,
    check_number,
    check_seconds,
    plain_fields,
    plain_paths,
)
from persia.cluster.scaler import Scaler
from persia.errors import ConfigError
from persia.telemetry.process import check_port

__all__ = ["RayOptions"]


class RayOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Placement, resources and deadlines of the processes of a cluster.

    Args:
        address: address of a Ray cluster: "auto" for the cluster of this host. None uses the Ray to which this process
            is connected, or else starts Ray on this machine.
        cpus: number of CPUs that Ray reserves for each process; 0 places processes without counting CPUs.
        gpus: number of GPUs that Ray reserves for each NN worker, which trains on them: a run that would use the CPU
            instead is rejected. A fraction lets NN workers share a GPU: 0.5 for two.
        backend: backend of torch.distributed for tensors on GPUs. "auto" is nccl, or gloo if NN workers share GPUs,
            which nccl does not support; gloo copies through host memory. CPU tensors always use gloo.
        compression: compression of rows and gradients between embedding workers and NN workers. "fp16" halves them,
            lossy; "none" sends them as they are. "auto" is "none" if these roles are on one host, else "fp16"; it is
            decided when the cluster starts.
        pool_at: where features are pooled. With "nn_worker" an NN worker gets each distinct row of a batch once, with
            "embedding_worker" the pooled values. "auto" is "nn_worker" if these roles are on one host, else whichever
            sends fewer bytes, for each table and batch. Tables with un-pooled features always have "nn_worker", and so
            has training with `cache_rows` or `clip_embedding_norm`.
        threads: threads of each process: torch threads in an NN worker, store threads in a PS. None divides half of
            this machine's cores among the NN workers; on several hosts each gets half of its host's cores.
        dense_ps: number of processes that share the network's tensors in asynchronous modes; started with the first
            such mode.
        restarts: maximum number of restarts of each embedding PS, embedding worker, data loader and of the coordinator.
            For NN workers see `TrainerOptions.max_failures`.
        nn_worker_deaths: what follows if an NN worker dies. "restart": it is replaced; with all-reduce all NN workers
            restart from the last recovery point. "leave": the others continue without it from the last step. With
            all-reduce, row updates of the last steps may then be lost or applied twice, of as many as the mode lets be
            in flight.
        regions: directory on each host for the rows of embedding PSs and the state of the coordinator, so that they
            outlive their processes: in shared memory or on a disk with enough space; see `persia cluster regions`.
            Empty: in process memory. Then the death of the coordinator ends the run, and a PS that dies is reloaded
            from the last checkpoint.
        overcommit: whether to accept tables whose declared capacity exceeds the memory of the PSs' hosts, with a
            warning: for trials that will not fill them.
        run: directory of the run, which the host of the driver and that of its successor see at this path: the same
            command goes on there if the driver has died, with the rows that PSs have left on their hosts. Needs
            `regions`. None: the death of the driver ends the run. See docs/guide/cluster.md.
        scaler: rules by which the numbers of embedding PSs, embedding workers and data loaders change while a `Trainer`
            trains; None leaves the numbers alone.
        prometheus_port: port at which each process exports its metrics; processes of one host take the next free
            ports, and `persia health` lists them. None for no export.
        timeout: maximum seconds of any wait: for roles to start, rows, gradients of other NN workers.
        log_level: level of the log lines of all roles, which appear in this process: "debug", "info", "warning",
            "error".
    """

    address: str | None = None
    cpus: float = 0.0
    gpus: float = 0.0
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    compression: Literal["auto", "none", "fp16"] = "auto"
    pool_at: Literal["auto", "nn_worker", "embedding_worker"] = "auto"
    threads: int | None = None
    dense_ps: int = 1
    restarts: int = 3
    nn_worker_deaths: Literal["restart", "leave"] = "restart"
    regions: str = "/dev/shm"
    overcommit: bool = False
    run: str | None = None
    scaler: Scaler | None = None
    prometheus_port: int | None = None
    timeout: float = 600.0
    log_level: str = "warning"

    def __post_init__(self) -> None:
        plain_fields(self)
        check_choice("compression", self.compression, ("auto", "none", "fp16"))
        check_choice("pool_at", self.pool_at, ("auto", "nn_worker", "embedding_worker"))
        check_choice("nn_worker_deaths", self.nn_worker_deaths, ("restart", "leave"))
        check_choice("log_level", self.log_level, ("debug", "info", "warning", "error"))
        check_flag("overcommit", self.overcommit)
        check_kind("address", self.address, (str, NoneType), "the address of a Ray cluster, or None")
        check_number("cpus", self.cpus, 0, MAX_COUNT)
        check_number("gpus", self.gpus, 0, MAX_COUNT)
        check_integer("restarts", self.restarts, 0)
        check_choice("backend", self.backend, ("auto", "gloo", "nccl"))
        if self.backend == "nccl" and self.gpus < 1:
            raise ConfigError(
                f"backend = 'nccl' needs a GPU for each NN worker, but gpus = {self.gpus:g}; set gpus=1, or use gloo.",
                field="backend",
            )
        if self.threads is not None:
            check_integer("threads", self.threads, 1, MAX_THREADS)
        plain_paths(self, "regions", "run")
        check_kind("regions", self.regions, str, "an absolute path, or an empty string")
        if self.regions and not self.regions.startswith("/"):
            raise ConfigError(
                f"Invalid regions = {self.regions!r}; expected an absolute path, or an empty string.", field="regions"
            )
        check_kind("run", self.run, (str, NoneType), "the path of a directory, or None")
        if self.run is not None and (not self.run or not self.regions):
            needs = "regions, in which rows outlive the driver" if self.run else "the path of a directory, or None"
            raise ConfigError(f"Invalid run = {self.run!r}: it needs {needs}.", field="run")
        check_kind("scaler", self.scaler, (Scaler, NoneType), "a Scaler, or None")
        check_integer("dense_ps", self.dense_ps, 1)
        check_port(self.prometheus_port, "prometheus_port")
        check_seconds("timeout", self.timeout)

    def row_compression(self, one_host: bool) -> Literal["none", "fp16"]:
        """Returns the compression of rows and gradients between embedding workers and NN workers.

        Args:
            one_host: whether all of them are on one host, where bytes cost less than their conversion.
        """
        if self.compression == "auto":
            return "none" if one_host else "fp16"
        return self.compression

    def feature_pooling(self, one_host: bool) -> Literal["nn_worker", "embedding_worker", "auto"]:
        """Returns where features are pooled, for `persia.worker.WorkerOptions`.

        Args:
            one_host: as for `row_compression`.
        """
        return "nn_worker" if self.pool_at == "auto" and one_host else self.pool_at

    @property
    def process_group_backend(self) -> str:
        """The argument of `torch.distributed.init_process_group`."""
        backend = self.backend
        if backend == "auto":
            backend = "nccl" if self.gpus >= 1 else "gloo"
        return "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo"
