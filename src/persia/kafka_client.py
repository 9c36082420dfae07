"""Creates Kafka clients of confluent-kafka, which is imported on first use."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from persia.errors import ConfigError, MissingExtraError

__all__ = ["is_transient", "make_client", "require_library"]

QUIET = {"log_level": 2, "log.connection.close": False}
"""Users of a client report a lost connection once; librdkafka would report each attempt."""


def require_library() -> None:
    """Raises MissingExtraError if confluent-kafka is not installed."""
    try:
        import confluent_kafka  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            'Kafka needs confluent-kafka: pip install "persia-recsys[kafka]".', extra="kafka"
        ) from error


def make_client(kind: str, bootstrap: str, settings: Mapping[str, Any], log: logging.Logger) -> Any:
    """Returns a `Consumer` or a `Producer` of confluent-kafka. Does not wait for a connection.

    Args:
        kind: name of the class.
        bootstrap: addresses of some brokers, `host:port,host:port`.
        settings: settings of librdkafka.
        log: receives its messages.

    Raises:
        ConfigError: librdkafka rejects a setting.
    """
    import confluent_kafka

    try:
        return getattr(confluent_kafka, kind)({"bootstrap.servers": bootstrap, **QUIET, **settings}, logger=log)
    except (confluent_kafka.KafkaException, TypeError, ValueError) as error:
        raise ConfigError(f"Kafka at {bootstrap}: {error}; correct the settings.", bootstrap=bootstrap) from error


def is_transient(error: Any) -> bool:
    """Returns whether an error may be transient: brokers out of reach, a leader election in progress.

    `KafkaError.retriable` cannot be used: it is set only for errors of transactions.
    """
    from confluent_kafka import KafkaError

    return error.code() in (
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TRANSPORT,
        KafkaError._TIMED_OUT,
        KafkaError._TIMED_OUT_QUEUE,
        KafkaError._RESOLVE,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.BROKER_NOT_AVAILABLE,
        KafkaError.REPLICA_NOT_AVAILABLE,
        KafkaError.NETWORK_EXCEPTION,
        KafkaError.NOT_ENOUGH_REPLICAS,
        KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        KafkaError.KAFKA_STORAGE_ERROR,
        KafkaError.LISTENER_NOT_FOUND,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError.THROTTLING_QUOTA_EXCEEDED,
    )
