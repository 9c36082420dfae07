"""Checks of files in the Trace Event Format."""

from __future__ import annotations

import itertools
from typing import Any

NANOSECONDS = 0.003
"""Microseconds by which rounding may move the ends of a span."""


def checked_spans(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Checks that a viewer can read a trace, and that spans of a thread nest; returns the spans."""
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    spans, named = [], set()
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert all(isinstance(event[key], int) for key in ("pid", "tid"))
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name")
            if event["name"] != "process_sort_index":
                assert isinstance(event["args"]["name"], str)
            named.add((event["name"], event["pid"], event["tid"]))
        else:
            assert event["ph"] == "X"
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            spans.append(event)
    for pid, tid in {(span["pid"], span["tid"]) for span in spans}:
        assert ("process_name", pid, 0) in named
        assert ("thread_name", pid, tid) in named
    threads = sorted(spans, key=lambda span: (span["pid"], span["tid"], span["ts"], -span["dur"]))
    for _, of in itertools.groupby(threads, key=lambda span: (span["pid"], span["tid"])):
        open_: list[dict[str, Any]] = []
        for span in of:
            while open_ and open_[-1]["ts"] + open_[-1]["dur"] <= span["ts"] + NANOSECONDS:
                open_.pop()
            if open_:
                assert span["ts"] + span["dur"] <= open_[-1]["ts"] + open_[-1]["dur"] + NANOSECONDS, (span, open_[-1])
            open_.append(span)
    return spans


def by_process(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The spans by role and rank: "NN worker 0"."""
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    found: dict[str, list[dict[str, Any]]] = {name.partition(" (")[0]: [] for name in names.values()}
    for span in checked_spans(trace):
        found[names[span["pid"]].partition(" (")[0]].append(span)
    return found
