"""Catalogue of all metrics that persia exports. docs/reference/observed.md shows this table."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["CATALOGUE", "MetricKind"]


class MetricKind(NamedTuple):
    """Description of a metric.

    Attributes:
        type: "counter" since the start of the process, "gauge" for a current value, "histogram" of seconds.
        meaning: description in one line.
    """

    type: Literal["counter", "gauge", "histogram"]
    meaning: str


CATALOGUE: dict[str, MetricKind] = {
    # Embedding PS, by table.
    "ps_rows": MetricKind("gauge", "rows in the table"),
    "ps_bytes": MetricKind("gauge", "memory of the table"),
    "ps_lookups": MetricKind("counter", "ids looked up in training"),
    "ps_hits": MetricKind("counter", "looked-up ids that had a row"),
    "ps_misses": MetricKind("counter", "looked-up ids that had no row"),
    "ps_admitted": MetricKind("counter", "misses that got a row"),
    "ps_rejected": MetricKind("counter", "misses that were not admitted"),
    "ps_evicted": MetricKind("counter", "rows evicted to free space for others"),
    "ps_applied": MetricKind("counter", "rows of gradients that were applied"),
    "ps_absent": MetricKind("counter", "rows of gradients dropped because their id had no row"),
    "ps_nonfinite": MetricKind(
        "counter", "rows left unchanged because the gradient or the updated value was not finite"
    ),
    "ps_duplicates": MetricKind("counter", "pushes that arrived twice and were applied once"),
    "ps_disk_rows": MetricKind("gauge", "rows of the table that are on disk"),
    "ps_disk_bytes": MetricKind("gauge", "size of their files"),
    "ps_spilled": MetricKind("counter", "rows moved from memory to disk"),
    "ps_disk_reads": MetricKind("counter", "rows read from disk for lookups, pushes and reads by id"),
    "ps_promoted": MetricKind("counter", "rows that moved back to memory"),
    "ps_compacted": MetricKind("counter", "rows on disk that were rewritten to free the space of dropped rows"),
    "ps_disk_unreadable": MetricKind(
        "gauge",
        "file segments that could not be read when rows were to move, and calls that failed on a damaged record",
    ),
    "ps_metrics_late_seconds": MetricKind(
        "gauge", "how long the disk or a lock has delayed the metrics of this PS; 0 if they are current"
    ),
    "ps_slot_rows": MetricKind("counter", "rows of gradients in asynchronous modes"),
    "ps_slot_stale": MetricKind("counter", "rows of gradients dropped because they were too old"),
    "ps_slot_staleness_sum": MetricKind(
        "counter", "steps by which rows were newer than the rows that their gradient was computed from"
    ),
    "ps_slot_staleness_max": MetricKind("gauge", "the maximum staleness"),
    "ps_publish_age_seconds": MetricKind("gauge", "age of the published rows"),
    "ps_publish_step": MetricKind("gauge", "global steps that the published rows contain"),
    "ps_publish_rows": MetricKind("counter", "rows published in this epoch of the log of changes"),
    "ps_publish_failing": MetricKind("gauge", "1 while this PS cannot publish"),
    # Dense PS.
    "dense_version": MetricKind("gauge", "version of the dense parameters"),
    "dense_pushes": MetricKind("counter", "gradients received"),
    "dense_stale": MetricKind(
        "counter", "gradients that became too old between their arrival at the token scheduler and here"
    ),
    "dense_pulls": MetricKind("counter", "calls that returned parameters"),
    "dense_bytes": MetricKind("gauge", "memory of parameters and buffers"),
    # Embedding worker.
    "worker_buffered": MetricKind("gauge", "batches between registration and push"),
    "worker_registered": MetricKind("counter", "batches registered"),
    "worker_looked_up": MetricKind("counter", "batches looked up"),
    "worker_pushed": MetricKind("counter", "batches whose gradient was pushed"),
    "worker_released": MetricKind("counter", "batches given up without a gradient"),
    "worker_expired": MetricKind("counter", "batches dropped because no NN worker asked for them"),
    "worker_stale": MetricKind("counter", "calls for an unknown batch"),
    "worker_gradient_rows": MetricKind("counter", "rows of gradients sent to PSs"),
    "worker_row_bytes": MetricKind("counter", "bytes of rows to NN workers, by codec"),
    "worker_refreshed_bytes": MetricKind("counter", "bytes of rows that refreshes sent, by codec"),
    "worker_gradient_bytes": MetricKind("counter", "bytes of gradients from NN workers, by codec"),
    # Data loader.
    "loader_ready": MetricKind("gauge", "batches ready for NN workers"),
    "loader_read": MetricKind("counter", "batches read"),
    "loader_taken": MetricKind("counter", "batches taken"),
    "loader_registered": MetricKind("counter", "batches registered with embedding workers"),
    "loader_registered_again": MetricKind(
        "counter", "batches registered again because their embedding worker was gone"
    ),
    "loader_idle_seconds": MetricKind("counter", "reading paused, as enough batches were ready"),
    "loader_rows": MetricKind("counter", "samples read"),
    "loader_bytes": MetricKind("counter", "bytes of batches read"),
    # NN worker, or the whole program if all roles are in one process.
    "nn_step": MetricKind("gauge", "global step"),
    "nn_epoch": MetricKind("gauge", "epoch, counted from 0"),
    "nn_rows": MetricKind("counter", "samples trained by this NN worker"),
    "nn_loss": MetricKind("gauge", "of the last batch"),
    "nn_auc": MetricKind(
        "gauge", "AUC of this NN worker in this call of fit, some seconds old; in later passes training AUC"
    ),
    "nn_metric": MetricKind(
        "gauge", "by label that is not binary, its RMSE or accuracy in this call of fit, by metric: rmse, accuracy"
    ),
    "nn_held_out": MetricKind("gauge", "last value of the metric of `keep_best` on eval_data, by metric"),
    "nn_ready": MetricKind("gauge", "batches looked up that wait for the network"),
    "nn_loading_seconds": MetricKind(
        "counter", "part of the sum of nn_wait_seconds for which the next batch was not read; else it was looked up"
    ),
    "nn_torch_threads": MetricKind("gauge", "threads that torch computes with"),
    "nn_staleness_sum": MetricKind("counter", "own steps that rows lack at the use of their batch, over all batches"),
    "nn_staleness_lookups": MetricKind("counter", "batches whose staleness was measured"),
    "nn_cache_hits": MetricKind("counter", "distinct rows that copies on the device have served"),
    "nn_cache_misses": MetricKind("counter", "distinct rows that were looked up"),
    "nn_staleness_max": MetricKind("gauge", "the largest staleness"),
    "nn_dropped_rows": MetricKind("counter", "rows of gradients that were not applied, by reason: absent, non_finite"),
    "nn_dropped_batches": MetricKind("counter", "batches without an applied gradient, by reason: released, lost, ..."),
    "nn_checkpoint_age_seconds": MetricKind("gauge", "since the last checkpoint was complete"),
    "nn_checkpoint_step": MetricKind("gauge", "its step"),
    "nn_checkpoint_seconds": MetricKind("gauge", "how long it took to write"),
    "nn_checkpoint_failures": MetricKind("counter", "checkpoints that could not be written"),
    "nn_publish_age_seconds": MetricKind("gauge", "age of the published network"),
    "nn_publish_failing": MetricKind("gauge", "1 while the network cannot be published"),
    "nn_wait_seconds": MetricKind("histogram", "the network waited for a batch"),
    "nn_step_seconds": MetricKind("histogram", "forward, backward and update of a batch"),
    # Stream that is trained on.
    "stream_rows": MetricKind("counter", "samples read"),
    "stream_batches": MetricKind("counter", "batches read"),
    "stream_poison": MetricKind("counter", "messages skipped because they could not be converted"),
    "stream_too_large": MetricKind("counter", "skipped messages with too many rows or bytes"),
    "stream_late_files": MetricKind("counter", "files skipped because they sort before a file that is being read"),
    "stream_late": MetricKind("counter", "rows older than the allowed lateness"),
    "stream_rows_per_second": MetricKind("gauge", "samples read per second, in the last 10 s"),
    "stream_lag": MetricKind("gauge", "messages of a partition that are not read yet"),
    "stream_delay_seconds": MetricKind("gauge", "age of the last message that was read"),
    # Joined streams.
    "join_positives": MetricKind("counter", "impressions with a click in their window"),
    "join_negatives": MetricKind("counter", "impressions without a click in their window"),
    "join_corrections": MetricKind("counter", "impressions emitted again because their click was late"),
    "join_late_clicks": MetricKind("counter", "impressions found by a click after they had been emitted as negatives"),
    "join_unmatched_clicks": MetricKind("counter", "clicks without an impression"),
    "join_clicks_late": MetricKind("counter", "clicks older than the allowed lateness of their stream"),
    "join_clicks_poison": MetricKind("counter", "messages of clicks skipped because they could not be converted"),
    "join_clicks_too_large": MetricKind("counter", "skipped messages with too many rows or bytes"),
    "join_open": MetricKind("gauge", "impressions whose windows have not ended"),
    # Prediction server.
    "serve_requests": MetricKind("counter", "requests answered, by route and status"),
    "serve_rows": MetricKind("counter", "samples predicted"),
    "serve_batches": MetricKind("counter", "computations of the network; a computation joins requests"),
    "serve_overloaded": MetricKind("counter", "requests refused immediately because the queue was full or too slow"),
    "serve_expired": MetricKind("counter", "requests not computed because their deadline passed while they waited"),
    "serve_queue": MetricKind("gauge", "requests that wait for computation"),
    "serve_queue_rows": MetricKind("gauge", "samples that wait for computation"),
    "serve_held_bytes": MetricKind("gauge", "bodies of requests that are held"),
    "serve_request_seconds": MetricKind("histogram", "a request, from its head to its answer, by route"),
    "serve_queue_seconds": MetricKind("histogram", "a request waited for computation"),
    "serve_compute_seconds": MetricKind("histogram", "a computation took"),
    "serve_ready": MetricKind("gauge", "1 once there is something to serve, until the server stops"),
    "serve_epoch": MetricKind("gauge", "epoch of the log of changes that is served"),
    "serve_network_step": MetricKind("gauge", "global step of the network"),
    "serve_row_step": MetricKind("gauge", "global steps that the rows contain, at least"),
    "serve_rows_age_seconds": MetricKind("gauge", "age of the oldest rows that a PS serves"),
    "serve_network_age_seconds": MetricKind("gauge", "age of the served network"),
    "serve_stored_rows": MetricKind("gauge", "rows of all tables"),
    "serve_failing": MetricKind("gauge", "1 while the log of changes cannot be followed"),
    "serve_items": MetricKind("gauge", "items that `/retrieve` can find"),
    "serve_items_step": MetricKind("gauge", "global step of the network that made the vectors of items"),
    "serve_items_waiting": MetricKind("gauge", "items whose vectors are to be computed again"),
    "serve_items_failing": MetricKind("gauge", "1 while the index of items cannot be kept up to date"),
    "serve_input_share": MetricKind(
        "gauge", "share of values of a column that are missing, have a separator, or are ids without a row"
    ),
    "serve_psi": MetricKind("gauge", "PSI of requests against training, by feature; 0.25 or more is drift"),
    # Compressing optimizer.
    "apmsqueeze_steps": MetricKind("counter", "updates of the network"),
    "apmsqueeze_skipped_steps": MetricKind("counter", "updates left out because of a NaN or Inf on any NN worker"),
    "apmsqueeze_compressing": MetricKind("gauge", "1 after the warm-up"),
    "apmsqueeze_bytes_sent": MetricKind("counter", "bytes that this NN worker sent"),
    "apmsqueeze_bytes_last_step": MetricKind("gauge", "bytes of the last step"),
    "apmsqueeze_compression_ratio": MetricKind("gauge", "bytes of a float32 all-reduce over bytes sent"),
    "apmsqueeze_worker_error_norm": MetricKind("gauge", "norm of the worker error"),
    "apmsqueeze_server_error_norm": MetricKind("gauge", "norm of the server error"),
    # Coordinator, in asynchronous modes.
    "tokens_batches": MetricKind("counter", "gradients applied with some weight"),
    "tokens_rows": MetricKind("counter", "samples of applied gradients"),
    "tokens_dropped_batches": MetricKind("counter", "gradients dropped: too old, or from a backup worker"),
    "tokens_dropped_rows": MetricKind("counter", "samples of dropped gradients"),
    "tokens_staleness_sum": MetricKind(
        "counter", "steps between the parameters of a gradient and the parameters it was applied to"
    ),
    "tokens_staleness_max": MetricKind("gauge", "the maximum staleness"),
    "tokens_lost": MetricKind("counter", "tokens of dead NN workers"),
    # Coordinator, of the scaler.
    "scaler_processes": MetricKind("gauge", "processes that the scaler aims at: ps, embedding_workers, data_loaders"),
    "scaler_share": MetricKind(
        "gauge",
        "what the scaler has measured: shares of the time of NN workers (lookups, loading), of memory (ps_memory), of "
        "processors (ps_processors, worker_processors), and of the time of data loaders (loaders_busy)",
    ),
    "scaler_decisions": MetricKind(
        "counter", "decisions of the scaler, by reason, and by state: done, failed, dry_run, blocked"
    ),
    # Any process that serves calls.
    "rpc_calls": MetricKind("counter", "calls that were run"),
    "rpc_errors": MetricKind("counter", "calls that raised"),
    "rpc_malformed": MetricKind("counter", "messages refused as malformed"),
    "rpc_expired": MetricKind("counter", "calls not run because their deadline had passed"),
    "rpc_replies_dropped": MetricKind("counter", "replies whose caller was gone"),
    "rpc_requests_refused": MetricKind("counter", "requests refused because their client held its share of the limits"),
    "rpc_key_changes": MetricKind("counter", "changes of the keys that a process listens with"),
    "rpc_connections_refused": MetricKind(
        "counter", "connections closed because they were too many, sent too much or took too much memory"
    ),
    "rpc_connections": MetricKind("counter", "connections accepted"),
    "rpc_disconnections": MetricKind("counter", "connections lost"),
    "rpc_handshakes_failed": MetricKind("counter", "connections refused, also for wrong keys"),
    "rpc_streams_expired": MetricKind("counter", "streams closed because their client stopped reading"),
    "rpc_requests_held": MetricKind("gauge", "requests running or waiting"),
    "rpc_bytes_held": MetricKind("gauge", "bytes of requests running or waiting, decoded: headers count 128 times"),
    "rpc_threads": MetricKind("gauge", "threads that serve"),
    "rpc_streams": MetricKind("gauge", "streams being read"),
    "rpc_call_seconds": MetricKind("histogram", "a method ran, by method"),
    "cpu_seconds": MetricKind("counter", "processor time of the process"),
    "process_bytes": MetricKind("gauge", "memory of the process, shared memory included"),
    "process_processors": MetricKind("gauge", "processors that this PS or embedding worker can use"),
    "host_memory_share": MetricKind("gauge", "share of the memory of this PS's host that is used, by whatever process"),
}
