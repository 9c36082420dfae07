"""A request of the calling side, and its possible errors."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from persia.errors import ClosedError, DeadlineError, PeerRestartedError, PersiaError, WireError
from persia.rpc.messages import Body, Kind, Message

__all__ = ["Call", "Peer"]


class Call:
    """One request and its outcome. The connection owns its fields.

    Attributes:
        reply: the reply, if it has arrived.
        error: the error, if the call failed.
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
    """The called process; creates errors that name it.

    Attributes:
        name: name such as "embedding PS 2".
        address: address on which it listens.
    """

    name: str
    address: str

    def closed(self, call: Call) -> ClosedError:
        """Makes the error for a closed stub."""
        return ClosedError(
            f"{call.method}: the stub of {self.name} at {self.address} is closed; connect again.",
            peer=self.name, address=self.address, operation=call.method,
        )  # fmt: skip

    def forked(self, process: int) -> ClosedError:
        """Makes the error for a stub of another process."""
        return ClosedError(
            f"The stub of {self.name} at {self.address} was made in process {process}, and this is a fork of it; "
            "connect again here, or start processes with the spawn method.",
            peer=self.name, address=self.address,
        )  # fmt: skip

    def late(self, call: Call, state: str) -> DeadlineError:
        """Makes the error for a reply that did not arrive in time; `state` describes the connection."""
        seconds = round(call.seconds, 3)
        return DeadlineError(
            f"{self.name} at {self.address} is late: {call.method} took more than {seconds:g} s; {state}. "
            "Check that it runs, or allow more time.",
            peer=self.name, address=self.address, operation=call.method, seconds=seconds,
        )  # fmt: skip

    def restarted(self, call: Call) -> PeerRestartedError:
        """Makes the error for a lost connection during a call that must not be repeated."""
        return PeerRestartedError(
            f"{self.name} at {self.address}: the connection was lost during {call.method}, which must not be repeated; "
            "it ran once or not at all. Find out which before you call it again.",
            peer=self.name, address=self.address, operation=call.method,
        )  # fmt: skip

    def unreadable(self, call: Call, error: WireError) -> WireError:
        """Makes the error for a reply that exceeds a limit."""
        return WireError(
            f"{self.name} at {self.address} answered {call.method} with what cannot be read: {error.message}",
            peer=self.name, address=self.address, operation=call.method,
        )  # fmt: skip
