"""Checks that embedding tables fit into the memory and onto the disk of PSs; errors say what fits, and what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

from persia.errors import ConfigError
from persia.memory import Memory
from persia.ps.sizes import MIN_SHARE, TableSize, least_bytes, needed_bytes, text_of_bytes
from persia.telemetry.logs import get_logger

__all__ = ["NAMED", "check_free", "check_share", "fits_disk", "too_large", "too_little"]

LOG = get_logger("persia.ps")

NAMED = 4
"""Maximum number of tables or PSs in a message."""

LITTLE = 256 << 20
"""Free memory below which a PS warns even if its share fits."""

ATTEMPTS = 100
"""Maximum attempts to find the number of PSs that the tables fit into."""

DISK_RESERVE = Fraction(3, 2)
"""Ratio of bytes on disk to bytes of rows there: up to a third of the records are waiting to be overwritten."""


def check_share(shares: Sequence[TableSize], memory: Memory) -> None:
    """Checks that the share of a PS fits into the memory of its host.

    Args:
        shares: shares of this PS.
        memory: part of the memory of this host that the PS may use.

    Raises:
        ConfigError: the share does not fit. `divide` was given the memory of another host.
    """
    needed = sum(size.bytes for size in shares)
    # Least shares and whole rows may exceed the memory that `divide` was given.
    if needed > memory.total + least_bytes(shares) + sum(size.row_bytes for size in shares):
        rows = ", ".join(f"{size.rows:,} rows of {size.name!r}" for size in shares[:NAMED])
        more = f" and of {len(shares) - NAMED} other tables" if len(shares) > NAMED else ""
        raise ConfigError(
            f"This host has {text_of_bytes(memory.total)} for an embedding PS ({memory.limit}), but its share of the "
            f"tables needs {text_of_bytes(needed)}: {rows}{more}. Lower `capacity`, place the PSs on hosts with more "
            "memory, or if the tables will not be full, set `overcommit`.",
            field="capacity",
            wanted=needed,
            memory=memory.total,
        )


def check_free(shares: Sequence[TableSize], memory: Memory, place: str | None) -> None:
    """Warns if the share of a PS does not fit into the memory that is free now, as later rows may not fit.

    Args:
        shares: shares of this PS.
        memory: part of the memory of this host that the PS may use.
        place: directory of its regions; None if rows are in the memory of the process.
    """
    needed = sum(size.bytes for size in shares)
    where = place or "this host"
    free = f"{where} has {text_of_bytes(memory.free)} free"
    fails = "lookups of new ids fail" if place else "the process is killed"
    remedy = "Free memory, lower the capacity of tables, or use more PSs on other hosts"
    if place:
        remedy += (
            "; or enlarge it (as root: `mount -o remount,size=... /dev/shm`; in a container: `--shm-size`), or set "
            "`regions` to another directory"
        )
    if needed > memory.free:
        LOG.warning(
            "%s for an embedding PS, but its tables may grow to %s: when it is full, %s. %s.",
            free, text_of_bytes(needed), fails, remedy,
        )  # fmt: skip
    elif place and memory.free < LITTLE:
        LOG.warning("%s: when it is full, %s. %s.", free, fails, remedy)
    else:
        LOG.info("%s for an embedding PS, %s declared", free, text_of_bytes(needed))


def fits_disk(sizes: Sequence[TableSize], record_bytes: Mapping[str, int], free: int, place: str) -> bool:
    """Returns whether the rows that a PS may have on a disk fit into its free space; warns if they do not.

    Args:
        sizes: shares of this PS, of tables with rows on this disk and a declared capacity.
        record_bytes: bytes of a row on disk, by table.
        free: bytes of free space that this PS may use.
        place: directory, for the message.
    """
    needed = math.floor(sum((size.capacity or 0) * record_bytes[size.name] for size in sizes) * DISK_RESERVE)
    if needed > free:
        LOG.warning(
            "%s has %s free for an embedding PS, but its rows on disk may take %s: %s. When it is full, training "
            "pauses. Free space there, set `spill` to a directory on a larger disk, or lower `capacity`.",
            place, text_of_bytes(free), text_of_bytes(needed),
            ", ".join(f"{size.capacity:,} rows of {size.name!r}" for size in sizes[:NAMED]),
        )  # fmt: skip
    return needed <= free


def too_little(sizes: Sequence[TableSize], rank: int, memory: Memory, least: int) -> ConfigError:
    """Returns the error for a PS whose memory is too small for the least shares and the index of rows on disk."""
    cold = least - least_bytes(sizes)
    index = f", and {text_of_bytes(cold)} for the index of rows on disk" if cold else ""
    return ConfigError(
        f"Embedding PS {rank} has {text_of_bytes(memory.total)} of memory ({memory.limit}), but each PS needs "
        f"{text_of_bytes(least)}: for up to {MIN_SHARE:,} rows of each of {len(sizes):,} tables, as it owns an equal "
        f"part of the ids{index}. Do one of: place the PSs on hosts with more memory; use fewer PSs for each host; "
        "declare fewer tables; if the tables will not be full, set `overcommit` of the cluster.",
        field="capacity",
        rank=rank,
        wanted=least,
        memory=memory.total,
    )


def too_large(sizes: Sequence[TableSize], memory: Sequence[Memory | None], needed: int, fits: Fraction) -> ConfigError:
    """Returns the error for tables that do not fit; it says what fits and what to change.

    Args:
        sizes: sizes of the tables.
        memory: memory by PS.
        needed: bytes of all shares.
        fits: fraction of the tables above the least shares that fits.
    """
    known = [each for each in memory if each is not None]
    total, least = sum(each.total for each in known), min(known)
    largest = sorted(sizes, key=lambda size: -size.bytes)
    named = [f"{size}" for size in largest[:NAMED]]
    if len(largest) > NAMED:
        others = sum(size.bytes for size in largest[NAMED:])
        named.append(f"{len(largest) - NAMED} other tables = {text_of_bytes(others)}")
    servers = "the embedding PS has" if len(memory) == 1 else f"the {len(memory)} embedding PSs together have"
    limit = "memory_rows" if largest[0].spills else "capacity"
    remedies = [
        f"lower `{limit}`, to {math.floor(largest[0].rows * fits):,} for table {largest[0].name!r} and others alike"
    ]
    if not largest[0].spills:
        remedies.append("set `spill` of the tables, for rows on an SSD")
    if (enough := _enough_servers(sizes, least.total)) is not None:
        remedies.append(f"use {enough} PSs with {text_of_bytes(least.total)} each, on other hosts")
    if "size of" in least.limit:
        remedies.append("enlarge that file system")
    remedies.append(
        "choose a smaller dim, dtype = 'bfloat16', or an optimizer with less state: RowwiseAdagrad has one float a row"
    )
    remedies.append("if the tables will not be full, set `overcommit` of the cluster")
    return ConfigError(
        f"The declared capacity of the tables needs {text_of_bytes(needed)} of memory, and {servers} "
        f"{text_of_bytes(total)} ({least.limit}). {'; '.join(named)}. So {float(100 * fits):.4g} % of the rows fit. "
        f"Do one of: {'; '.join(remedies)}.",
        field="capacity",
        wanted=needed,
        memory=total,
    )


def _enough_servers(sizes: Sequence[TableSize], memory: int) -> int | None:
    """Returns the least number of PSs with this memory each that the tables fit into; None if no number is enough."""
    count = 1
    for _ in range(ATTEMPTS):  # The needed memory grows with the number, as shares have a least size.
        needed = needed_bytes(sizes, count)
        if needed <= count * memory:
            return count
        if memory <= least_bytes(sizes):
            return None
        count = math.ceil(needed / memory)
    return None
