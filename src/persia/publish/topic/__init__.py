"""A log of changes in a topic of Kafka, with files as messages. docs/reference/changes.md specifies the format."""

from persia.publish.topic.topic_storage import TopicStorage

__all__ = ["TopicStorage"]
