"""The members of each role: directory, routing, failover, and the silent NN workers of a group."""

from persia.membership.data_loaders import DataLoaders, registered_batches
from persia.membership.directory import UNREACHABLE, Directory, Roster, ServingMember
from persia.membership.embedding_workers import EmbeddingWorkers
from persia.membership.listener import Listener, await_members

__all__ = [
    "UNREACHABLE",
    "DataLoaders",
    "Directory",
    "EmbeddingWorkers",
    "Listener",
    "Roster",
    "ServingMember",
    "await_members",
    "registered_batches",
]
