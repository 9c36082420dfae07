"""Health and traces of all processes of a running cluster, by the address of its coordinator."""

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
"""Pause between two looks at the step of NN workers."""


class Answer(NamedTuple):
    """State of one process of a cluster.

    Attributes:
        member: the process.
        health: what it answered; None without an answer.
        problem: why there is no answer.
    """

    member: Member
    health: Health | None
    problem: str = ""


class RecordedTrace(NamedTuple):
    """Trace of a cluster.

    Attributes:
        traces: of the processes that answered.
        steps: the steps that were asked for; None if NN workers did not report so many in time.
        problems: by process, why it is missing.
    """

    traces: list[ProcessTrace]
    steps: range | None
    problems: dict[str, str]


def members(address: str, timeout: float) -> list[Member]:
    """Returns the processes of a cluster, the coordinator first. Blocks.

    An NN worker that has ended is left out: the cluster restarts one that has crashed, or ends the run.

    Args:
        address: of the coordinator, `tcp://host:port`.
        timeout: seconds to wait for it.

    Raises:
        DeadlineError: it does not answer.
    """
    coordinator = rpc.connect(address, ControlPlane, peer="the coordinator", timeout=timeout)
    try:
        found = coordinator.membership().members
    finally:
        rpc.close(coordinator)
    return [Member("coordinator", 0, 1, address), *(m for m in found if m.role != "nn_worker" or m.state != "dead")]


def ask_members(address: str, timeout: float) -> list[Answer]:
    """Returns the health of every process of a cluster, the coordinator first. Blocks at most twice `timeout` seconds.

    Raises:
        DeadlineError: the coordinator does not answer.
    """
    found = members(address, timeout)
    answers = _ask_all(found, timeout, lambda stub: stub.health())
    return [
        Answer(member, None, answer) if isinstance(answer, str) else Answer(member, answer)
        for member, answer in zip(found, answers, strict=True)
    ]


def record_trace(address: str, steps: int, timeout: float) -> RecordedTrace:
    """Traces all processes of a cluster until NN workers have trained a number of steps. Blocks.

    Args:
        address: of the coordinator.
        steps: number of global steps.
        timeout: seconds for these steps, and for each answer.

    Raises:
        DeadlineError: the coordinator does not answer.
    """
    found = members(address, timeout)
    started = _ask_all(found, timeout, lambda stub: stub.start_trace(2 * timeout))
    problems = {_title(m): answer for m, answer in zip(found, started, strict=True) if isinstance(answer, str)}
    traced = [m for m in found if _title(m) not in problems]
    wanted = _await_steps([m for m in traced if m.role == "nn_worker"], steps, timeout)
    traces = []
    for member, trace in zip(traced, _ask_all(traced, timeout, lambda stub: stub.trace()), strict=True):
        if isinstance(trace, str):
            problems[_title(member)] = trace
        else:
            traces.append(trace)
    return RecordedTrace(traces, wanted, problems)


def _await_steps(nn_workers: list[Member], steps: int, timeout: float) -> range | None:
    """Waits until all NN workers have trained `steps` whole steps more, and returns which."""
    end = time.monotonic() + timeout
    first: int | None = None
    while time.monotonic() < end:
        answers = _ask_all(nn_workers, timeout, lambda stub: stub.health())
        done = [int(a.total("nn_step")) for a in answers if not isinstance(a, str)]
        if done and len(done) == len(nn_workers):
            if first is None:
                first = max(done) + 2  # The one after the step that is under way.
            if min(done) >= first + steps:  # One more, whose end is that of the last push.
                return range(first, first + steps)
        time.sleep(POLL_SECONDS)
    return None


def _ask_all(asked: list[Member], timeout: float, call: Callable[[Observable], T]) -> list[T | str]:
    """Calls all members concurrently; returns the answer of each, or the reason why there is none."""
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
