"""Local all-reduce with the pairing of SwarmSGD, for comparisons in virtual time: a mode that no trainer runs.

"Asynchronous Decentralized SGD with Quantized and Local Updates", Nadiradze et al., NeurIPS 2021. The GBA paper
(arXiv 2205.11048, section 3.2) has runs of it with Adam.
"""

from __future__ import annotations

from persia.checks import check_integer, plain_fields
from persia.errors import ConfigError
from persia.modes.base import Arrival, Asynchronous, Decision, check_whole, hold_until_full

__all__ = ["LocalAllReduce"]


class LocalAllReduce(Asynchronous, frozen=True, tag="local_all_reduce"):
    """Each NN worker trains its own network, and averages it with the network of a random other one, without waiting.

    After `local_steps` of its own batches, an NN worker draws a partner, and both continue from the mean of their
    parameters. A batch that the partner is computing meanwhile changes this mean when it is done. Optimizer states stay
    with their NN worker. Rows are on PSs, which apply any `batches` gradients together.

    Only :class:`persia.replay.virtual.VirtualTraining` runs it: there is no network between NN workers here that
    averages in pairs. A trainer refuses it.

    Args:
        batches: number of gradients of rows that a PS applies together: 1 on arrival, the number of NN workers for
            the global batch of `Sync`.
        local_steps: own batches between two averages.
        seed: seed of the pairing.
    """

    batches: int = 1
    local_steps: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        plain_fields(self)
        check_whole("LocalAllReduce", "batches", self.batches, 1, "gradients of rows that are applied together")
        check_whole("LocalAllReduce", "local_steps", self.local_steps, 1, "own batches between two averages")
        check_integer("LocalAllReduce.seed", self.seed, 0)

    @property
    def refresh(self) -> bool:
        """Raises ConfigError: only an NN worker of a real run asks."""
        raise ConfigError(
            "LocalAllReduce runs in virtual time only (persia.replay.virtual.VirtualTraining). Train with one of "
            "persia.modes, such as persia.modes.Gba(rows).",
            field="mode",
        )

    def group(self, nn_workers: int, local_batch: int) -> int:
        """Returns `batches`."""
        return self.batches

    def arrive(self, arrival: Arrival) -> Decision:
        """Holds gradients of rows until there are `batches`."""
        return hold_until_full(arrival)
