"""A Kafka broker as a separate process that can be paused and can refuse connections.

python -m benchmarks.exactly_once_broker    (librdkafka's mock cluster, until its standard input ends)

It prints its address. The words `down` and `up` on its standard input make it refuse connections, and take them again.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from types import TracebackType

import confluent_kafka
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

PARTITIONS = 4
"""Partitions of a topic; the mock cluster has no other number."""


class Broker:
    """The broker of a run. Use it as a context manager.

    Args:
        bootstrap: addresses of brokers that run already, which are never disturbed; None to start one.
    """

    def __init__(self, bootstrap: str | None = None) -> None:
        self._process: subprocess.Popen[str] | None = None
        if bootstrap is None:
            command = [sys.executable, "-m", "benchmarks.exactly_once_broker"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert self._process.stdout is not None
            bootstrap = self._process.stdout.readline().strip()
            if not bootstrap:
                raise RuntimeError("The broker did not start; see its messages above.")
        self.bootstrap = bootstrap

    @property
    def can_fail(self) -> bool:
        """Whether it can be paused, and refuse connections."""
        return self._process is not None

    def create(self) -> str:
        """Creates a topic, and returns its name."""
        topic = f"clicks-{uuid.uuid4().hex[:8]}"
        settings = {"bootstrap.servers": self.bootstrap, "log_level": 2}
        if not self.can_fail:
            for done in AdminClient(settings).create_topics([NewTopic(topic, num_partitions=PARTITIONS)]).values():
                done.result(timeout=30)
        Producer(settings).list_topics(topic, timeout=30)  # The mock cluster creates it now.
        return topic

    def pause(self) -> None:
        """Stops the process: connections stay open, and nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continues after `pause`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def refuse(self) -> None:
        """Ends all connections, and refuses new ones."""
        self._say("down")

    def accept(self) -> None:
        """Takes connections again."""
        self._say("up")

    def _say(self, word: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def __enter__(self) -> Broker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


def main() -> None:
    """Runs the mock cluster by the test functions of librdkafka, which its Python package does not have."""
    (path,) = (Path(confluent_kafka.__file__).parents[1] / "confluent_kafka.libs").glob("librdkafka*")
    library = ctypes.CDLL(str(path))
    library.rd_kafka_conf_new.restype = library.rd_kafka_new.restype = ctypes.c_void_p
    library.rd_kafka_mock_cluster_new.restype = ctypes.c_void_p
    library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
    conf = ctypes.c_void_p(library.rd_kafka_conf_new())
    library.rd_kafka_conf_set(conf, b"log_level", b"2", None, ctypes.c_size_t(0))
    producer = 0
    handle = library.rd_kafka_new(producer, conf, None, ctypes.c_size_t(0))
    cluster = ctypes.c_void_p(library.rd_kafka_mock_cluster_new(ctypes.c_void_p(handle), 1))
    print(library.rd_kafka_mock_cluster_bootstraps(cluster).decode(), flush=True)
    changes = {"down": library.rd_kafka_mock_broker_set_down, "up": library.rd_kafka_mock_broker_set_up}
    for line in sys.stdin:
        changes[line.strip()](cluster, 1)


if __name__ == "__main__":
    main()
