"""The log of changes: the changes of rows and network in training, for serving.

Each embedding PS publishes its rows with a `Publisher`, NN worker 0 the network. `follow` reads the log, and `Replica`
is the simplest reader. docs/guide/publishing.md explains it, docs/reference/changes.md is the format.
"""

from persia.publish.follower import Change, Changes, Follower, NetworkUpdate, RowsUpdate, follow
from persia.publish.format import Description
from persia.publish.from_checkpoint import publish_checkpoint
from persia.publish.publisher import Publisher
from persia.publish.replica import Replica
from persia.types.publishing import ModelDescription, PublishOptions, PublishOrder, PublishStatus

__all__ = [
    "Change",
    "Changes",
    "Description",
    "Follower",
    "ModelDescription",
    "NetworkUpdate",
    "PublishOptions",
    "PublishOrder",
    "PublishStatus",
    "Publisher",
    "Replica",
    "RowsUpdate",
    "follow",
    "publish_checkpoint",
]
