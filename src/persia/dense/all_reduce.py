"""Averages the gradients of the network over the rows of all NN workers (docs/reference/protocol.md, section 6).

PyTorch's DistributedDataParallel (arXiv 2006.15704) collects gradients in buckets, and sums each bucket over the ranks
during the backward pass. A communication hook weights the gradients, as a mean over rows is not a mean over workers.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from persia.checks import check_flag, check_number, check_seconds, plain
from persia.dense.group import Group
from persia.errors import ConfigError, PersiaError
from persia.telemetry.tracing import Tracer
from persia.types.decoding import decode_hook

__all__ = ["AllReduce", "AllReduceOptions", "unlearned"]

T = TypeVar("T")

_ARGUMENTS = inspect.signature(DistributedDataParallel.__init__).parameters
# `settle` copies buffers when they are read. Newer versions of torch deprecate the old name.
_NO_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _ARGUMENTS else "broadcast_buffers": False
}

SAVE_SECONDS = 86_400.0
"""Maximum wait for a function that runs only on the first NN worker: it may write a large checkpoint."""


class AllReduceOptions(NamedTuple):
    """Options of `AllReduce`.

    Attributes:
        timeout: maximum wait for the other NN workers in seconds.
        bucket_megabytes: size of the buckets in which gradients are sent.
        average: False if the optimizer averages over NN workers itself, as APMSqueeze does. Gradients are then only
            weighted, so that its average is a mean over rows.
    """

    timeout: float = 600.0
    bucket_megabytes: float = 25.0
    average: bool = True


class _Outcome(msgspec.Struct):
    """Result of a function on NN worker 0, or the text of its error."""

    result: msgspec.Raw = msgspec.Raw(b"\xc0")  # None.
    failure: str | None = None


class AllReduce:
    """The network of this NN worker, with gradients averaged over all NN workers. Not thread-safe.

    Use it in place of DistributedDataParallel if NN workers may have different numbers of batches: all make as many
    steps as the one with the most batches, and NN workers without a batch have weight 0. All must run the same loop:

        replicas = AllReduce(net)
        for batch in embeddings.prefetch(reader, equal_steps=replicas):
            with replicas.batch(batch.dummy):
                logits = replicas.model(torch.cat(list(embeddings(batch).values()), dim=1))
                loss_of(logits, batch.labels).backward()
            optimizer.step()
            optimizer.zero_grad()

    The loss is the mean over the rows of the batch; gradients become those of the mean over the rows of all NN workers.

    Args:
        model: the network, on its device. Its parameters and buffers are set to those of the first NN worker.
        nn_workers: expected number of NN workers; None for all processes of torch.distributed.
        options: timeout, size of buckets, and averaging.

    Attributes:
        tracer: records the sum of each bucket.

    Raises:
        ConfigError: an option is out of range, or torch.distributed has another number of processes.
        DeadlineError: an NN worker was late.
        PersiaError: torch.distributed is not initialized.
    """

    def __init__(
        self, model: torch.nn.Module, nn_workers: int | None = None, options: AllReduceOptions | None = None
    ) -> None:
        options = options or AllReduceOptions()
        self.tracer = Tracer()
        check_seconds("timeout", plain(options.timeout))
        check_number("bucket_megabytes", plain(options.bucket_megabytes), 0, open_low=True)
        check_flag("average", options.average)
        self._control = Group(options.timeout)
        nn_workers = self._control.size if nn_workers is None else nn_workers
        if self._control.size != nn_workers:
            raise ConfigError(
                f"There are {nn_workers} NN workers, but torch.distributed has {self._control.size} processes. "
                "Initialize it with one process per NN worker.",
                field="nn_workers",
            )
        self._control.gather(b"")  # Unlike `new_group`, this names late NN workers.
        self.nn_workers = nn_workers
        self._group = dist.new_group(timeout=timedelta(seconds=options.timeout))
        self._network = model
        self._ddp: DistributedDataParallel | None = None
        if options.average:
            self._ddp = DistributedDataParallel(
                model,
                process_group=self._group,
                bucket_cap_mb=options.bucket_megabytes,
                gradient_as_bucket_view=True,
                **_NO_BUFFERS,
            )
            self._ddp.register_comm_hook(None, lambda _, bucket: self._average(bucket))
        else:
            for parameter in model.parameters():
                dist.broadcast(parameter.detach(), src=0, group=self._group)
        self.model: torch.nn.Module = self._ddp or model
        synchronized = any(isinstance(m, torch.nn.SyncBatchNorm) for m in model.modules())
        self.dummy_rows = 0 if synchronized else 1
        self.settle()  # Under its old name the argument also keeps DDP from doing this.
        # State of the current update.
        self._own = 0
        self._sums: list[Callable[[], list[int]]] = []
        self._total = 0
        self._having = 0
        self._stop = False
        self._stop_requests = 0
        self._averaged = False
        self._failure: Exception | None = None

    # --- equal steps ------------------------------------------------------------------------------------------

    def start(self, rows: int, has_data: bool) -> None:
        """Starts a batch: sends its number of rows to the others during the forward pass."""
        if self._averaged:
            self._own, self._total, self._stop_requests, self._averaged = 0, 0, 0, False
        self._own += rows
        self._sums.append(self._control.start_sum([rows, int(has_data), int(self._stop)]))

    def over(self) -> bool:
        """Returns whether all NN workers are out of data. Blocks until all have started the batch."""
        self.rows()
        return self._having == 0

    def rows(self) -> int:
        """Returns the number of rows of all NN workers in this update. Blocks until all have started the batch."""
        while self._sums:
            rows, self._having, stop_requests = self._sums.pop(0)()
            self._total += rows
            self._stop_requests += stop_requests
        return self._total

    def request_stop(self) -> None:
        """Requests that all NN workers stop after the same update. Sent with the next batch. Thread-safe."""
        self._stop = True

    def clear_stop_request(self) -> None:
        """Withdraws the request of this NN worker."""
        self._stop = False

    def stop_requested(self) -> bool:
        """Returns, equally on all NN workers, whether one requested a stop after this update. Blocks like `rows`."""
        self.rows()
        return self._stop_requests > 0

    # --- gradients --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def batch(self, dummy: bool = False, last: bool = True) -> Iterator[None]:
        """Wraps the forward and backward pass of a batch.

        Args:
            dummy: whether the batch replaces missing data; neither the network nor BatchNorm learns from it.
            last: whether it is the last batch of the update, after which gradients are averaged. Gradients of earlier
                batches are accumulated locally.

        Raises:
            DeadlineError: on exit, if the gradients of an NN worker were late.
        """
        self._failure = None
        with contextlib.ExitStack() as stack:
            if dummy:
                stack.enter_context(unlearned(self._network))
            if not last and self._ddp is not None:
                stack.enter_context(self._ddp.no_sync())
            try:
                yield
                if last and self._ddp is None:
                    self._weight_all(self._network.parameters())
            except Exception as error:
                # The backward pass replaces the hook's error with another one.
                failure: Exception | None = self._failure
                if failure is None:
                    raise
                if not isinstance(failure, PersiaError):
                    failure = self._control.failed("average of gradients", failure)
                raise failure from error

    def reduce_rest(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Averages the gradients of an update that lacks its last batch, as at the end of the data."""
        if self._ddp is None:
            self._weight_all(parameters)
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._weight(parameter.grad)
            dist.all_reduce(parameter.grad, group=self._group)

    def discard(self) -> None:
        """Discards the rows of the current update, whose gradients are dropped. The next batch starts a new update.

        Does not block, as the others may not have started the batch. All NN workers must call it, or stop training.
        """
        self._sums.clear()
        self._averaged = True

    def _average(self, bucket: torch._C._distributed_c10d.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Starts to sum the ranks' parts of a bucket. The DDP hook: runs in the thread of the backward pass."""
        start, track = time.monotonic(), f"bucket {bucket.index()}"
        try:
            self._weight(bucket.buffer())
            work = dist.all_reduce(bucket.buffer(), group=self._group, async_op=True)
        except Exception as error:
            self._failure = error
            raise
        assert work is not None
        future: torch.futures.Future[list[torch.Tensor]] = work.get_future()

        def averaged(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            if self.tracer.active:
                self.tracer.add("all-reduce", start, track=track)
            try:
                return future.value()[0]
            except Exception as error:
                self._failure = error
                raise

        return future.then(averaged)

    def _weight_all(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Weights gradients so that the optimizer's mean over NN workers is a mean over rows."""
        for parameter in parameters:
            if parameter.grad is not None:
                self._weight(parameter.grad, self.nn_workers)
        self.rows()
        self._averaged = True

    def _weight(self, gradient: torch.Tensor, times: int = 1) -> None:
        """Multiplies a gradient by this NN worker's share of the rows. Without rows it becomes 0, even if it is NaN."""
        total = self.rows()
        self._averaged = True
        if self._own == 0:
            gradient.zero_()
        elif self._own * times != total:
            gradient.mul_(self._own * times / total)

    # --- quiescent --------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Copies the buffers of the first NN worker, such as statistics of BatchNorm, to all."""
        for buffer in self._network.buffers():
            dist.broadcast(buffer, src=0, group=self._group)

    def gather(self, payload: bytes) -> list[bytes]:
        """Returns the payloads of all NN workers, by rank. Blocks until all have called it."""
        return self._control.gather(payload)

    def run_on_rank0(self, function: Callable[[], T], kind: object) -> T:
        """Calls a function only on NN worker 0; all return its result, or raise if it failed. Blocks."""
        payload, failure = b"", None
        if self._control.rank == 0:
            try:
                payload = msgspec.msgpack.encode(_Outcome(result=msgspec.Raw(msgspec.msgpack.encode(function()))))
            except Exception as error:
                payload, failure = msgspec.msgpack.encode(_Outcome(failure=str(error))), error
        payload = self._control.gather(payload, SAVE_SECONDS)[0]
        if failure is not None:
            raise failure
        outcome = msgspec.msgpack.decode(payload, type=_Outcome)
        if outcome.failure is not None:
            raise PersiaError(f"NN worker 0 failed, so this one cannot continue: {outcome.failure}")
        return cast("T", msgspec.msgpack.decode(outcome.result, type=kind, dec_hook=decode_hook))


@contextlib.contextmanager
def unlearned(network: torch.nn.Module) -> Iterator[None]:
    """Prevents a batch from having an effect: gradients become zeros, even NaN, and statistics do not change."""
    norms = [
        module
        for module in network.modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, torch.nn.SyncBatchNorm) and module.training
    ]
    hooks = [p.register_hook(torch.zeros_like) for p in network.parameters() if p.requires_grad]
    for module in norms:
        module.eval()
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in norms:
            module.train()
