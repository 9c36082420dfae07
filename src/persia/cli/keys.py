"""The commands of `persia keys`, for the CURVE keys of a cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from persia.printable import say

__all__ = ["keys_app"]

KeyPath = Annotated[str, typer.Argument(help="Key file, as in PERSIA_CURVE_KEYS.", metavar="FILE")]

keys_app = typer.Typer(no_args_is_help=True, help="Make and rotate the CURVE keys of a cluster.")


@keys_app.command()
def make(path: KeyPath) -> None:
    """Write a new key file, readable by its owner only. Copy it to every host of the cluster."""
    from persia import rpc

    rpc.make_keys(path)
    say(f"Wrote {path}; copy it to every host, and set PERSIA_CURVE_KEYS to its path.")


@keys_app.command()
def add(path: KeyPath) -> None:
    """Add a new key to FILE, which clients try after the others: the first step of a rotation.

    Processes of a running cluster read the file again within seconds. Copy it to every host before the next step.
    """
    from persia import rpc

    rpc.add_key(path)
    say(f"Added a key to {path}; copy it to every host, then run `persia keys promote {path}`.")


@keys_app.command()
def promote(path: KeyPath) -> None:
    """Move the newest key of FILE to the front: servers use it, and refuse the other keys.

    A process that reads the file closes its connections once; clients connect again and repeat their calls.
    """
    from persia import rpc

    rpc.promote_key(path)
    say(f"Promoted the newest key of {path}; copy it to every host, then run `persia keys retire {path}`.")


@keys_app.command()
def retire(path: KeyPath) -> None:
    """Remove all keys but the first from FILE, once every host has the promoted file."""
    from persia import rpc

    rpc.retire_keys(path)
    say(f"{path} has one key now; copy it to every host.")
