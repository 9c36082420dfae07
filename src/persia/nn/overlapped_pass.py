"""Looks rows up and pushes their gradients in the training thread, while a device computes (docs/decisions/0039).

A device overlaps with the thread that launches its work: once the kernels of a step are launched, the thread has time
for the rows of other steps. Besides it only the thread that reads batches takes the interpreter.
"""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol

from persia.nn.inline_pass import InlinePass
from persia.nn.pass_threads import PassSteps
from persia.nn.prepared import PreparedBatch

__all__ = ["MOST_IN_FLIGHT", "InFlight", "OverlappedPass", "OverlappedSteps"]

MOST_IN_FLIGHT = 1
"""Maximum number of steps whose gradients are not applied at a lookup: the one that the device computes meanwhile."""


class InFlight(NamedTuple):
    """How many steps may be in flight, that is, without applied gradients.

    Attributes:
        at_lookup: when the rows of the next batch are looked up.
        at_use: when the network gets them.
    """

    at_lookup: int
    at_use: int


class OverlappedSteps(PassSteps, Protocol):
    """Steps of a pass that also say how far the training thread may run ahead of the device."""

    def in_flight(self) -> InFlight:
        """Returns how many steps may be in flight at the next lookup, and at the use of its batch."""


class OverlappedPass(InlinePass):
    """Runs a pass over a loader without threads that look up or push, next to a device. For the training thread.

    The draw of batch s + 1 comes when forward and backward pass of step s are launched. With staleness, it

    1. pushes the gradients of step s - 1, which are on the host, or will be before the device begins with step s;
    2. looks up batch s + 1, while the device computes step s. Its rows lack that step only.

    So the device has the next step before it has finished this one. Without staleness, as in `Sync`, it

    1. finds the rows of batch s + 1, while the device computes step s;
    2. waits for the gradients of step s, and pushes them;
    3. reads the rows again that this push has changed.

    The order does not depend on any time, and so neither do the bits: they are those of `Sync`, or those of `Hybrid(1)`
    if each lookup comes just before the push of the step before.

    It takes the arguments of an `InlinePass`; its steps also say how many of them may be in flight.
    """

    _steps: OverlappedSteps

    def draw(self) -> PreparedBatch:
        """Returns the next batch; see `InlinePass.draw`."""
        began = time.monotonic()
        at_lookup, at_use = self._steps.in_flight()
        self._push_until(at_lookup)
        if self._endless and not self._reading.ready:
            self._push_until(0)  # Those who read rows need not wait for a batch that may never come.
        pushed = time.monotonic()
        batch = self._read()
        try:
            prepared, make_ready = self._look_up(batch)
        except BaseException as error:
            self._name_batch(error)
            raise
        looked_up = time.monotonic()
        self._push_until(at_use)
        try:
            make_ready()
        except BaseException as error:
            self._name_batch(error)
            raise
        self.number += 1
        if at_use:
            self._steps.drawn(0.0, inline=False)  # What the thread waited for is the device, which does not idle.
        else:
            self._steps.drawn(-(pushed - began) - (time.monotonic() - looked_up), inline=True)
        return prepared
