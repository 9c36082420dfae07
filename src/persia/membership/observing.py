"""Collects health and traces of all processes of a running cluster, by the address of its coordinator."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeVar

from persia import rpc
from persia.errors import PersiaError
from persia.rpc.fan_out import call_all
from persia.services import ControlPlane, Observable
from persia.telemetry.metrics import Health
from persia.telemetry.tracing import ProcessTrace
from persia.types import Member

__all__ = ["Answer", "RecordedTrace", "ask_members", "members", "record_trace"]

T = TypeVar("T")

POLL_SECONDS = 0.1
"""Interval of polling the step of NN workers."""


class Answer(NamedTuple):
    """State of one process of a cluster.

    Attributes:
        member: the process.
        health: health of the process; None without an answer.
        problem: reason for the missing answer.
    """

    member: Member
    health: Health | None
    problem: str = ""


class RecordedTrace(NamedTuple):
    """Trace of a cluster.

    Attributes:
        traces: traces of the processes that answered.
        steps: the requested steps; None if NN workers did not complete them in time.
        problems: reason for each missing trace, by process.
    """

    traces: list[ProcessTrace]
    steps: range | None
    problems: dict[str, str]


def members(address: str, timeout: float) -> list[Member]:
    """Returns the processes of a cluster, the coordinator first. Blocks.

    Processes that have left are not among them, nor NN workers that have ended: the cluster restarts a crashed NN
    worker, or ends the run.

    Args:
        address: address of the coordinator, `tcp://host:port`.
        timeout: seconds to wait for the coordinator.

    Raises:
        DeadlineError: the coordinator does not answer.
    """
    coordinator = rpc.connect(address, ControlPlane, peer="the coordinator", timeout=timeout)
    try:
        joined = coordinator.membership().members
    finally:
        rpc.close(coordinator)
    gone = [m for m in joined if m.state == "dead" and (m.role == "nn_worker" or not m.reason)]
    return [Member("coordinator", 0, 1, address), *(m for m in joined if m not in gone)]


def ask_members(address: str, timeout: float) -> list[Answer]:
    """Returns the health of every process of a cluster, the coordinator first. Blocks at most twice `timeout` seconds.

    Raises:
        DeadlineError: the coordinator does not answer.
    """
    asked = members(address, timeout)
    answers = _ask_all(asked, timeout, lambda stub: stub.health())
    return [
        Answer(member, None, answer) if isinstance(answer, str) else Answer(member, answer)
        for member, answer in zip(asked, answers, strict=True)
    ]


def record_trace(address: str, steps: int, timeout: float) -> RecordedTrace:
    """Traces all processes of a cluster until NN workers have trained a number of steps. Blocks.

    Args:
        address: address of the coordinator.
        steps: number of global steps.
        timeout: seconds for these steps, and for each answer.

    Raises:
        DeadlineError: the coordinator does not answer.
    """
    asked = members(address, timeout)
    started = _ask_all(asked, timeout, lambda stub: stub.start_trace(2 * timeout))
    problems = {_title(m): answer for m, answer in zip(asked, started, strict=True) if isinstance(answer, str)}
    traced = [m for m in asked if _title(m) not in problems]
    traced_steps = _await_steps([m for m in traced if m.role == "nn_worker"], steps, timeout)
    traces = []
    for member, trace in zip(traced, _ask_all(traced, timeout, lambda stub: stub.trace()), strict=True):
        if isinstance(trace, str):
            problems[_title(member)] = trace
        else:
            traces.append(trace)
    return RecordedTrace(traces, traced_steps, problems)


def _await_steps(nn_workers: list[Member], steps: int, timeout: float) -> range | None:
    """Waits until all NN workers have trained `steps` more whole steps, and returns these steps."""
    end = time.monotonic() + timeout
    first: int | None = None
    while time.monotonic() < end:
        answers = _ask_all(nn_workers, timeout, lambda stub: stub.health())
        done = [int(a.total("nn_step")) for a in answers if not isinstance(a, str)]
        if done and len(done) == len(nn_workers):
            if first is None:
                first = max(done) + 2  # The step after the current one.
            if min(done) >= first + steps:  # One more step, which ends after the last push.
                return range(first, first + steps)
        time.sleep(POLL_SECONDS)
    return None


def _ask_all(asked: list[Member], timeout: float, call: Callable[[Observable], T]) -> list[T | str]:
    """Calls all members concurrently; returns the answer of each, or the reason for a missing answer."""
    return call_all([partial(_ask, member, timeout, call) for member in asked])


def _ask(member: Member, timeout: float, call: Callable[[Observable], T]) -> T | str:
    if member.state == "dead":
        return f"dead: {member.reason}"
    try:
        with _connected(member, timeout) as stub:
            return call(stub)
    except PersiaError as error:
        return f"no answer: {error.message}"


@contextlib.contextmanager
def _connected(member: Member, timeout: float) -> Iterator[Any]:
    stub = rpc.connect(member.address, Observable, peer=f"{member.role} {member.rank}", timeout=timeout)
    try:
        yield stub
    finally:
        rpc.close(stub)


def _title(member: Member) -> str:
    return f"{member.role} {member.rank}"
