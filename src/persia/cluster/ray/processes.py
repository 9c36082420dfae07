"""The processes of a cluster as Ray actors: starts them, notices their deaths, and reports the causes."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray._private import ray_constants
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError

from persia import modes
from persia.cluster.ray.options import RayOptions
from persia.cluster.ray.process_plan import Plan, ProcessInfo
from persia.errors import ConfigError, DeadlineError, PersiaError, RoleDiedError
from persia.retry import Deadline
from persia.rpc.keys import KEYS_VARIABLE
from persia.types import TITLES

__all__ = ["NAMESPACE", "Process", "Processes", "connect", "make_plan", "run_on", "run_on_all"]

T = TypeVar("T")

NAMESPACE = "persia"
WATCH_SECONDS = 0.5
END_SECONDS = 20.0
RELEASE_SECONDS = 10.0
RETRY_SECONDS = 0.1
ATTEMPT_SECONDS = 2.0
ANSWER_SECONDS = 5.0
"""Time for a process to answer whose connection to Ray was lost, before it counts as dead."""
LAST_LINES = 15
PINNED = ("embedding_ps", "coordinator")
"""Roles that restart only on their own host, which has their state."""
CALLS = 16
"""Maximum number of concurrent calls of an actor, waiting ones included."""


class Process:
    """An actor. Its fields are owned by `Processes`.

    Attributes:
        role: role of the process.
        rank: rank within the role.
        handle: Ray handle of the actor.
        restarts: whether Ray restarts it.
        leaving: whether it ends once it has no work left.
        expendable: whether training does not need it: an NN worker or embedding PS that joins or leaves.
        info: its location, once it is ready.
        requesting: the call that waits for the next request of an NN worker.
        ended: the call by which its last death was noticed.
    """

    def __init__(self, role: str, rank: int, handle: Any, restarts: bool) -> None:
        self.role = role
        self.rank = rank
        self.handle = handle
        self.restarts = restarts
        self.leaving = False
        self.expendable = False
        self.info: ProcessInfo | None = None
        self.requesting: Any = None
        self.ended: Any = None
        self.readiness = handle.info.remote()
        self.watching = handle.watch.remote()

    @property
    def title(self) -> str:
        """Role, rank and location, for messages."""
        where = f" (process {self.info.pid} on {self.info.host})" if self.info else ""
        return f"{TITLES[self.role]} {self.rank}{where}"


class Processes:
    """All processes of a cluster. Thread-safe.

    Args:
        died: called with each process that died and the cause, before any other reaction.
        restarted: called with each process that has restarted.
        timeout: maximum duration of a restart in seconds.
    """

    def __init__(
        self, died: Callable[[Process, str], None], restarted: Callable[[Process], None], timeout: float
    ) -> None:
        self._timeout = timeout
        self._unreleased: set[str] = set()
        self._died = died
        self._restarted = restarted
        self._changed = threading.Condition()
        self._processes: list[Process] = []
        self._ending = threading.Event()
        self._failures: list[RoleDiedError] = []
        self._expended: list[tuple[Process, RoleDiedError]] = []
        self._thread = threading.Thread(target=self._watch, name="persia-watch", daemon=True)
        self._thread.start()

    def start(
        self, host: type, role: str, rank: int, arguments: Sequence[Any], *, expendable: bool = False, **options: Any
    ) -> Process:
        """Starts a process. Returns immediately."""
        handle = (
            ray.remote(host)
            .options(
                **{"max_concurrency": CALLS, "scheduling_strategy": "SPREAD", "namespace": NAMESPACE, **options},
            )
            .remote(*arguments)
        )
        process = Process(role, rank, handle, bool(options.get("max_restarts")))
        process.expendable = expendable
        with self._changed:
            self._processes.append(process)
        return process

    def of(self, role: str) -> list[Process]:
        """Returns the processes of a role, by rank."""
        with self._changed:
            return sorted((p for p in self._processes if p.role == role), key=lambda p: p.rank)

    def all(self) -> list[Process]:
        """Returns all processes."""
        with self._changed:
            return list(self._processes)

    def await_ready(self, processes: Sequence[Process], timeout: float) -> None:
        """Waits until these processes have started.

        Raises:
            PersiaError: a process failed to start.
            DeadlineError: a process is late.
            RoleDiedError: a process has died.
        """
        deadline = Deadline(timeout)
        for process in processes:
            ready: list[Any] = []
            while not ready and not deadline.passed:
                ready, _ = ray.wait([process.readiness], timeout=min(WATCH_SECONDS, deadline.left))
                if died := self.expended(processes):
                    raise died[0]
            try:
                process.info = ray.get(process.readiness, timeout=deadline.left)
            except GetTimeoutError as error:
                raise DeadlineError(
                    f"{process.title} did not start within {timeout:g} s. Ray may lack resources for it: see `ray "
                    "status`, start fewer processes, or raise `timeout`.",
                    role=process.role,
                    rank=process.rank,
                    seconds=timeout,
                ) from error
            except RayError as error:
                raise _start_error(process, error) from error

    def check(self) -> None:
        """Raises RoleDiedError if processes have died permanently: for the first one, with later deaths listed."""
        if failures := self.failures():
            first, *later = failures
            message = "\n".join([first.message, *(f"After that, {other.message}" for other in later)])
            raise RoleDiedError(message, **first.fields, later=[other.fields for other in later])

    def failures(self) -> list[RoleDiedError]:
        """Returns the permanent deaths so far, in order."""
        with self._changed:
            return list(self._failures)

    def expended(self, processes: Collection[Process]) -> list[RoleDiedError]:
        """Returns the permanent deaths of expendable processes, which are no failures."""
        with self._changed:
            return [death for process, death in self._expended if process in processes]

    def need(self, processes: Collection[Process]) -> None:
        """Notes that training needs processes from now on. Those that have died meanwhile are failures."""
        with self._changed:
            for process in processes:
                process.expendable = False
            self._failures += [death for process, death in self._expended if process in processes]
            self._expended = [(process, death) for process, death in self._expended if process not in processes]
            self._changed.notify_all()

    def await_failure(self, seconds: float) -> bool:
        """Waits until a permanent death is noticed or the processes are closed; returns whether there is a death."""
        with self._changed:
            self._changed.wait_for(lambda: self._failures or self._ending.is_set(), seconds)
            return bool(self._failures)

    def forget_failures(self, role: str, rank: int | None = None) -> None:
        """Removes the deaths of a role, or of one rank, before new processes start."""
        with self._changed:
            self._failures = [
                f for f in self._failures if f.fields["role"] != role or rank not in (None, f.fields["rank"])
            ]

    def end(self, processes: Sequence[Process]) -> None:
        """Ends processes, and waits until they are gone."""
        with self._changed:
            self._processes = [p for p in self._processes if p not in processes]
        for process in processes:
            ray.kill(process.handle, no_restart=True)
        watching = [p.watching for p in processes]
        if watching:
            _, running = ray.wait(watching, num_returns=len(watching), timeout=END_SECONDS)
            if running:
                late = ", ".join(p.title for p in processes if p.watching in running)
                raise DeadlineError(
                    f"{late} did not end within {END_SECONDS:g} s; kill the remaining processes.", seconds=END_SECONDS
                )

    def close(self, release: bool = True) -> None:
        """Ends all processes.

        Args:
            release: whether they remove their files first.
        """
        with self._changed:
            self._ending.set()
            self._changed.notify_all()
        self._thread.join(END_SECONDS)
        pinned = [p for role in PINNED for p in self.of(role)] if release else []
        for process in pinned:
            if process.info is None:  # It may have started without anything waiting for it.
                with contextlib.suppress(RayError):
                    process.info = ray.get(process.readiness, timeout=RETRY_SECONDS)
        self.release(pinned)
        self.end(self.all())

    def release(self, pinned: Collection[Process]) -> None:
        """Lets processes remove the files that would outlive them."""
        releasing = {p.handle.release.remote(): p.info.node for p in pinned if p.info is not None}
        if releasing:
            ray.wait(list(releasing), num_returns=len(releasing), timeout=RELEASE_SECONDS)
        for call, node in releasing.items():
            try:
                ray.get(call, timeout=RETRY_SECONDS)
            except RayError:  # It is late, or is being restarted.
                self._unreleased.add(node)

    def on_unreleased(self, function: Callable[[], object]) -> None:
        """Calls a function on each host where a process has ended without removing its files."""
        for node in self._unreleased:
            if _node_alive(node):  # Otherwise its memory is gone, too.
                with contextlib.suppress(RayError, OSError):
                    run_on(node, function)

    # --- the monitoring thread --------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._ending.is_set():
            watched = {p.watching: p for p in self.all() if p.watching is not p.ended}
            if not watched:
                self._ending.wait(WATCH_SECONDS)
                continue
            try:
                ended, _ = ray.wait(list(watched), timeout=WATCH_SECONDS)
            except Exception:  # Ray itself has been shut down.
                if ray.is_initialized():
                    raise
                return
            for reference in ended:
                process = watched[reference]
                process.ended = reference
                # In its own thread, as reading the last lines from a lost host takes long.
                threading.Thread(target=self._ended, args=(process,), daemon=True).start()

    def _ended(self, process: Process) -> None:
        if process not in self.all():
            return  # It was ended on purpose.
        error = _error_of(process.watching)
        if isinstance(error, ActorUnavailableError) and process.role != "nn_worker" and self._answers(process):
            process.watching = process.handle.watch.remote()
            return
        if process not in self.all():
            return  # It was ended while it was asked.
        reason = _first_line(error) + _quoted(last_lines(process))
        with contextlib.suppress(PersiaError):  # The failure below reports it, too.
            self._died(process, reason)
        if process.restarts and not isinstance(error, ActorDiedError):
            self._await_restart(process, reason)
        else:
            self._fail(process, reason)

    def _answers(self, process: Process) -> bool:
        """Returns whether only the connection to a process was lost, for example by a reset: it runs, and answers.

        An NN worker is not asked: the result of its function is lost with the connection.
        """
        deadline = Deadline(ANSWER_SECONDS)
        while process.info is not None and not deadline.passed and not self._ending.is_set():
            try:
                return bool(ray.get(process.handle.info.remote(), timeout=deadline.left).is_same(process.info))
            except ActorUnavailableError:
                self._ending.wait(RETRY_SECONDS)
            except (RayError, PersiaError):
                return False
        return False

    def _await_restart(self, process: Process, reason: str) -> None:
        deadline, rejoins = Deadline(self._timeout), False
        call: Any = None
        while not self._ending.is_set():
            call = call or process.handle.info.remote()
            try:
                info = ray.get(call, timeout=ATTEMPT_SECONDS)
                if not rejoins and process.role != "coordinator" and info.is_same(process.info):
                    call, rejoins = process.handle.rejoin.remote(), True
                    continue  # It has not restarted: only its host was out of reach.
                process.info = info
                # Not earlier: a call that fails before the process has restarted would count as its next death.
                process.watching = process.handle.watch.remote()
                self._restarted(process)
                return
            except PersiaError as error:
                self._fail(process, f"{reason}\nIts restart failed: {error}")
                return
            except GetTimeoutError:
                died = False
            except RayActorError as error:
                died, call, rejoins = isinstance(error, ActorDiedError), None, False
            except RayError:
                died = True
            lost = process.role in PINNED and process.info is not None and not _node_alive(process.info.node)
            if died or lost:
                self._fail(process, reason, " and is not restarted again")
                return
            if deadline.passed:
                self._fail(process, reason, f" and did not restart within {self._timeout:g} s")
                return
            self._ending.wait(RETRY_SECONDS)

    def _fail(self, process: Process, reason: str, restart: str = "") -> None:
        with self._changed:
            if process not in self._processes:
                return
            self._processes.remove(process)  # Otherwise the same death would be noticed again.
            if process.role in PINNED and process.info is not None:
                self._unreleased.add(process.info.node)
            death = RoleDiedError(f"{process.title} has died{restart}: {reason}", role=process.role, rank=process.rank)
            if process.expendable:
                self._expended.append((process, death))
                return
            self._failures.append(death)
            self._changed.notify_all()


def _start_error(process: Process, error: RayError) -> PersiaError:
    if isinstance(error, RayTaskError) and isinstance(error.cause, PersiaError):
        return error.cause
    return RoleDiedError(f"{process.title} could not start: {error}", role=process.role, rank=process.rank)


def _node_alive(node: str) -> bool:
    return any(known["NodeID"] == node and known["Alive"] for known in ray.nodes())


def last_lines(process: Process) -> list[str]:
    """Returns the last lines of a process's output, read on its host."""
    info = process.info
    if info is None:
        return []
    if not _node_alive(info.node):
        return ["(its host is gone)"]
    try:
        return run_on(info.node, lambda: _tail(info.logs))
    except Exception as error:
        return [f"(its log cannot be read: {type(error).__name__})"]


