"""Several embedding PSs in this process."""

from persia.ps import EmbeddingServer, ServerOptions
from persia.ps.shares import divide_here
from persia.services import Connection
from persia.types import BucketMap
from persia.worker import Worker


def several_servers(count, tables, optimizer, mode, seed=3, **options):
    """Returns PSs that share the ids by the first map, each with all the options."""
    shared = {"buckets": BucketMap.even(count)} | options
    return [
        EmbeddingServer(tables, optimizer, mode, seed, 1, ServerOptions(**shared, rank=rank)) for rank in range(count)
    ]


class Several:
    """A cluster of several PSs in this process, which share the ids by a map; by default the first one."""

    def __init__(self, count, buckets=None):
        self.count = count
        self.buckets = buckets or BucketMap.even(count)

    def connect(self, schema, optimizer, mode, seed):
        tables = schema.resolved_tables()
        servers = [
            EmbeddingServer(
                tables, optimizer, mode, seed, 1, ServerOptions(**shares._asdict(), buckets=self.buckets, rank=rank)
            )
            for rank, shares in enumerate(divide_here(tables, optimizer, self.count))
        ]
        return Connection(Worker(schema, servers), servers)
