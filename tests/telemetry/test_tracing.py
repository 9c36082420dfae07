"""Spans of a process, and the file that a viewer reads."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from persia.errors import ConfigError, DataError
from persia.telemetry import tracing
from persia.telemetry.trace_events import trace_events
from persia.telemetry.tracing import OFF, ProcessTrace, Tracer, clock_offset
from support.cluster_samples import make_trainer, reader
from support.trace_format import by_process, checked_spans


def taken(tracer: Tracer, role: str = "nn_worker", offset: float = 0.0) -> ProcessTrace:
    return tracer.trace(role, 0, 7, "host", offset, 0.0)


def made(role: str, *spans: tuple[str, int, float, float, int, int], offset: float = 0.0) -> ProcessTrace:
    """A trace of spans: name, track, start, seconds, step, batch."""
    names = list(dict.fromkeys(span[0] for span in spans))
    _, track, start, seconds, step, batch = (np.array(column) for column in zip(*spans, strict=True))
    tracks = [f"thread {number}" for number in range(int(track.max()) + 1)]
    name = np.array([names.index(span[0]) for span in spans])
    return ProcessTrace(role, 0, 7, "host", offset, 0.0, 0, names, tracks, name, track, start, seconds, step, batch)


def test_nothing_is_recorded_or_made_without_a_trace():
    tracer = Tracer()
    assert tracer.span("forward", step=3) is OFF
    tracer.add("forward", time.monotonic())
    assert len(taken(tracer).start) == 0
    assert trace_events([taken(tracer)])["traceEvents"][0]["name"] == "process_name"


def test_spans_of_threads_nest_on_tracks_of_their_own():
    tracer = Tracer()
    tracer.start(60)

    def work() -> None:
        with tracer.span("outer", step=3), tracer.span("inner", batch=1 << 63):
            time.sleep(0.001)

    thread = threading.Thread(target=work, name="other")
    thread.start()
    work()
    thread.join()
    with pytest.raises(ZeroDivisionError), tracer.span("fails"):
        1 / 0  # noqa: B018
    tracer.stop()
    trace = trace_events([taken(tracer)])
    spans = checked_spans(json.loads(json.dumps(trace)))
    assert Counter(span["name"] for span in spans) == {"outer": 2, "inner": 2, "fails": 1}
    assert len({span["tid"] for span in spans}) == 2
    inner = [span["args"] for span in spans if span["name"] == "inner"]
    assert inner == [{"batch": str(1 << 63)}] * 2
    assert all(span["dur"] >= 1000 for span in spans if span["name"] == "outer")


def test_recording_ends_by_itself_and_begins_anew():
    tracer = Tracer()
    tracer.start(0.0)
    with tracer.span("late"):
        time.sleep(0.001)
    assert not tracer.active
    assert len(taken(tracer).start) == 0
    tracer.start(60)
    with tracer.span("one"):
        pass
    tracer.start(60)
    with tracer.span("two"):
        pass
    assert taken(tracer).names == ["two"]


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(tracing, "MAX_SPANS", 3)
    tracer = Tracer()
    tracer.start(60)
    for _ in range(5):
        with tracer.span("read"):
            pass
    trace = taken(tracer)
    assert (len(trace.start), trace.dropped) == (3, 2)
    assert trace_events([trace])["otherData"]["dropped_spans"] == 2


def test_the_clock_offset_is_from_the_shortest_round_trip(monkeypatch):
    rounds, now = iter([0.05, 0.001, 0.03, 0.05, 0.05, 0.05, 0.05, 0.05]), 5.0
    monkeypatch.setattr(tracing, "time", SimpleNamespace(monotonic=lambda: now))

    def reference() -> float:
        nonlocal now
        now += next(rounds)  # All of it on the way there: the worst case.
        return now + 1000.0

    offset, uncertainty = clock_offset(reference)
    assert uncertainty == pytest.approx(0.0005)
    assert offset - 1000.0 == pytest.approx(0.0005)


def test_processes_are_on_one_time_line():
    here = made("nn_worker", ("lookup", 0, 5.0, 2.0, 1, 0))
    there = made("embedding_ps", ("lookup", 0, 105.5, 1.0, -1, 0), offset=-100.0)
    inner, outer = sorted(checked_spans(trace_events([there, here])), key=lambda span: span["dur"])
    assert (outer["pid"], outer["ts"], outer["dur"]) == (1, 0.0, 2e6)  # NN workers come first.
    assert (inner["pid"], inner["ts"], inner["dur"]) == (2, 0.5e6, 1e6)


def test_a_batch_has_its_step_in_all_processes():
    training = made(
        "nn_worker",
        ("step", 0, 10.0, 1.0, 4, 77),
        ("forward", 0, 10.1, 0.4, -1, 0),
        ("all-reduce", 1, 10.5, 0.2, -1, 0),
        ("lookup", 2, 8.0, 0.5, -1, 77),
        ("read", 2, 10.2, 0.1, -1, 0),  # Of some later batch.
        ("wait", 0, 11.5, 0.1, -1, 0),
    )
    worker = made("embedding_worker", ("lookup", 0, 8.1, 0.3, -1, 77), ("lookup", 0, 9.0, 0.3, -1, 78))
    spans = checked_spans(trace_events([training, worker]))
    steps = Counter((span["name"], span["args"].get("step")) for span in spans)
    assert steps == {
        ("step", 4): 1, ("forward", 4): 1, ("all-reduce", 4): 1, ("lookup", 4): 2, ("lookup", None): 1,
        ("read", None): 1, ("wait", None): 1,
    }  # fmt: skip


def test_only_the_steps_that_were_asked_for_are_kept():
    steps = [("step", 0, float(step), 0.9, step, 0) for step in range(10)]
    worker = made("embedding_ps", ("lookup", 0, 2.5, 0.1, -1, 0), ("lookup", 0, 4.2, 0.1, -1, 0))
    spans = checked_spans(trace_events([made("nn_worker", *steps), worker], range(4, 6)))
    assert [(span["name"], span["args"].get("step")) for span in spans] == [("step", 4), ("step", 5), ("lookup", None)]


def test_the_calls_that_observe_are_left_out():
    trace = made("coordinator", ("health", 0, 1.0, 0.1, -1, 0), ("draw", 0, 2.0, 0.1, -1, 0))
    assert [span["name"] for span in checked_spans(trace_events([trace]))] == ["draw"]


def test_a_trainer_traces_its_training(tmp_path):
    trainer = make_trainer(None)
    with trainer.trace(tmp_path / "trace.json"):
        trainer.fit(reader(6))
    trainer.fit(reader(2))
    trace = json.loads((tmp_path / "trace.json").read_text())
    (spans,) = by_process(trace).values()
    counts = Counter(span["name"] for span in spans)
    for name in ("lookup", "step", "forward", "backward", "update", "push"):
        assert counts[name] == 6, name
        steps = sorted(span["args"]["step"] for span in spans if span["name"] == name)
        assert steps == [1, 2, 3, 4, 5, 6], name
    assert counts["transfer"] == 12  # Rows, and gradients.
    # Sync: the lookup of a step follows the push of the one before.
    ends = {s["args"]["step"]: s["ts"] + s["dur"] for s in spans if s["name"] == "push"}
    assert all(s["ts"] >= ends.get(s["args"]["step"] - 1, 0.0) for s in spans if s["name"] == "lookup")


def test_a_run_that_fails_is_traced(tmp_path):
    trainer = make_trainer(None)
    with pytest.raises(DataError), trainer.trace(tmp_path / "trace.json"):
        trainer.fit([])
    assert by_process(json.loads((tmp_path / "trace.json").read_text())).keys() == {"NN worker 0"}


def test_the_driver_of_a_cluster_has_nothing_to_trace(tmp_path):
    trainer = make_trainer(None)
    trainer._trains_in_other_processes = True
    with pytest.raises(ConfigError, match="persia trace ADDRESS"), trainer.trace(tmp_path / "trace.json"):
        pass
