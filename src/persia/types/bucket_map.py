"""The embedding PS of every id: ids are hashed to fixed buckets, and a map has the PS of each bucket.

docs/decisions/0026-buckets.md has the reasons, docs/reference/protocol.md, section 2, the hash.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from persia.checks import check_integer
from persia.errors import ConfigError, StaleMapError
from persia.types.arrays import Int64Array

__all__ = ["BUCKETS", "BucketMap"]

BUCKETS = 4096
"""Number of buckets, and the maximum number of PSs. The bucket of an id never changes."""


class BucketMap(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """The PS of each bucket. Immutable: a change makes another map, whose version is higher by one.

    Args:
        version: number of changes since the first map of the run.
        servers: number of PSs. A PS may own no bucket: it is empty, or about to leave.
        runs: for each run of consecutive buckets of one PS, in order: the PS, and the number of buckets.

    Raises:
        ConfigError: the runs do not have all buckets, a PS does not exist, or two consecutive runs have the same PS.
    """

    version: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
    servers: Annotated[int, msgspec.Meta(ge=1, le=BUCKETS)]
    runs: Annotated[tuple[tuple[int, int], ...], msgspec.Meta(max_length=BUCKETS)]

    def __post_init__(self) -> None:
        check_integer("servers of a bucket map", self.servers, 1, BUCKETS, field="servers")
        before, total = -1, 0
        for server, count in self.runs:
            if not 0 <= server < self.servers or not 1 <= count <= BUCKETS or server == before:
                raise ConfigError(
                    f"Invalid run of {count} buckets of PS {server} in a bucket map of {self.servers} PSs; expected 1 "
                    f"or more buckets of a PS below {self.servers}, which differs from that of the run before.",
                    field="runs",
                )
            before, total = server, total + count
        if total != BUCKETS:
            raise ConfigError(f"A bucket map has {total} buckets; expected {BUCKETS}.", field="runs")
        vars(self)  # Here, as two threads that make it corrupt memory with CPython 3.11 (python/cpython#97922).

    @classmethod
    def even(cls, servers: int) -> BucketMap:
        """Returns the first map for a number of PSs: PS p owns the p-th of as many equal ranges of buckets.

        Raises:
            ConfigError: the number is not within 1 to `BUCKETS`.
        """
        check_integer("number of embedding PSs", servers, 1, BUCKETS, field="servers")
        return _map_of(0, servers, np.arange(BUCKETS) * servers // BUCKETS)

    @functools.cached_property
    def owners(self) -> NDArray[np.uint16]:
        """The PS of each bucket, uint16 `[BUCKETS]`, read-only."""
        servers, counts = zip(*self.runs, strict=True)
        owners = np.repeat(np.array(servers, np.uint16), counts)
        owners.flags.writeable = False
        return owners

    @property
    def counts(self) -> Int64Array:
        """Number of buckets of each PS, int64 `[servers]`."""
        return np.bincount(self.owners, minlength=self.servers)

    def same_owners(self, other: BucketMap) -> bool:
        """Returns whether each PS owns the same buckets by both maps, which may be of different runs."""
        return (self.servers, self.runs) == (other.servers, other.runs)

    def check(self, version: int) -> None:
        """Checks that ids were routed by this map.

        Args:
            version: version of the map by which the ids were routed.

        Raises:
            StaleMapError: it is another version.
        """
        if version != self.version:
            raise StaleMapError(
                f"Ids were routed to this embedding PS by bucket map {version}, and it has bucket map {self.version}. "
                "Nothing was read or changed; route the ids by the current map, `EmbeddingPS.buckets`.",
                routed=version,
                current=self.version,
            )

    def moved(self, servers: int) -> BucketMap:
        """Returns the next map, for another number of PSs or to balance the PSs.

        The PSs then own equal numbers of buckets, which differ by at most one, and no other map of this kind moves
        fewer buckets. The PSs with the highest numbers leave if there are fewer. This map if nothing has to move.

        Args:
            servers: number of PSs.

        Raises:
            ConfigError: the number is not within 1 to `BUCKETS`.
        """
        check_integer("number of embedding PSs", servers, 1, BUCKETS, field="servers")
        least, more = divmod(BUCKETS, servers)
        counts = np.zeros(servers, np.int64)
        counts[: self.servers] = self.counts[:servers]
        quotas = np.full(servers, least)
        quotas[np.argsort(-counts, kind="stable")[:more]] += 1  # PSs that own more keep one bucket more.
        return self._divided(quotas)

    def emptied(self, leaving: Collection[int]) -> BucketMap:
        """Returns the next map, in which some PSs own no bucket, for example because their hosts go away.

        Only their buckets move, each to a PS that owns the fewest. They keep their numbers: `moved(servers)` gives them
        buckets again. This map if they own none already.

        Args:
            leaving: the PSs.

        Raises:
            ConfigError: a PS does not exist, or no PS would be left.
        """
        for server in leaving:
            check_integer("PS", server, 0, self.servers - 1, field="leaving")
        staying = np.setdiff1d(np.arange(self.servers), list(leaving))
        if not staying.size:
            raise ConfigError(f"Cannot empty all {self.servers} PSs; leave one.", field="leaving")
        quotas = np.zeros(self.servers, np.int64)
        quotas[staying] = self.counts[staying]
        for _ in range(BUCKETS - quotas.sum()):
            quotas[staying[quotas[staying].argmin()]] += 1
        return self._divided(quotas)

    def reassigned(self, bucket: int, server: int) -> BucketMap:
        """Returns the next map, in which one bucket is at another PS. This map if it is there already.

        Raises:
            ConfigError: the bucket or the PS does not exist.
        """
        check_integer("bucket", bucket, 0, BUCKETS - 1)
        check_integer("PS", server, 0, self.servers - 1, field="server")
        owners = self.owners.copy()
        owners[bucket] = server
        return self._next(self.servers, owners)

    def _divided(self, quotas: Int64Array) -> BucketMap:
        """Returns the next map with these numbers of buckets by PS. A PS gives up its last buckets first."""
        owners = self.owners.astype(np.int64)
        kept = np.zeros(BUCKETS, np.bool_)
        for server, quota in enumerate(quotas.tolist()):
            kept[np.flatnonzero(owners == server)[:quota]] = True
        missing = quotas - np.bincount(owners[kept], minlength=len(quotas))
        owners[~kept] = np.repeat(np.arange(len(quotas)), missing)
        return self._next(len(quotas), owners)

    def _next(self, servers: int, owners: NDArray[np.integer]) -> BucketMap:
        unchanged = servers == self.servers and np.array_equal(owners, self.owners)
        return self if unchanged else _map_of(self.version + 1, servers, owners)


def _map_of(version: int, servers: int, owners: NDArray[np.integer]) -> BucketMap:
    starts = np.flatnonzero(np.diff(owners.astype(np.int64), prepend=-1))
    counts = np.diff(starts, append=BUCKETS)
    return BucketMap(version, servers, tuple(zip(owners[starts].tolist(), counts.tolist(), strict=True)))
