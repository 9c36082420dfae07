"""Compiles the dense network ahead of time for serving: `torch.export`, then AOTInductor."""

from __future__ import annotations

import copy
import hashlib
import os
import secrets
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from persia.errors import ConfigError
from persia.nn.output import ModelOutput
from persia.nn.pooling import Embeddings
from persia.serve.flat_network import FlatNetwork, InputLayout, export_error, sample_inputs, weights_of
from persia.telemetry.logs import get_logger

__all__ = ["CompiledNetwork", "compile_network", "export_network"]

LOG = get_logger("persia.serve")

MAX_ROWS = 1 << 24
"""Largest batch that the compiled code supports."""


class _Code(Protocol):
    """Machine code of a network."""

    def boxed_run(self, inputs: list[Tensor]) -> list[Tensor]:
        """Returns the outputs; empties the list of inputs."""


class CompiledNetwork:
    """A network with compiled code and replaceable weights.

    The weights are inputs of the compiled code, not constants in it: versions of the network share the code, and a call
    uses one version. Calls may come from any thread, also during `load`. On the CPU, calls of the same compiled code
    run one after another.

    Args:
        model: the weights, and the network to run without code. In evaluation mode, and not modified from now on.
        layout: layout of its inputs.
        code: compiled code; None runs the model eagerly.

    Attributes:
        problem: why it runs eagerly; empty if it is compiled.
    """

    def __init__(self, model: nn.Module, layout: InputLayout, code: _Code | None, problem: str = "") -> None:
        self._layout = layout
        self._code = code
        self._version = model, list(weights_of(model).values())
        """One attribute, so that a call reads both from the same version."""
        self.problem = problem

    @property
    def compiled(self) -> bool:
        """Whether it runs compiled code."""
        return self._code is not None

    @torch.inference_mode()
    def __call__(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns logits float32 `[batch, outputs]`.

        Args:
            dense: dense features, `[batch, n]`.
            embeddings: embeddings of the ID-type features, on the device of the network.
        """
        model, weights = self._version
        rows = dense.shape[0]
        if self._code is None or not rows:
            output = model(dense, embeddings)
            logits: Tensor = output.logits if isinstance(output, ModelOutput) else output
            return logits.float()
        inputs = self._layout.flat(dense, embeddings)
        if rows == 1:  # The export holds for two rows or more.
            inputs = [tensor.expand(2, *tensor.shape[1:]) for tensor in inputs]
        (logits,) = self._code.boxed_run([*weights, *(tensor.contiguous() for tensor in inputs)])
        return logits[:rows].float()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copies the weights of a `state_dict`, and uses them from the next call on. Compiles nothing.

        Raises:
            ConfigError: a tensor is missing, unknown, or has another shape; the weights stay as they are.
        """
        self._version = self.with_weights(state)._version

    def with_weights(self, state: Mapping[str, Tensor]) -> CompiledNetwork:
        """Returns a network with the weights of a `state_dict` and the code of this one, which is not modified.

        Raises:
            ConfigError: a tensor is missing, unknown, or has another shape.
        """
        model = copy.deepcopy(self._version[0])
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            raise ConfigError(
                f"The weights do not fit {type(model).__name__}; serve with the model that was trained. {error}",
                field="model",
            ) from error
        return self.with_model(model)

    def with_model(self, model: nn.Module) -> CompiledNetwork:
        """Returns a network with the weights of a model of the same form, and the code of this one.

        Args:
            model: model in evaluation mode, on the same device; it must not change afterwards.
        """
        return CompiledNetwork(model, self._layout, self._code, self.problem)


def compile_network(
    model: nn.Module, example: tuple[Tensor, Embeddings], cache_dir: str | os.PathLike[str]
) -> CompiledNetwork:
    """Compiles a network for batches of any size. On failure, logs the reason, and returns a network that runs eagerly.

    Blocks while a C++ compiler runs, seconds to minutes, unless `cache_dir` has the code. The code does not contain the
    weights, so all versions of a network share it.

    Args:
        model: the network. The code is for its device. A copy in evaluation mode is used.
        example: `dense` and embeddings of a batch, of any number of rows.
        cache_dir: directory of compiled code, created if it does not exist. Code in it is executed: let no one else
            write to it.
    """
    model = copy.deepcopy(model).eval().requires_grad_(False)
    layout = InputLayout(example[1])
    inputs = sample_inputs(layout.flat(*example))
    try:
        exported = export_network(model, layout, inputs)
        path = _package(exported, inputs, Path(cache_dir))
        code = torch._inductor.aoti_load_package(str(path)).loader
    except Exception as error:  # Exporter, compiler and loader may raise anything.
        problem = export_error(error)
        LOG.warning("%s runs eagerly, as it cannot be compiled: %s", type(model).__name__, problem)
        return CompiledNetwork(model, layout, None, problem)
    return CompiledNetwork(model, layout, code)


@torch.no_grad()
def export_network(model: nn.Module, layout: InputLayout, inputs: Sequence[Tensor]) -> torch.export.ExportedProgram:
    """Exports a network as a function of its weights and inputs, for any number of rows from 2 on.

    Args:
        model: the network, in evaluation mode.
        layout: layout of its inputs.
        inputs: inputs of a batch; see `sample_inputs`.

    Raises:
        Exception: `torch.export` cannot trace the network.
    """
    weights = weights_of(model)
    batch = torch.export.Dim("batch", max=MAX_ROWS)
    shapes = [None] * len(weights) + [{0: batch}] * len(inputs)
    network = FlatNetwork(model, layout, tuple(weights))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of torch about itself.
        return torch.export.export(network, (*weights.values(), *inputs), dynamic_shapes=(tuple(shapes),))


def _package(exported: torch.export.ExportedProgram, inputs: Sequence[Tensor], cache_dir: Path) -> Path:
    """Returns the file of the compiled code; compiles it if it is missing."""
    cache_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = cache_dir / f"{_key(exported, inputs[0].device)}.pt2"
    if path.exists():
        return path
    LOG.info("Compiling the network; this takes a while, once.")
    partial = cache_dir / f"{secrets.token_hex(8)}.partial.pt2"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Of torch about itself.
            torch._inductor.aoti_compile_and_package(exported, package_path=str(partial))
        partial.replace(path)  # Several processes may compile at the same time.
    finally:
        partial.unlink(missing_ok=True)
    return path


def _key(exported: torch.export.ExportedProgram, device: torch.device) -> str:
    """Returns a cache key for the code of a network: a hash of its graph, the version of torch, and the processor."""
    processor = torch.backends.cpu.get_cpu_capability()
    if device.type == "cuda":
        processor = f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
    values = [(node.name, str(node.meta.get("val"))) for node in exported.graph.nodes]
    constants = [(name, value.tolist()) for name, value in exported.constants.items() if isinstance(value, Tensor)]
    parts = (
        exported.graph,
        values,
        constants,
        exported.range_constraints,
        torch.__version__,
        processor,
        torch.get_num_threads(),
    )
    text = "\n".join(map(str, parts))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
