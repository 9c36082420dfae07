"""Takes the gradients of a batch off the network when its backward pass has ended."""

from __future__ import annotations

from collections.abc import Callable

import torch

from persia.nn.pooling import PooledAhead
from persia.nn.prepared import PreparedBatch, loss_scale
from persia.nn.step_timings import StepTimings
from persia.nn.transfer import Encoded, Transfer

__all__ = ["GradientCollector"]


class GradientCollector:
    """Collects the gradients of batches, in the training thread.

    Args:
        transfer: brings them to the host.
        scaler: of the loss; gradients are unscaled. None if losses are not scaled.
        device: of the network.
        accumulation_steps: number of batches per step.

    Attributes:
        scaler: scaler of the loss, which may be replaced.
        timings: receives the compute time of each batch; None if nobody asks.
    """

    def __init__(
        self,
        transfer: Transfer,
        scaler: torch.amp.GradScaler | None,
        device: torch.device,
        accumulation_steps: int,
    ) -> None:
        self.scaler = scaler
        self.timings: StepTimings | None = None
        self._transfer = transfer
        self._device = device
        self._accumulation_steps = accumulation_steps

    def take(self, batch: PreparedBatch, unpushed: int) -> Callable[[], Encoded]:
        """Takes the gradients off a batch. Does not wait for the device.

        Args:
            batch: after its backward pass.
            unpushed: number of pushes that wait in memory.

        Returns:
            A function that waits until they are on the host, and returns the gradients of its rows.
        """
        # Sums take less memory than the gradients of features.
        crowded = isinstance(batch.pooled, PooledAhead) and not batch.pooled.fits(unpushed)
        gradients = self._transfer.gradients_of(
            batch,
            loss_scale(self.scaler, self._device),
            batch.compressed,
            sum_now=self._accumulation_steps > 1 or crowded,
        )
        return gradients if self.timings is None else self._timed(self.timings, batch.began, gradients)

    def _timed(self, timings: StepTimings, began: float, gradients: Callable[[], Encoded]) -> Callable[[], Encoded]:
        """Adds the compute time of a batch. A GPU has computed it only once its gradients are on the host."""
        if self._device.type != "cuda":
            timings.add(began)
            return gradients

        def wait() -> Encoded:
            encoded = gradients()
            timings.add(began)
            return encoded

        return wait
