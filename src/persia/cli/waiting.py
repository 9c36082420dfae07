"""The commands `persia cluster wait-hosts` and `wait-end`, for scripts that start and stop the hosts of a cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from persia.errors import MissingExtraError

__all__ = ["wait_end", "wait_hosts"]

Timeout = Annotated[float, typer.Option(help="Maximum number of seconds to wait.")]


def wait_hosts(
    count: Annotated[int, typer.Argument(help="Number of hosts, this one included.", min=1, metavar="N")],
    address: Annotated[str, typer.Option(help="Address of Ray. Default: the Ray of this host.")] = "auto",
    timeout: Timeout = 600.0,
) -> None:
    """Wait until N hosts have joined Ray, before a program starts that places its roles on them.

        ray start --head --num-cpus=0 && persia cluster wait-hosts 5 && persia train config.toml

    Exits with status 1 and the addresses of those that have joined, if not all have in time.
    """
    from persia.cluster.ray.waiting import wait_for_hosts

    try:
        wait_for_hosts(count, address, timeout)
    except ImportError as error:
        raise MissingExtraError('It needs Ray: pip install "persia-recsys[ray]".', extra="ray") from error


def wait_end(timeout: Timeout = 600.0) -> None:
    """Wait until no role of a cluster runs on this host, before the host is stopped.

    A run that stops still needs its hosts for its last checkpoint. This command does not stop the run: send SIGTERM to
    the program that trains.
    """
    from persia.cluster.ray.waiting import wait_for_the_end

    wait_for_the_end(timeout)
