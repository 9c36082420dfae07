"""A request of the calling side, and what can become of it."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from persia.errors import ClosedError, DeadlineError, PeerRestartedError, PersiaError, WireError
from persia.rpc.messages import Body, Kind, Message

__all__ = ["Call", "Peer"]


class Call:
    """One request, until its reply is there. Its fields belong to the connection.

    Attributes:
        reply: what came.
        error: what happened instead.
    """

    __slots__ = (
        "body", "error", "expires", "gate", "kind", "method", "number", "once", "reply", "seconds", "sent",
    )  # fmt: skip

    def __init__(self, kind: Kind, method: str, body: Body, seconds: float, once: bool) -> None:
        self.kind = kind
        self.method = method
        self.body = body
        self.seconds = seconds
        self.expires = time.monotonic() + seconds
        self.once = once
        self.number = 0
        self.sent = False
        self.reply: Message | None = None
        self.error: PersiaError | None = None
        # Held while its thread sleeps; made when it first has to.
        self.gate: threading.Lock | None = None

    def over(self) -> bool:
        """Whether there is a reply or an error."""
        return self.reply is not None or self.error is not None


class Peer(NamedTuple):
    """Whom is called: the errors that name it.

    Attributes:
        name: such as "embedding PS 2".
        address: where it listens.
    """

    name: str
    address: str

    def closed(self, call: Call) -> ClosedError:
        """The stub has been closed."""
        return ClosedError(
            f"{call.method}: the stub of {self.name} at {self.address} is closed; connect again.",
            peer=self.name, address=self.address, operation=call.method,
        )  # fmt: skip

    def forked(self, process: int) -> ClosedError:
        """The stub is of another process."""
        return ClosedError(
            f"The stub of {self.name} at {self.address} was made in process {process}, and this is a fork of it; "
            "connect again here, or start processes with the spawn method.",
            peer=self.name, address=self.address,
        )  # fmt: skip

    def late(self, call: Call, state: str) -> DeadlineError:
        """No reply came in time; `state` is what is known of the connection."""
        seconds = round(call.seconds, 3)
        return DeadlineError(
            f"{self.name} at {self.address} is late: {call.method} took more than {seconds:g} s; {state}. "
            "Check that it runs, or allow more time.",
            peer=self.name, address=self.address, operation=call.method, seconds=seconds,
        )  # fmt: skip

    def restarted(self, call: Call) -> PeerRestartedError:
        """The connection was lost, and the call must not be repeated."""
        return PeerRestartedError(
            f"{self.name} at {self.address}: the connection was lost during {call.method}, which must not be repeated; "
            "it ran once or not at all. Find out which before you call it again.",
            peer=self.name, address=self.address, operation=call.method,
        )  # fmt: skip

    def unreadable(self, call: Call, error: WireError) -> WireError:
        """The reply breaks a limit."""
        return WireError(
            f"{self.name} at {self.address} answered {call.method} with what cannot be read: {error.message}",
            peer=self.name, address=self.address, operation=call.method,
        )  # fmt: skip
