"""Several embedding PSs in this process."""

from persia.ps import EmbeddingServer, ServerOptions
from persia.ps.shares import divide_here
from persia.services import Connection
from persia.worker import Worker


class Several:
    """A cluster of several PSs in this process."""

    def __init__(self, count):
        self.count = count

    def connect(self, schema, optimizer, mode, seed):
        tables = schema.resolved_tables()
        servers = [
            EmbeddingServer(tables, optimizer, mode, seed, 1, ServerOptions(**shares._asdict()))
            for shares in divide_here(tables, optimizer, self.count)
        ]
        return Connection(Worker(schema, servers), servers)
