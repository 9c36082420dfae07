"""Compiles the network of a prediction server in the background, and gives each version the compiled code."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from persia.nn.dense_step import Precision
from persia.schema import Schema
from persia.serve.compiled import CompiledNetwork, compile_network
from persia.serve.flat_network import example_input
from persia.serve.network_builder import Network
from persia.telemetry.logs import get_logger

__all__ = ["Compiler", "CompilerOptions"]

LOG = get_logger("persia.serve")


class CompilerOptions(NamedTuple):
    """Options of a `Compiler`.

    Attributes:
        compile: see `ServeOptions.compile`.
        cache_dir: see `ServeOptions.cache_dir`.
        device: device of the network.
        precision: precision of its forward pass. Only float32 is compiled.
    """

    compile: bool | Literal["auto"]
    cache_dir: str | None
    device: torch.device
    precision: Precision


class Compiler:
    """Compiles a network once, for all its versions. Thread-safe.

    Args:
        schema: input of the network.
        options: whether and where to compile.
    """

    def __init__(self, schema: Schema, options: CompilerOptions) -> None:
        self._schema = schema
        self._options = options
        self._lock = threading.Lock()
        self._code: CompiledNetwork | None = None
        self._latest: Network | None = None
        self._thread: threading.Thread | None = None

    def adopt(self, network: Network) -> None:
        """Gives a version compiled code, as soon as there is some. Blocks for the compiler if `compile` is True."""
        options = self._options
        if not options.compile:
            return
        with self._lock:
            self._latest = network
            if self._code is not None:
                self._use(network)
            if self._code is not None or self._thread is not None:
                return
            self._thread = threading.Thread(target=self._compile, args=(network,), name="persia-compile", daemon=True)
            self._thread.start()
        if options.compile != "auto":
            self._thread.join()

    def _compile(self, network: Network) -> None:
        options = self._options
        if options.precision != "float32":
            LOG.warning(
                "The network runs eagerly: its precision is %s, and only float32 is compiled.", options.precision
            )
            return
        dense, embeddings = example_input(self._schema)
        example = (
            dense.to(options.device),
            {
                name: value.to(options.device)
                if isinstance(value, torch.Tensor)
                else type(value)(*(part.to(options.device) for part in value))
                for name, value in embeddings.items()
            },
        )
        if options.cache_dir is None:
            with tempfile.TemporaryDirectory(prefix="persia-compiled-") as directory:
                code = compile_network(network.module, example, directory)
        else:
            code = compile_network(network.module, example, Path(options.cache_dir) / "compiled")
        if not code.compiled:
            return  # `compile_network` has logged the reason.
        with self._lock:
            self._code = code
            if self._latest is not None:
                self._use(self._latest)

    def _use(self, network: Network) -> None:
        assert self._code is not None
        network.compute = self._code.with_model(network.module)
