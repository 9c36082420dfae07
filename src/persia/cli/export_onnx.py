"""The command `persia export-onnx`."""

from __future__ import annotations

from typing import Annotated

import typer

from persia.cli.imports import import_modules
from persia.errors import PublishError
from persia.printable import say

__all__ = ["export_onnx"]


def export_onnx(
    url: Annotated[str, typer.Argument(help="Log of changes: a directory or URL.", metavar="URL")],
    target: Annotated[str, typer.Argument(help="File to write.", metavar="FILE")],
    imports: Annotated[
        list[str] | None,
        typer.Option("--import", help="Module whose classes the log may name as the model. Repeatable.", metavar="M"),
    ] = None,
) -> None:
    """Export the newest published network as an ONNX file.

    The file does not contain rows. For the network of a checkpoint, run `persia checkpoint publish` first.
    """
    import_modules(imports or (), "import")
    import torch

    from persia.publish import NetworkUpdate, follow
    from persia.serve.network_builder import NetworkBuilder
    from persia.serve.onnx_export import export_onnx as export

    follower = follow(url, rows=False)
    newest = next((update for update in follower.updates() if isinstance(update, NetworkUpdate)), None)
    description = follower.description()
    if newest is None or description is None:
        raise PublishError(
            f"There is no network with its description in {url}: {follower.problem or 'its newest epoch lacks it'}. "
            "Check the URL, and whether training publishes there.",
            url=url,
        )
    network = NetworkBuilder(None, description, torch.device("cpu"), imports or []).load(newest)
    say(f"{export(network.module, description.schema, target)}: the network of step {network.step}")
