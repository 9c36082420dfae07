"""The training program: first yesterday's clicks from a file, then the stream, until SIGTERM.

python train.py YESTERDAY.parquet BOOTSTRAP TOPIC LOG [--ps N]
"""

from __future__ import annotations

import argparse
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import news

import persia
from persia.errors import PersiaError
from persia.publish import PublishOptions

READ_SECONDS = 0.5
"""Between two lines about what is read."""


def rows_read(stream: Any, cluster: persia.cluster.Ray | None) -> int:
    """Returns how many clicks of the stream were read."""
    if cluster is None:
        return sum(int(metric.value) for metric in stream.observe() if metric.name == "stream_rows")
    statistics = cluster.statistics()
    return sum(int(statistics[name].get("rows", 0)) for name in statistics if name.startswith("data_loader"))


@contextlib.contextmanager
def reporting(stream: Any, cluster: persia.cluster.Ray | None) -> Iterator[None]:
    """Prints how many clicks were read, for the program that sends them, until the end of the block."""
    over = threading.Event()

    def report() -> None:
        while not over.wait(READ_SECONDS):
            with contextlib.suppress(PersiaError):  # A process restarts.
                print("read", rows_read(stream, cluster), flush=True)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(10)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("yesterday", "bootstrap", "topic", "log"):
        parser.add_argument(name)
    parser.add_argument("--ps", type=int, default=0, help="PSs on Ray; 0 for all roles in this process")
    parser.add_argument("--seconds", type=float, default=2.0, help="between two increments")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as used:
        cluster = None
        if arguments.ps:
            cluster = used.enter_context(contextlib.closing(persia.cluster.Ray(ps=arguments.ps)))
        publish = PublishOptions(arguments.log, seconds=arguments.seconds)
        trainer = news.trainer(cluster=cluster, publish=publish)
        done = trainer.fit(persia.data.parquet(arguments.yesterday, news.schema(), 1024))
        print(
            f"trained {done.rows:,} clicks of the days before, progressive AUC {done.progressive.auc:.4f}", flush=True
        )
        stream = persia.data.kafka(
            arguments.topic, news.schema(), 1024, bootstrap=arguments.bootstrap, values="arrow", linger=0.2
        )
        with reporting(stream, cluster):
            trainer.fit(stream)


if __name__ == "__main__":
    with contextlib.suppress(SystemExit, KeyboardInterrupt):  # SIGTERM ends `fit` after its step.
        main()
