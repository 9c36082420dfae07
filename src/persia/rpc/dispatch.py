"""The requests of a server: a queue of waiting and running requests, and a dispatcher that runs them on an object."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from persia.errors import WireError
from persia.rpc.array_encoding import Arrays, Decoder
from persia.rpc.failures import failure
from persia.rpc.interface import Method
from persia.rpc.iterators import END, Streams
from persia.rpc.limits import Limits
from persia.rpc.messages import Kind, Message, body, header_bytes
from persia.telemetry.metrics import Histogram, Latency
from persia.telemetry.tracing import NO_STEP, OFF, Tracer

__all__ = ["Backlog", "Dispatcher", "Job", "Reply"]


class Reply(NamedTuple):
    """A message to a client.

    Attributes:
        header: first frame.
        arrays: further frames.
    """

    header: bytes
    arrays: Arrays


class Job(NamedTuple):
    """A request to run, and the client to reply to.

    Attributes:
        peer: identity of the client.
        nbytes: size of the request in bytes once it is decoded; see `Message.decoded_bytes`.
        expires: monotonic time at which the client gives up.
        work: runs the request; returns the reply, if any. Does not raise.
        waits: whether it waits for requests of other clients. It then counts only until it runs.
        call: number of the call that it replies to.
    """

    peer: bytes
    nbytes: int
    expires: float
    work: Callable[[], Reply | None]
    waits: bool = False
    call: int = 0


_NONE = [0, 0]


class _Peer:
    """The jobs that a connection holds, by whether they wait for others.

    Attributes:
        jobs: number of jobs that are queued or run.
        nbytes: their size in bytes, decoded.
        turn: turn of its last job.
    """

    __slots__ = ("jobs", "nbytes", "turn")

    def __init__(self) -> None:
        self.jobs = [0, 0]
        self.nbytes = [0, 0]
        self.turn = 0


class Backlog:
    """A bounded queue of jobs. Not thread-safe; the server locks it.

    Connections take turns, so that none has to wait for all jobs of another one; jobs of a connection are taken in the
    order of their arrival. This is fair queueing: the turn of a job is one after that of the connection's last job, but
    not before the turn that is being served.

    Args:
        limits: bounds on the number and size of requests.

    Attributes:
        requests: number of jobs that are queued or taken, without jobs that wait for others.
        nbytes: their size in bytes, decoded.
        waiting: number of taken jobs that wait for others.
        waiting_nbytes: their size in bytes, decoded.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._share = None if limits.peer_share == 1 else [limits.of_peer(waits=waits) for waits in (False, True)]
        self._arrivals = itertools.count()
        # Heaps by whether the jobs wait for others; each job with its turn and its position in the order of arrival.
        self._queues: dict[bool, list[tuple[int, int, Job]]] = {False: [], True: []}
        self._peers: dict[bytes, _Peer] = {}
        self._turn = 0
        self.requests = 0
        self.nbytes = 0
        self.waiting = 0
        self.waiting_nbytes = 0

    @property
    def full(self) -> bool:
        """Whether to stop reading requests."""
        return self.requests >= self._limits.requests or self.nbytes >= self._limits.request_bytes

    def __bool__(self) -> bool:
        """Whether a job is queued."""
        return any(self._queues.values())

    def held(self, job: Job) -> tuple[int, int]:
        """Returns the number and the decoded bytes of the jobs of its kind that the connection of a job holds."""
        peer = self._peers.get(job.peer)
        return (peer.jobs[job.waits], peer.nbytes[job.waits]) if peer is not None else (0, 0)

    def has_share(self, job: Job) -> bool:
        """Whether the connection of a job may hold it in addition to what it holds."""
        peer = self._peers.get(job.peer)
        if peer is None or self._share is None:  # The limits for all suffice, which a moment's reading may exceed.
            return True
        jobs, (most_jobs, most_bytes) = peer.jobs[job.waits], self._share[job.waits]
        return not jobs or (jobs < most_jobs and peer.nbytes[job.waits] + job.nbytes <= most_bytes)

    def put(self, job: Job) -> None:
        """Appends a job."""
        self.requests += 1
        self.nbytes += job.nbytes
        peer = self._peers.get(job.peer)
        if peer is None:
            peer = self._peers[job.peer] = _Peer()
        peer.jobs[job.waits] += 1
        peer.nbytes[job.waits] += job.nbytes
        peer.turn = max(peer.turn, self._turn) + 1
        heapq.heappush(self._queues[job.waits], (peer.turn, next(self._arrivals), job))

    def take(self, only_waiting: bool) -> Job | None:
        """Removes the job whose turn it is, or the one of those that wait for others; None without one.

        It counts until `done`.
        """
        queue = self._queues[True]
        others = self._queues[False]
        if others and not only_waiting and (not queue or others[0][:2] < queue[0][:2]):
            queue = others
        if not queue:
            return None
        turn, _, job = heapq.heappop(queue)
        self._turn = max(self._turn, turn)
        return job

    def admits(self, job: Job) -> bool:
        """Whether one more job may wait for others."""
        limits = self._limits
        return self.waiting < limits.waiting and self.waiting_nbytes + job.nbytes <= limits.waiting_bytes

    def wait(self, job: Job) -> None:
        """Counts a taken job as waiting for others, and no longer as a request."""
        self._forget(job)
        self.waiting += 1
        self.waiting_nbytes += job.nbytes

    def refuse(self, job: Job, work: Callable[[], Reply]) -> Job:
        """Turns a taken job that would wait for others into one that only makes its reply."""
        peer = self._peers[job.peer]
        for counts, amount in ((peer.jobs, 1), (peer.nbytes, job.nbytes)):
            counts[True] -= amount
            counts[False] += amount
        return job._replace(work=work, waits=False)

    def ran(self, job: Job) -> None:
        """Marks a job as answered: its client may send another one as soon as it has the reply."""
        peer = self._peers[job.peer]
        peer.jobs[job.waits] -= 1
        peer.nbytes[job.waits] -= job.nbytes
        if peer.jobs == _NONE:
            del self._peers[job.peer]

    def done(self, job: Job) -> None:
        """Marks a taken job as finished, after `ran`."""
        if job.waits:
            self.waiting -= 1
            self.waiting_nbytes -= job.nbytes
        else:
            self._forget(job)

    def _forget(self, job: Job) -> None:
        self.requests -= 1
        self.nbytes -= job.nbytes

    def drop_late(self, now: float) -> int:
        """Drops queued jobs whose client has given up; returns their number."""
        dropped = 0
        for waits, queue in self._queues.items():
            late = [job for _, _, job in queue if job.expires <= now]
            if late:
                self._queues[waits] = [entry for entry in queue if entry[2].expires > now]
                heapq.heapify(self._queues[waits])
            for job in late:
                self.ran(job)
                self._forget(job)
            dropped += len(late)
        return dropped

    def clear(self) -> None:
        """Drops all queued jobs without a reply."""
        self.drop_late(float("inf"))


