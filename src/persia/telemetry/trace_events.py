"""Traces in the Trace Event Format, which Perfetto (https://ui.perfetto.dev) and chrome://tracing show."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from persia.telemetry.tracing import NO_STEP, ProcessTrace, Tracer
from persia.types import TITLES

__all__ = ["ALL_REDUCE", "STEP", "trace_events", "tracing_to", "write_trace"]

STEP = "step"
"""Name of the span of a whole batch in the training loop, which has the number of its step."""

ALL_REDUCE = "all-reduce"
"""Name of the span of a bucket of gradients. Buckets have their own tracks, as they overlap."""

ORDER = ("nn_worker", "embedded", "data_loader", "embedding_worker", "embedding_ps", "dense_ps", "coordinator")
"""Roles from top to bottom."""

CONTROL = frozenset({"clock", "health", "membership", "report", "start_trace", "trace"})
"""Calls that observe a cluster, or follow its membership for seconds; they are left out."""


class _Span(NamedTuple):
    name: str
    track: int
    start: float
    end: float
    step: int
    batch: int


def trace_events(traces: Sequence[ProcessTrace], steps: range | None = None) -> dict[str, Any]:
    """Converts the spans of all processes to one JSON object in the Trace Event Format, on one time line.

    Each process is a process of the format, each of its threads a thread. A span with a batch gets the step of that
    batch from the training loop of an NN worker.

    Args:
        traces: traces of the processes.
        steps: keeps only spans between the first and the last of these steps; None for all.
    """
    traces = sorted(
        traces, key=lambda trace: (ORDER.index(trace.role) if trace.role in ORDER else len(ORDER), trace.rank)
    )
    spans = [_spans(trace) for trace in traces]
    step_of = {s.batch: s.step for process in spans for s in process if s.name == STEP and s.batch}
    spans = [_with_steps(process, step_of) for process in spans]
    if steps is not None:
        selected = [span for process in spans for span in process if span.step in steps]
        begin = min((span.start for span in selected), default=0.0)
        end = max((span.end for span in selected), default=0.0)
        spans = [[span for span in process if begin <= span.start and span.end <= end] for process in spans]
    origin = min((span.start for span in itertools.chain(*spans)), default=0.0)
    events: list[dict[str, Any]] = []
    for pid, (trace, process) in enumerate(zip(traces, spans, strict=True), 1):
        name = f"{TITLES.get(trace.role, trace.role)} {trace.rank} ({trace.host} {trace.pid})"
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
        for track in sorted({span.track for span in process}):
            thread = {"name": trace.tracks[track]}
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": track + 1, "args": thread})
        events += [_event(span, pid, origin) for span in process]
    clocks = {f"{t.role} {t.rank}": {"offset_s": t.offset, "uncertainty_s": t.uncertainty} for t in traces}
    other = {"clocks": clocks, "dropped_spans": sum(trace.dropped for trace in traces)}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


@contextlib.contextmanager
def tracing_to(path: str | os.PathLike[str], tracer: Tracer, rank: int) -> Iterator[None]:
    """Traces a block of this process, and writes a file like `write_trace`; also if the block raises.

    Args:
        path: path of the file.
        tracer: tracer of the process.
        rank: rank of its NN worker.
    """
    Path(path).touch()  # Fails before the block rather than after it.
    tracer.start(float("inf"))
    try:
        yield
    finally:
        tracer.stop()
        trace = tracer.trace("nn_worker", rank, os.getpid(), socket.gethostname(), 0.0, 0.0)
        write_trace(path, trace_events([trace]))


def write_trace(path: str | os.PathLike[str], events: dict[str, Any]) -> None:
    """Writes the result of `trace_events` to a file, for https://ui.perfetto.dev."""
    Path(path).write_bytes(msgspec.json.encode(events))


def _spans(trace: ProcessTrace) -> list[_Span]:
    start = trace.start + trace.offset
    columns = (trace.name, trace.track, start, start + trace.seconds, trace.step, trace.batch)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [_Span(trace.names[name], *rest) for name, *rest in rows if trace.names[name] not in CONTROL]


def _with_steps(spans: list[_Span], step_of: dict[int, int]) -> list[_Span]:
    """Adds steps to the spans of one process: by their batch, or else the step that its training thread is at."""
    loop = sorted((span for span in spans if span.name == STEP), key=lambda span: span.start)
    starts, tracks = [span.start for span in loop], {span.track for span in loop}

    def step(span: _Span) -> int:
        if span.step != NO_STEP:
            return span.step
        if span.batch in step_of:
            return step_of[span.batch]
        if span.track in tracks or span.name == ALL_REDUCE:
            current = bisect.bisect_right(starts, span.start) - 1
            if current >= 0 and span.start < loop[current].end:
                return loop[current].step
        return NO_STEP

    return [span._replace(step=step(span)) for span in spans]


def _event(span: _Span, pid: int, origin: float) -> dict[str, Any]:
    args: dict[str, Any] = {}
    if span.step != NO_STEP:
        args["step"] = span.step
    if span.batch:
        args["batch"] = str(span.batch)  # Exceeds the integers of JavaScript.
    micros = {"ts": round((span.start - origin) * 1e6, 3), "dur": round((span.end - span.start) * 1e6, 3)}
    return {"ph": "X", "name": span.name, "cat": "persia", "pid": pid, "tid": span.track + 1, **micros, "args": args}
