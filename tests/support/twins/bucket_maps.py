"""The slow, readable twin of the changes of `persia.types.BucketMap`: the PS of each bucket, as a list."""

from __future__ import annotations

BUCKETS = 4096


def even(servers: int) -> list[int]:
    """Twin of `BucketMap.even`."""
    return [bucket * servers // BUCKETS for bucket in range(BUCKETS)]


def moved(owners: list[int], servers: int) -> list[int]:
    """Twin of `BucketMap.moved`."""
    count = {server: owners.count(server) for server in range(servers)}
    larger = sorted(count, key=lambda server: (-count[server], server))[: BUCKETS % servers]
    return _divided(owners, [BUCKETS // servers + (server in larger) for server in range(servers)])


def emptied(owners: list[int], servers: int, leaving: set[int]) -> list[int]:
    """Twin of `BucketMap.emptied`."""
    quotas = [0 if server in leaving else owners.count(server) for server in range(servers)]
    while sum(quotas) < BUCKETS:
        fewest = min((server for server in range(servers) if server not in leaving), key=lambda s: (quotas[s], s))
        quotas[fewest] += 1
    return _divided(owners, quotas)


def _divided(owners: list[int], quotas: list[int]) -> list[int]:
    """Each PS keeps its first buckets up to its quota; the others go to the PSs below theirs, in order."""
    left = list(quotas)
    result: list[int | None] = []
    for owner in owners:
        keeps = owner < len(left) and left[owner] > 0
        if keeps:
            left[owner] -= 1
        result.append(owner if keeps else None)
    receivers = (server for server, missing in enumerate(left) for _ in range(missing))
    return [next(receivers) if owner is None else owner for owner in result]