def run_on(node: str, function: Callable[[], T]) -> T:
    """Runs a function on a host, and returns its result."""
    if node == own_node():
        return function()
    result: T = ray.get(_task_on(node, function), timeout=RELEASE_SECONDS)
    return result


def run_on_all(nodes: Collection[str], function: Callable[[], T], timeout: float) -> dict[str, T]:
    """Runs a function on several hosts at the same time, and returns the results by host.

    Blocks for at most `timeout` seconds.

    Raises:
        DeadlineError: a host did not answer in time.
        PersiaError: the function failed on a host, or the host is gone.
    """
    own = own_node()
    calls = {node: _task_on(node, function) for node in nodes if node != own}
    results = {own: function()} if own in nodes else {}
    late = ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout)[1] if calls else []
    if late:
        silent = sorted(node for node, call in calls.items() if call in late)
        raise DeadlineError(
            f"No answer within {timeout:g} s from the hosts of these Ray nodes: {', '.join(silent)}. Check with "
            "`ray status` that they run, or increase `timeout` of the cluster.",
            seconds=timeout,
        )
    for node, call in calls.items():
        try:
            results[node] = ray.get(call, timeout=RELEASE_SECONDS)
        except RayError as error:
            raise PersiaError(f"The host of Ray node {node} does not respond: {error}", node=node) from error
    return results


