"""The command `persia serve`: predictions over HTTP from a log of changes."""

from __future__ import annotations

import importlib
import logging
from typing import Annotated, Any

import typer
from msgspec.structs import replace

from persia.checks import without_userinfo
from persia.cli.imports import import_modules
from persia.cli.record_options import Fields, Shown, options_from_records
from persia.errors import ConfigError, MissingExtraError
from persia.serve.http.limits import ServeLimits
from persia.serve.http.options import HttpOptions
from persia.serve.options import ServeOptions
from persia.telemetry.logs import get_logger, log_to_stderr

__all__ = ["serve"]

LIMITS, SECURITY = "Limits", "Security"


@options_from_records
def serve(
    url: Annotated[
        str, typer.Argument(help="Log of changes, as in `trainer.publish.url`: a directory or a URL.", metavar="URL")
    ],
    *,
    model: Annotated[
        str | None,
        typer.Option(
            help="Network, as `module:Class` or `module:function`; it is called with the schema. Needed if the "
            "training program built the network in Python; the log describes networks of `persia train`.",
            metavar="MODULE:NAME",
        ),
    ] = None,
    http: Annotated[
        HttpOptions,
        Fields(
            hidden=["limits"],
            host=Shown("ADDRESS"),
            key_file=Shown("FILE", panel=SECURITY),
            tls_cert=Shown("FILE", panel=SECURITY),
            tls_key=Shown("FILE", panel=SECURITY),
            insecure=Shown(panel=SECURITY),
            drain_seconds=Shown(panel=LIMITS),
        ),
    ],
    serving: Annotated[
        ServeOptions,
        Fields(
            hidden=["threads"],
            device=Shown("DEVICE"),
            cache_dir=Shown("DIR"),
            imports=Shown("MODULE", name="--import"),
            compile=Shown("HOW"),
            rows=Shown("ADDRESS"),
        ),
    ],
    threads: Annotated[
        int | None, typer.Option(help="Threads of the network. Defaults to the cores of the host.", min=1)
    ] = None,
    retrieve: Annotated[
        bool,
        typer.Option(
            "--retrieve",
            help="Answer /retrieve with the rows of the item's table, for a model with two towers that reads only the "
            "id of an item, such as `next_item`. Items that are published later are found, too.",
        ),
    ] = False,
    items: Annotated[
        str | None,
        typer.Option(
            help="Answer /retrieve with the items of these Parquet files, which have their features: a file, "
            "directory, glob or URL. For any model with two towers.",
            metavar="FILES",
        ),
    ] = None,
    item_key: Annotated[
        str | None,
        typer.Option(help="Feature that identifies an item, if it has several ID-type features.", metavar="NAME"),
    ] = None,
    limits: Annotated[ServeLimits, Fields(panel=LIMITS)],
) -> None:
    """Serve predictions over HTTP from a log of changes, which training keeps up to date.

        persia serve runs/changes

        curl 127.0.0.1:8080/predict -H 'Content-Type: application/json'
            -d '{"features": {"user": [1, 2], "item": [7, 8]}, "dense": {"price": [0.5, 1.5]}}'

    To serve a checkpoint, publish it to a log of changes first, with `--step N|best|latest`:

        persia checkpoint publish runs/NAME/latest --output runs/changes --step best

    http://127.0.0.1:8080/docs describes the interface for this model, /health shows how old rows and network are, and
    /metrics has the same for Prometheus. The server starts before there is anything in the log, and answers 503 until
    then. It rejects requests that it cannot answer in time immediately with 503. After SIGTERM it answers pending
    requests, then stops.
    """
    log_to_stderr(logging.INFO)
    try:
        from persia.serve.http.run import run_server
    except ImportError as error:
        raise MissingExtraError(
            'persia serve needs FastAPI: pip install "persia-recsys[serve]".', extra="serve"
        ) from error
    from persia.serve import Predictor, Retriever

    network = _network(model)
    import_modules(serving.imports, "import")
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    if retrieve and items is not None:
        raise ConfigError(
            "--retrieve makes all rows of the item's table the items, and --items those of its files; leave one out.",
            field="retrieve",
        )
    retrieves = retrieve or items is not None
    if item_key is not None and not retrieves:
        raise ConfigError("--item-key needs --items, the files with the items, or --retrieve.", field="item_key")
    if retrieves and serving.rows:
        raise ConfigError(
            f"{'--retrieve' if items is None else '--items'} needs the rows in this process, as row servers do not "
            "report which rows have changed; remove --rows.",
            field="items",
        )
    log, shown = get_logger("persia.serve"), without_userinfo(url)
    predictor = Predictor(url, network, serving)
    retriever = Retriever(predictor, items, key=item_key) if retrieves else None
    run_server(predictor, replace(http, limits=limits), lambda at: log.info("%s serves %s", at.url, shown), retriever)


def _network(name: str | None) -> Any:
    """Imports the class or function that `module:name` names; None for None."""
    if name is None:
        return None
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ConfigError(f"Invalid --model {name}; expected MODULE:NAME.", field="model")
    import_modules([module], "model")
    factory = getattr(importlib.import_module(module), attribute, None)
    if not callable(factory):
        raise ConfigError(
            f"There is no class or function {attribute!r} in {module}, as --model {name} says.", field="model"
        )
    return factory
