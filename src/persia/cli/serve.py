"""The command `persia serve`: predictions over HTTP from a log of changes."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import typer

from persia.checks import check_choice, without_userinfo
from persia.cli.imports import import_modules
from persia.errors import ConfigError, MissingExtraError
from persia.telemetry.logs import get_logger, log_to_stderr

__all__ = ["serve"]

LIMITS, SECURITY = "Limits", "Security"

COMPILE: Final[Mapping[str, bool | Literal["auto"]]] = {"false": False, "auto": "auto", "true": True}
"""Values of `ServeOptions.compile` by those of `--compile`."""


def serve(
    url: Annotated[
        str, typer.Argument(help="Log of changes, as in `trainer.publish.url`: a directory or a URL.", metavar="URL")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help="Network, as `module:Class` or `module:function`; it is called with the schema. Needed if the program "
            "that trains has built it in Python; the log describes those of `persia train`.",
            metavar="MODULE:NAME",
        ),
    ] = None,
    imports: Annotated[
        list[str] | None,
        typer.Option("--import", help="Module whose classes the log may name. Repeatable.", metavar="MODULE"),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Interface to listen on; 0.0.0.0 for all, which needs keys.", metavar="ADDRESS")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for any free one.")] = 8080,
    reuse_port: Annotated[
        bool,
        typer.Option("--reuse-port", help="Let several servers of this host share the port."),
    ] = False,
    device: Annotated[str, typer.Option(help="Where the network runs: cpu, cuda, cuda:1, auto.")] = "cpu",
    threads: Annotated[
        int | None, typer.Option(help="Threads of the network. Defaults to the cores of the host.", min=1)
    ] = None,
    cache_dir: Annotated[
        str | None,
        typer.Option(
            help="Local directory for rows of snapshots. Several servers of this host that name the same one share "
            "its memory, and start faster.",
            metavar="DIR",
        ),
    ] = None,
    compiling: Annotated[
        str,
        typer.Option(
            "--compile",
            help="Run compiled code in place of the Python of the network: false, auto (serves without it until it is "
            "there), true (waits for the compiler at the start). Needs g++; the code is kept in --cache-dir.",
            metavar="HOW",
        ),
    ] = "false",
    poll_seconds: Annotated[float, typer.Option(help="Seconds between two looks at the log.")] = 1.0,
    rows: Annotated[
        list[str] | None,
        typer.Option(
            help="Address of a row server (`persia serve-rows`), as tcp://host:port. Repeatable: give all of them, in "
            "the order of their parts.",
            metavar="ADDRESS",
        ),
    ] = None,
    rows_seconds: Annotated[float, typer.Option(help="Deadline of a lookup at the row servers.")] = 1.0,
    items: Annotated[
        str | None,
        typer.Option(
            help="Parquet files with the features of the items, as a file, directory, glob or URL. A model with two "
            "towers then answers /retrieve.",
            metavar="FILES",
        ),
    ] = None,
    item_key: Annotated[
        str | None,
        typer.Option(help="Feature that identifies an item, if it has several ID-type features.", metavar="NAME"),
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Samples that are computed at once.", rich_help_panel=LIMITS)] = 1024,
    max_wait_ms: Annotated[
        float, typer.Option(help="Time for which a batch waits for more samples.", rich_help_panel=LIMITS)
    ] = 1.0,
    deadline_ms: Annotated[
        float,
        typer.Option(
            help="Time within which a request is to be answered; it is refused at once if that is not expected.",
            rich_help_panel=LIMITS,
        ),
    ] = 1000.0,
    max_rows: Annotated[int, typer.Option(help="Samples, items or ids of a request.", rich_help_panel=LIMITS)] = 4096,
    max_values: Annotated[
        int, typer.Option(help="Values of one feature of a request.", rich_help_panel=LIMITS)
    ] = 131072,
    max_k: Annotated[
        int, typer.Option(help="Items that /retrieve finds for one user.", rich_help_panel=LIMITS)
    ] = 10000,
    max_queue: Annotated[int, typer.Option(help="Requests that wait.", rich_help_panel=LIMITS)] = 512,
    max_queue_rows: Annotated[int, typer.Option(help="Samples that wait.", rich_help_panel=LIMITS)] = 16384,
    max_body_bytes: Annotated[
        str, typer.Option(help="Body of a request.", metavar="BYTES", rich_help_panel=LIMITS)
    ] = "8MiB",
    max_held_bytes: Annotated[
        str, typer.Option(help="Bodies of all requests together.", metavar="BYTES", rich_help_panel=LIMITS)
    ] = "128MiB",
    max_connections: Annotated[int, typer.Option(help="Open connections.", rich_help_panel=LIMITS)] = 1024,
    body_seconds: Annotated[
        float, typer.Option(help="Time within which a body must arrive.", rich_help_panel=LIMITS)
    ] = 10.0,
    head_seconds: Annotated[
        float, typer.Option(help="Time within which the head of a request must arrive.", rich_help_panel=LIMITS)
    ] = 10.0,
    key_file: Annotated[
        str | None,
        typer.Option(
            help="File with the keys of clients, one a line. Or set PERSIA_SERVE_KEYS.",
            metavar="FILE",
            rich_help_panel=SECURITY,
        ),
    ] = None,
    tls_cert: Annotated[
        str | None, typer.Option(help="Certificate chain, in PEM.", metavar="FILE", rich_help_panel=SECURITY)
    ] = None,
    tls_key: Annotated[
        str | None, typer.Option(help="Key of the certificate, in PEM.", metavar="FILE", rich_help_panel=SECURITY)
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Let other hosts in without keys, where only trusted clients can reach --host.",
            rich_help_panel=SECURITY,
        ),
    ] = False,
    drain_seconds: Annotated[
        float, typer.Option(help="Time that requests have to end after SIGTERM.", rich_help_panel=LIMITS)
    ] = 30.0,
) -> None:
    """Serve predictions over HTTP from a log of changes, which training keeps up to date.

        persia serve runs/changes

        curl 127.0.0.1:8080/predict -H 'Content-Type: application/json'
            -d '{"features": {"user": [1, 2], "item": [7, 8]}, "dense": {"price": [0.5, 1.5]}}'

    http://127.0.0.1:8080/docs describes the interface for this model, /health says how old rows and network are, and
    /metrics has the same for Prometheus. The server starts before there is anything in the log, and answers 503 until
    then. What it cannot answer in time it refuses at once with 503. SIGTERM ends it once requests have been answered.
    """
    log_to_stderr(logging.INFO)
    try:
        from persia.serve.http.limits import ServeLimits
        from persia.serve.http.run import HttpOptions, run_server
    except ImportError as error:
        raise MissingExtraError('persia serve needs FastAPI: pip install "persia[serve]".', extra="serve") from error
    from persia.serve import Predictor, Retriever, ServeOptions
    from persia.units import parse_bytes

    limits = ServeLimits(
        max_body_bytes=parse_bytes(max_body_bytes, "max_body_bytes"),
        max_held_bytes=parse_bytes(max_held_bytes, "max_held_bytes"),
        max_rows=max_rows,
        max_values=max_values,
        max_k=max_k,
        max_batch=max_batch,
        max_wait_ms=max_wait_ms,
        max_queue=max_queue,
        max_queue_rows=max_queue_rows,
        deadline_ms=deadline_ms,
        body_seconds=body_seconds,
        head_seconds=head_seconds,
        max_connections=max_connections,
    )
    options = HttpOptions(
        host=host,
        port=port,
        reuse_port=reuse_port,
        limits=limits,
        key_file=key_file,
        tls_cert=tls_cert,
        tls_key=tls_key,
        insecure=insecure,
        drain_seconds=drain_seconds,
    )
    check_choice("compile", compiling, list(COMPILE))
    network = _network(model)
    import_modules(imports or (), "import")
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    serving = ServeOptions(
        poll_seconds=poll_seconds,
        device=device,
        cache_dir=cache_dir,
        imports=tuple(imports or ()),
        compile=COMPILE[compiling],
        rows=tuple(rows or ()),
        rows_seconds=rows_seconds,
    )
    if item_key is not None and items is None:
        raise ConfigError("--item-key needs --items, the files with the items.", field="item_key")
    if items is not None and rows:
        raise ConfigError(
            "--items needs the rows in this process, as row servers do not tell which rows have changed; leave --rows "
            "out.",
            field="items",
        )
    log, shown = get_logger("persia.serve"), without_userinfo(url)
    predictor = Predictor(url, network, serving)
    retriever = None if items is None else Retriever(predictor, items, key=item_key)
    run_server(predictor, options, lambda at: log.info("%s serves %s", at.url, shown), retriever)


def _network(name: str | None) -> Any:
    """Returns what `module:name` names; None for None."""
    if name is None:
        return None
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ConfigError(f"Invalid --model {name}; expected MODULE:NAME.", field="model")
    import_modules([module], "model")
    found = getattr(importlib.import_module(module), attribute, None)
    if not callable(found):
        raise ConfigError(
            f"There is no class or function {attribute!r} in {module}, as --model {name} says.", field="model"
        )
    return found
