"""A log of changes in a topic of Kafka: files as messages. docs/reference/changes.md is the format."""

from persia.publish.topic.storage import TopicStorage

__all__ = ["TopicStorage"]
