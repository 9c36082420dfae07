"""Configuration of an embedding PS, beside tables and mode."""

from __future__ import annotations

import msgspec

__all__ = ["ServerOptions"]


class ServerOptions(msgspec.Struct, frozen=True):
    """Whose gradients make a step, and where the rows are.

    Args:
        nn_workers: how many NN workers push.
        timeout: seconds that a push waits for those of the others, and a lookup for room for new rows.
        regions: directory of this PS alone for rows that shall outlive its process, such as
            "/dev/shm/persia-example/ps-0"; None keeps them in its memory.
        neighbours: how many PSs of the same tables, this one included, share the memory for regions.
    """

    nn_workers: int = 1
    timeout: float = 600.0
    regions: str | None = None
    neighbours: int = 1
