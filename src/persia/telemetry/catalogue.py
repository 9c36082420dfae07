"""All figures that persia exports, and what each is. docs/reference/observed.md shows this table."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["CATALOGUE", "Kind"]


class Kind(NamedTuple):
    """What a figure is.

    Attributes:
        type: "counter" since the process began, "gauge" for what is so now, "histogram" of seconds.
        meaning: in one line.
    """

    type: Literal["counter", "gauge", "histogram"]
    meaning: str


CATALOGUE: dict[str, Kind] = {
    # Embedding PS, by table.
    "ps_rows": Kind("gauge", "rows in the table"),
    "ps_bytes": Kind("gauge", "memory of the table"),
    "ps_lookups": Kind("counter", "ids looked up in training"),
    "ps_hits": Kind("counter", "of those, ids that had a row"),
    "ps_misses": Kind("counter", "of those, ids that had none"),
    "ps_admitted": Kind("counter", "of the misses, ids that got a row"),
    "ps_rejected": Kind("counter", "of the misses, ids that were not admitted"),
    "ps_evicted": Kind("counter", "rows that made room for others"),
    "ps_applied": Kind("counter", "rows of gradients that were applied"),
    "ps_absent": Kind("counter", "rows of gradients dropped as their id had no row"),
    "ps_nonfinite": Kind("counter", "rows of gradients dropped because of a NaN or Inf"),
    "ps_duplicates": Kind("counter", "pushes that came twice and were applied once"),
    "ps_slot_rows": Kind("counter", "rows of gradients in asynchronous modes"),
    "ps_slot_stale": Kind("counter", "of those, rows dropped as the gradient was too old"),
    "ps_slot_staleness_sum": Kind("counter", "steps by which rows were newer than their gradient's"),
    "ps_slot_staleness_max": Kind("gauge", "the largest of them"),
    # Dense PS.
    "dense_version": Kind("gauge", "version of the dense parameters"),
    "dense_pushes": Kind("counter", "gradients taken"),
    "dense_pulls": Kind("counter", "times that parameters were given"),
    "dense_bytes": Kind("gauge", "memory of parameters and buffers"),
    # Embedding worker.
    "worker_buffered": Kind("gauge", "batches between registration and push"),
    "worker_registered": Kind("counter", "batches registered"),
    "worker_looked_up": Kind("counter", "batches looked up"),
    "worker_pushed": Kind("counter", "batches whose gradient was pushed"),
    "worker_released": Kind("counter", "batches given up without a gradient"),
    "worker_expired": Kind("counter", "batches forgotten as nobody asked for them"),
    "worker_stale": Kind("counter", "calls for a batch that is not there"),
    "worker_gradient_rows": Kind("counter", "rows of gradients sent to PSs"),
    "worker_row_bytes": Kind("counter", "bytes of rows to NN workers, by codec"),
    "worker_gradient_bytes": Kind("counter", "bytes of gradients from NN workers, by codec"),
    # Data loader.
    "loader_ready": Kind("gauge", "batches ready for NN workers"),
    "loader_read": Kind("counter", "batches read"),
    "loader_taken": Kind("counter", "batches taken"),
    "loader_registered": Kind("counter", "batches registered with embedding workers"),
    "loader_registered_again": Kind("counter", "batches registered again, as their embedding worker was gone"),
    "loader_rows": Kind("counter", "samples read"),
    "loader_bytes": Kind("counter", "bytes of batches read"),
    # NN worker, or the whole program where all is in one process.
    "nn_step": Kind("gauge", "global step"),
    "nn_epoch": Kind("gauge", "epoch, counted from 0"),
    "nn_rows": Kind("counter", "samples trained by this NN worker"),
    "nn_loss": Kind("gauge", "of the last batch"),
    "nn_ready": Kind("gauge", "batches looked up that wait for the network"),
    "nn_torch_threads": Kind("gauge", "threads that torch computes with"),
    "nn_staleness_sum": Kind("counter", "own steps between lookup and applied gradient, over all lookups"),
    "nn_staleness_lookups": Kind("counter", "lookups that were measured"),
    "nn_staleness_max": Kind("gauge", "the largest staleness"),
    "nn_dropped_rows": Kind("counter", "rows of gradients that were not applied, by reason: absent, non_finite"),
    "nn_dropped_batches": Kind("counter", "batches without an applied gradient, by reason: released, lost, ..."),
    "nn_checkpoint_age_seconds": Kind("gauge", "since the last checkpoint was complete"),
    "nn_checkpoint_step": Kind("gauge", "its step"),
    "nn_checkpoint_seconds": Kind("gauge", "how long it took to write"),
    "nn_checkpoint_failures": Kind("counter", "checkpoints that could not be written"),
    "nn_wait_seconds": Kind("histogram", "the network waited for a batch"),
    "nn_step_seconds": Kind("histogram", "forward, backward and update of a batch"),
    # Optimizer that compresses.
    "apmsqueeze_steps": Kind("counter", "updates of the network"),
    "apmsqueeze_skipped_steps": Kind("counter", "updates left out because of a NaN or Inf on any NN worker"),
    "apmsqueeze_compressing": Kind("gauge", "1 after the warm-up"),
    "apmsqueeze_bytes_sent": Kind("counter", "bytes that this NN worker sent"),
    "apmsqueeze_bytes_last_step": Kind("gauge", "bytes of the last step"),
    "apmsqueeze_compression_ratio": Kind("gauge", "bytes of a float32 all-reduce over bytes sent"),
    "apmsqueeze_worker_error_norm": Kind("gauge", "norm of the worker error"),
    "apmsqueeze_server_error_norm": Kind("gauge", "norm of the server error"),
    # Coordinator, in asynchronous modes.
    "tokens_batches": Kind("counter", "gradients applied with some weight"),
    "tokens_rows": Kind("counter", "samples of those"),
    "tokens_dropped_batches": Kind("counter", "gradients dropped as too old, or as those of a backup worker"),
    "tokens_dropped_rows": Kind("counter", "samples of those"),
    "tokens_staleness_sum": Kind("counter", "steps between a gradient's parameters and those it was applied to"),
    "tokens_staleness_max": Kind("gauge", "the largest of them"),
    "tokens_lost": Kind("counter", "tokens of dead NN workers"),
    # Any process that is called.
    "rpc_calls": Kind("counter", "calls that were run"),
    "rpc_errors": Kind("counter", "calls that raised"),
    "rpc_malformed": Kind("counter", "messages refused as malformed"),
    "rpc_expired": Kind("counter", "calls not run as their deadline had passed"),
    "rpc_replies_dropped": Kind("counter", "replies whose caller was gone"),
    "rpc_endless": Kind("counter", "messages without end, whose connection was closed"),
    "rpc_connections": Kind("counter", "connections accepted"),
    "rpc_disconnections": Kind("counter", "connections lost"),
    "rpc_handshakes_failed": Kind("counter", "connections refused, also for wrong keys"),
    "rpc_streams_expired": Kind("counter", "streams that nobody read on"),
    "rpc_requests_held": Kind("gauge", "requests running or waiting"),
    "rpc_bytes_held": Kind("gauge", "bytes of those"),
    "rpc_threads": Kind("gauge", "threads that serve"),
    "rpc_streams": Kind("gauge", "streams being read"),
    "rpc_call_seconds": Kind("histogram", "a method ran, by method"),
    "cpu_seconds": Kind("counter", "processor time of the process"),
}
