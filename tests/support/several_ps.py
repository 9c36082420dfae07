"""Several embedding PSs in this process."""

from persia.ps import EmbeddingServer
from persia.services import Connection
from persia.worker import Worker


class Several:
    """A cluster of several PSs in this process."""

    def __init__(self, count):
        self.count = count

    def connect(self, schema, optimizer, mode, seed):
        servers = [EmbeddingServer(schema.resolved_tables(), optimizer, mode, seed, 1) for _ in range(self.count)]
        return Connection(Worker(schema, servers), servers)
