"""Rows at row servers, for a predictor whose tables do not fit one host."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from persia import batching, rpc
from persia.errors import ClosedError, ConfigError, DeadlineError, PersiaError, PublishError
from persia.rpc.fan_out import try_all
from persia.serve.row_sources import Rows
from persia.services import FoundRows, RowServerState, RowsVersion, ServedEpoch, ServedRows
from persia.types import BucketMap, Int64Array, Packed

__all__ = ["RemoteEpoch", "RemoteRows", "RowServers"]


class RowServers:
    """The row servers of a predictor. Thread-safe, except `poll`.

    Args:
        addresses: addresses of the row servers, in the order of their parts.
        seconds: deadline of each call.

    Attributes:
        buckets: the row server of each bucket of ids.
        problem: problem of the last `poll`; empty if there was none.

    Raises:
        ConfigError: an address, or the keys, are invalid.
    """

    def __init__(self, addresses: Sequence[str], seconds: float) -> None:
        self.buckets = BucketMap.even(len(addresses))
        self.problem = ""
        self._addresses = tuple(addresses)
        self._stubs: list[ServedRows] = []
        try:
            for number, address in enumerate(addresses):
                self._stubs.append(rpc.connect(address, ServedRows, peer=self._name(number), timeout=seconds))
        except BaseException:
            self.close()
            raise
        self._states: list[RowServerState | None] = [None] * len(addresses)
        """The last answers."""
        self._answered = [False] * len(addresses)
        """Whether each has answered at the last poll."""

    def __len__(self) -> int:
        return len(self._addresses)

    def close(self) -> None:
        """Closes the connections; calls in progress raise ClosedError."""
        for stub in self._stubs:
            rpc.close(stub)

    def poll(self) -> None:
        """Requests the states of all row servers. Blocks until each has answered, or is late.

        Raises:
            ConfigError: a row server's part does not match its position in the addresses.
        """
        answers = try_all([stub.state for stub in self._stubs], PersiaError)
        problems = [""] * len(answers)
        for number, answer in enumerate(answers):
            self._answered[number] = False
            if isinstance(answer, ClosedError):
                raise answer
            if isinstance(answer, PersiaError):
                problems[number] = answer.message
                continue
            if (answer.part, answer.parts) != (number, len(self)):
                raise ConfigError(
                    f"The row server at {self._addresses[number]} has part {answer.part}/{answer.parts}, and is given "
                    f"as part {number}/{len(self)}; give the addresses of all parts, in their order.",
                    field="rows",
                )
            self._states[number], self._answered[number] = answer, True
            if answer.problem:
                problems[number] = f"{self._name(number)} at {self._addresses[number]}: {answer.problem}"
        self.problem = next(filter(None, problems), "")

    def contained(self, run: str) -> int | None:
        """Returns the global steps that all rows of an epoch contain; None unless all row servers have answered."""
        epochs = self.epochs(run)
        complete = len(epochs) == len(self) and all(self._answered)
        return min(epoch.step for epoch in epochs.values()) if complete else None

    def epochs(self, run: str) -> dict[int, ServedEpoch]:
        """Returns the last state of an epoch at each row server that has it, by part."""
        states = [state for state in self._states if state is not None]
        return {state.part: epoch for state in states for epoch in state.epochs if epoch.run == run}

    def lookup(
        self, run: str, step: int, dims: Mapping[str, int], parts: Sequence[Packed[np.uint64]]
    ) -> list[FoundRows | None]:
        """Looks up the ids of each part. Blocks until each row server has answered, or is late.

        Args:
            run: identifier of the epoch.
            step: step that the rows must contain.
            dims: dimensions by table.
            parts: ids by table, for each row server.

        Returns:
            The answer of each row server; None for parts without ids, whose servers are not called.

        Raises:
            DeadlineError: a row server is late; the error names it.
            PublishError: a row server does not have these rows.
        """
        requested = [number for number, ids in enumerate(parts) if len(ids.buffer)]
        calls: list[Callable[[], FoundRows]] = [
            functools.partial(self._stubs[number].lookup, RowsVersion(number, len(self), run, step), parts[number])
            for number in requested
        ]
        result: list[FoundRows | None] = [None] * len(parts)
        for number, answer in zip(requested, try_all(calls, PersiaError), strict=True):
            if isinstance(answer, PersiaError):
                self._refused(number, answer)
            ids, widths = parts[number], [dims[name] for name in parts[number].names]
            for received, expected_widths in ((answer.found, None), (answer.rows, widths)):
                if (received.names, received.counts, received.widths) != (ids.names, ids.counts, expected_widths):
                    self._refused(number, PublishError("Its answer has other rows than requested."))
            result[number] = answer
        return result

    def _refused(self, number: int, error: PersiaError) -> NoReturn:
        if isinstance(error, (DeadlineError, ClosedError)):
            raise error  # It names the row server.
        name, address = self._name(number), self._addresses[number]
        raise PublishError(
            f"{name} at {address} cannot answer: {error.message}", part=number, address=address
        ) from error

    def _name(self, number: int) -> str:
        return f"row server {number}/{len(self._addresses)}"


class RemoteEpoch:
    """An epoch of the log whose rows are at row servers.

    Args:
        servers: the row servers.
        run: random identifier of the epoch.
        dims: dimensions of the tables, by name.
    """

    def __init__(self, servers: RowServers, run: str, dims: Mapping[str, int]) -> None:
        self._servers = servers
        self._run = run
        self._dims = dims

    @property
    def buckets(self) -> BucketMap:
        """The row server of each bucket of ids."""
        return self._servers.buckets

    def contained(self) -> int | None:
        """See `RowServers.contained`."""
        return self._servers.contained(self._run)

    def source(self, step: int) -> RemoteRows:
        """Returns the rows that contain a step."""
        return RemoteRows(self._servers, self._run, step, self._dims)


@dataclass(frozen=True)
class RemoteRows:
    """Rows at row servers, of one epoch.

    Args:
        servers: the row servers.
        run: random identifier of the epoch.
        step: global step of the network, which the rows must contain.
        dims: dimensions of the tables, by name.
    """

    servers: RowServers
    run: str
    step: int
    dims: Mapping[str, int] = field(compare=False)

    @property
    def buckets(self) -> BucketMap:
        """See `RowLookup`."""
        return self.servers.buckets

    @property
    def whole(self) -> Rows | None:
        """See `RowLookup`."""
        return None

    def read(self, ids: Packed[np.uint64], bounds: Int64Array, rows: Packed[np.float32]) -> None:
        """See `RowLookup`."""
        parts = [batching.take_part(ids, bounds, number) for number in range(len(self.servers))]
        for number, answer in enumerate(self.servers.lookup(self.run, self.step, self.dims, parts)):
            if answer is not None:
                batching.put_part(rows, bounds, number, answer.rows.buffer)

    def lookup(self, ids: Packed[np.uint64]) -> FoundRows:
        """See `RowLookup`."""
        owners = {name: batching.owners(name, table_ids, self.buckets) for name, table_ids in ids.items()}
        parts = [
            Packed.of({name: table_ids[owners[name] == number] for name, table_ids in ids.items()}, np.uint64)
            for number in range(len(self.servers))
        ]
        widths = [self.dims[name] for name in ids.names]
        total = sum(count * width for count, width in zip(ids.counts, widths, strict=True))
        found = Packed(ids.names, ids.counts, np.zeros(len(ids.buffer), np.bool_))
        rows = Packed(ids.names, ids.counts, np.zeros(total, np.float32), widths)
        for number, answer in enumerate(self.servers.lookup(self.run, self.step, self.dims, parts)):
            if answer is None:
                continue
            for name in ids.names:
                places = owners[name] == number
                found[name][places], rows[name][places] = answer.found[name], answer.rows[name]
        return FoundRows(found, rows)

    def steps(self) -> dict[int, int]:
        """See `RowLookup`."""
        return {part: epoch.step for part, epoch in self.servers.epochs(self.run).items()}

    def time(self) -> float:
        """See `RowLookup`."""
        return min((epoch.time for epoch in self.servers.epochs(self.run).values()), default=-math.inf)

    def __len__(self) -> int:
        return sum(epoch.rows for epoch in self.servers.epochs(self.run).values())