class Dispatcher:
    """Runs methods of an object for requests. Thread-safe. An exception of a method becomes a reply.

    Args:
        service: the object.
        methods: methods that may be called.
        limits: bounds on replies and iterators.
        count: called with the name of a counter: `calls`, `errors`, `malformed`, `expired`.
        tracer: records the methods that run.
    """

    def __init__(
        self,
        service: object,
        methods: Mapping[str, Method],
        limits: Limits,
        count: Callable[[str], None],
        tracer: Tracer,
    ) -> None:
        self._service = service
        self._methods = methods
        self._limits = limits
        self._count = count
        self._tracer = tracer
        self._times = {name: Histogram() for name in methods}
        self._cursor = Decoder[tuple[int, int]](tuple[int, int])
        self.streams = Streams(limits)

    def inline(self, message: Message) -> bool:
        """Whether the reading thread runs a request itself."""
        method = self._method(message)
        return method is not None and method.inline

    def waits(self, message: Message) -> bool:
        """Whether a request waits for requests of other clients."""
        method = self._method(message)
        return method is not None and method.waits

    def _method(self, message: Message) -> Method | None:
        """Returns the method that a request calls; None if it calls none, or an unknown one."""
        return self._methods.get(message.header.method) if message.header.kind is Kind.CALL else None

    def answer(self, message: Message, expires: float) -> Reply | None:
        """Runs a request and returns its reply, None if there is none. Blocks for the method. Never raises.

        Args:
            message: the request.
            expires: monotonic time at which the client gives up.
        """
        call = message.header.call
        if time.monotonic() >= expires:
            self._count("expired")
            return None
        try:
            work = self._prepare(message)
        except BaseException as error:  # Records validate themselves when they are made, and raise their own errors.
            self._count("malformed")
            return self.failure(call, error)
        try:
            kind, value = work()
            if kind is Kind.CLOSE:
                return None
            payload, arrays, _ = body(value, self._limits)
            return Reply(header_bytes(kind, call, "", 0.0, payload), arrays)
        except BaseException as error:
            self._count("errors")
            return self.failure(call, error)

    def latencies(self) -> list[Latency]:
        """Returns the latencies of the methods that were called."""
        latencies = [times.latency("rpc_call_seconds", {"method": name}) for name, times in self._times.items()]
        return [latency for latency in latencies if any(latency.counts)]

    def failure(self, call: int, error: BaseException) -> Reply:
        """Makes the reply for an exception."""
        payload, arrays, _ = failure(error, self._limits)
        return Reply(header_bytes(Kind.ERROR, call, "", 0.0, payload), arrays)

    def _prepare(self, message: Message) -> Callable[[], tuple[Kind, object]]:
        """Decodes a request into the function to run.

        Raises:
            WireError: the method does not exist, or the arguments have wrong types.
        """
        header, frames, _ = message
        if header.kind is not Kind.CALL:
            number, position = self._cursor.decode(header.payload, frames)
            return lambda: self._advance(header.kind, number, position)
        method = self._methods.get(header.method)
        if method is None:
            raise WireError(
                f"There is no method {header.method!r} here; expected one of: {', '.join(self._methods)}. "
                "Connect to the address of the right service."
            )
        try:
            arguments = method.arguments.decode(header.payload, frames)
        except WireError as error:
            raise WireError(f"{method.name}: {error.message}", operation=method.name) from error
        return lambda: self._call(method, arguments)

    def _call(self, method: Method, arguments: tuple[Any, ...]) -> tuple[Kind, object]:
        self._count("calls")
        tracer = self._tracer
        span = tracer.span(method.name, **_subject(method, arguments)) if tracer.active else OFF
        start = time.perf_counter()
        try:
            with span:
                result = method.call(self._service, arguments)
        finally:
            self._times[method.name].add(time.perf_counter() - start)
        return (Kind.STREAM, self.streams.open(result)) if method.streams else (Kind.RESULT, result)

    def _advance(self, kind: Kind, number: int, position: int) -> tuple[Kind, object]:
        if kind is Kind.CLOSE:
            self.streams.close(number)
            return Kind.CLOSE, None
        item = self.streams.next(number, position)
        return (Kind.END, None) if item is END else (Kind.ITEM, item)


def _subject(method: Method, arguments: tuple[Any, ...]) -> dict[str, int]:
    """Returns the batch and the step that a call is about, as far as its arguments name them."""
    named = {name: value for (name, _), value in zip(method.parameters, arguments, strict=True)}
    header = named.get("header")
    step = NO_STEP if header is None else header.step + 1  # The global step that the push completes.
    return {"step": step, "batch": named.get("batch_id", 0)}