def own_node() -> str:
    """Returns the id of the Ray node of this process."""
    node: str = ray.get_runtime_context().get_node_id()
    return node


def _task_on(node: str, function: Callable[[], T]) -> ray.ObjectRef[T]:
    where = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    task = ray.remote(lambda: function())  # Wrapped, as Ray rejects `functools.partial`.
    return task.options(num_cpus=0, scheduling_strategy=where).remote()


def _tail(paths: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for path in paths:
        try:
            text = Path(path).read_text(errors="replace")
        except OSError:
            continue
        # Ray adds its own lines, which start with a colon.
        lines += [line for line in text.splitlines() if line and not line.startswith(":")][-LAST_LINES:]
    return lines


def _quoted(lines: Sequence[str]) -> str:
    return " Its last lines:\n" + "\n".join(f"    {line}" for line in lines) if lines else " It printed nothing."


def _first_line(error: BaseException | None) -> str:
    """Returns the first line of Ray's message, without its advice."""
    for line in str(error).splitlines():
        if "has died. " in line:
            return line.split("has died. ", 1)[1].split(" Some common causes")[0].rstrip(".") + "."
    return (str(error).splitlines() or ["the cause is unknown"])[0].rstrip(".") + "."


def _error_of(reference: Any) -> BaseException | None:
    try:
        ray.get(reference)
    except RayError as error:
        raised: BaseException = error
        return raised
    return None


def connect(address: str | None) -> bool:
    """Connects this program to Ray, or starts Ray. Returns False if it is already connected."""
    if ray.is_initialized():
        return False
    # Without an address Ray would join any cluster on this machine.
    address = address or (None if "RAY_ADDRESS" in os.environ else "local")
    with of_this_host_only() if address == "local" else contextlib.nullcontext():
        ray.init(address=address, namespace=NAMESPACE, include_dashboard=False if address == "local" else None)
    return True


@contextlib.contextmanager
def of_this_host_only() -> Iterator[None]:
    """Lets a Ray that is started in the block listen only on 127.0.0.1, as it does by default on macOS and Windows.

    Ray executes requests at its ports, so they must not be open to the network of a laptop. The only switch is an
    environment variable, which is read when Ray is imported. So this sets the variable, for processes that Ray starts,
    and the constant, for this process.
    """
    previous = ray_constants.ENABLE_RAY_CLUSTER, os.environ.get(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR)
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = previous[0]
        del os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR]
        if previous[1] is not None:
            os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = previous[1]


def make_plan(servers: int, nn_workers: int, options: RayOptions) -> Plan:
    """Returns a plan without a coordinator, for a new cluster on the hosts of Ray.

    Raises:
        ConfigError: there are several hosts, but PERSIA_CURVE_KEYS is not set.
    """
    loopback = sum(node["Alive"] for node in ray.nodes()) == 1
    keys = os.environ.get(KEYS_VARIABLE)
    if not loopback and not keys:
        raise ConfigError(
            "This Ray cluster has several hosts, but there are no CURVE keys: anyone on the network could read and "
            "change the embeddings. Make keys with persia.rpc.make_keys, copy them to every host, and set "
            f"{KEYS_VARIABLE}.",
            field="cluster",
        )
    name = f"persia-{uuid.uuid4().hex[:8]}"
    return Plan(name, servers, nn_workers, options, loopback, keys, list(sys.path), modes.modules())
