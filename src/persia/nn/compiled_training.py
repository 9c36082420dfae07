"""The network around the embeddings, compiled by `torch.compile` for training (docs/decisions/0037)."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, Literal, cast, get_args

import torch

from persia.errors import PersiaError
from persia.nn.pooling import Embeddings, SequenceEmbedding
from persia.telemetry.logs import get_logger

__all__ = ["COMPILE_MODES", "CompileMode", "CompiledTraining"]

LOG = get_logger("persia.nn")

CompileMode = Literal["default", "reduce-overhead"]
"""A mode of `torch.compile`: "reduce-overhead" also replays kernels as CUDA graphs on a GPU."""

COMPILE_MODES: tuple[CompileMode, ...] = get_args(CompileMode)

BACKEND = "inductor"
"""Backend of `torch.compile`."""

SMALLEST = 2
"""Samples of the smallest batch that is compiled: torch makes code of its own for 1, and for 0."""


class CompiledTraining:
    """Calls a network in training, compiled forward and backward. For the training thread.

    Code is made by the first batch, which takes seconds to minutes, and by one that is at least as large as any before
    if the code does not fit it, as often as torch permits (`torch._dynamo.config.recompile_limit`). A smaller one, as
    the last of a pass, never makes code: it runs code that fits it, or the network as it is. Evaluation calls the
    network itself.

    Args:
        model: the network. It is not changed.
        mode: of `torch.compile`.
        device: of the network.

    Attributes:
        module: the module to call in training, with the parameters of the network itself.
    """

    def __init__(self, model: torch.nn.Module, mode: CompileMode, device: torch.device) -> None:
        # A CUDA graph has one size: torch must not take a second one for a sign that sizes change.
        dynamic = False if mode == "reduce-overhead" else None
        self.module = cast("torch.nn.Module", torch.compile(model, mode=mode, backend=BACKEND, dynamic=dynamic))
        self.replays = mode == "reduce-overhead" and device.type == "cuda"
        """Whether outputs are in the memory of a CUDA graph, which the next batch overwrites."""
        # While it traces, torch looks at `.grad` of the embeddings, and warns of it. Not around each call: a change of
        # filters makes Python forget which warnings it has shown.
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf", module=r"torch\.")
        self._mode = mode
        self._largest: dict[int, int] = {}
        """Samples of the largest batch that has made code, by the number of torch's threads, on which code depends."""
        self._reported: set[str] = set()

    def __call__(self, module: torch.nn.Module, dense: torch.Tensor, embeddings: Embeddings, *, eager: bool) -> Any:
        """Returns the output of the network.

        Args:
            module: `self.module`, or what surrounds it.
            dense: float32 `[batch, Schema.dense_width]`.
            embeddings: by feature.
            eager: whether to call the network as it is.

        Raises:
            PersiaError: the network cannot be compiled.
        """
        samples, threads = len(dense), torch.get_num_threads()
        if eager or samples < SMALLEST:
            with torch.compiler.set_stance("force_eager"):
                return module(dense, embeddings)
        if self.replays:
            torch.compiler.cudagraph_mark_step_begin()
        if samples < self._largest.get(threads, 0):
            with torch.compiler.set_stance("eager_on_recompile"):
                return module(dense, embeddings)
        if self._mode == "default":
            _mark_samples(dense, embeddings)
        breaks = torch._dynamo.utils.counters["graph_break"]
        before = dict(breaks)
        with self._explained():
            output = module(dense, embeddings)
        self._largest[threads] = samples
        self._report([reason for reason, count in breaks.items() if count > before.get(reason, 0)])
        return output

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Raises PersiaError in place of an error of the compiler."""
        try:
            yield
        except torch._dynamo.exc.TorchDynamoException as error:
            said = " ".join([line.strip() for line in str(error).splitlines() if line.strip()][:2])
            raise PersiaError(
                f"TrainerOptions(compile={self._mode!r}): torch.compile has failed: {said} ({type(error).__name__}). "
                "It needs a C++ compiler on a CPU, and Triton on a GPU. Install it, change the network, or set compile "
                "to None."
            ) from error

    def _report(self, reasons: list[str]) -> None:
        """Warns of the parts of the network that are not compiled, once for each reason."""
        new = [reason for reason in reasons if reason not in self._reported]
        self._reported.update(new)
        if new:
            LOG.warning(
                "TrainerOptions(compile=%r) compiles the network in several parts, as torch.compile cannot compile all "
                "of it: %s. TORCH_LOGS=graph_breaks in the environment shows the lines. Change them, or set compile to "
                "None if it is not faster.",
                self._mode,
                "; ".join(reason.strip().partition("\n")[0] for reason in new),
            )


def _mark_samples(dense: torch.Tensor, embeddings: Embeddings) -> None:
    """Lets the code for a batch fit batches of other sizes, where the network permits it."""
    tensors: list[torch.Tensor] = [dense]
    for feature in embeddings.values():
        tensors += feature if isinstance(feature, SequenceEmbedding) else [feature]
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
