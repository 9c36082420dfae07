"""The TorchRec/FBGEMM side of `step_torch.py`: runs in build/torchrec-env and answers on standard input and output.

Argument: options as JSON. Prints `ready`; then answers each line `time N` with `seconds S`, until its input ends.
"""

from __future__ import annotations

import json
import os
import sys
import warnings

import torch
from torch import Tensor

warnings.simplefilter("ignore")  # of the libraries; this process only measures

from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType  # noqa: E402
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation  # noqa: E402
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (  # noqa: E402
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from step_torch import Samples, Variant, Workload  # noqa: E402

FUSED = {"rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "adagrad": EmbOptimType.EXACT_ADAGRAD}
STORED = {"float32": SparseType.FP32, "float16": SparseType.FP16}


class Fbgemm(Variant):
    """All tables in one kernel call, which also applies the gradient. Its output is float32, whatever rows are."""

    def __init__(self, work: Workload, optimizer: str, dtype: str) -> None:
        super().__init__(work)
        table = (work.rows, work.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
        self.tables = SplitTableBatchedEmbeddingBagsCodegen(
            [table] * work.features,
            optimizer=FUSED[optimizer],
            learning_rate=0.05,
            eps=1e-10,
            weights_precision=STORED[dtype],
            output_dtype=SparseType.FP32,
        )
        self.tables.init_embedding_weights_uniform(-0.01, 0.01)
        self.offsets = torch.arange(work.features * work.batch + 1)

    def lookup(self, batch: Samples) -> Tensor:
        """`[batch, features * dim]`."""
        return self.tables(batch.ids.view(-1), self.offsets)

    def step(self) -> None:
        """One training step."""
        batch = self.next()
        self.backward([self.lookup(batch)], batch)


class TorchRecModule(Variant):
    """TorchRec's FusedEmbeddingBagCollection on a KeyedJaggedTensor."""

    def __init__(self, work: Workload, optimizer: str) -> None:
        import torchrec
        from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
        from torchrec.optim import Adagrad, RowWiseAdagrad

        super().__init__(work)
        self.keyed_jagged_tensor = torchrec.KeyedJaggedTensor
        self.names = [f"f{i}" for i in range(work.features)]
        self.lengths = torch.ones(work.features * work.batch, dtype=torch.int64)
        self.tables = FusedEmbeddingBagCollection(
            tables=[
                torchrec.EmbeddingBagConfig(
                    name=f"t_{name}",
                    embedding_dim=work.dim,
                    num_embeddings=work.rows,
                    feature_names=[name],
                    init_fn=lambda weight: torch.nn.init.uniform_(weight, -0.01, 0.01),
                )
                for name in self.names
            ],
            optimizer_type={"rowwise_adagrad": RowWiseAdagrad, "adagrad": Adagrad}[optimizer],
            optimizer_kwargs={"lr": 0.05, "eps": 1e-10},
            device=torch.device("cpu"),
        )

    def step(self) -> None:
        """One training step."""
        batch = self.next()
        features = self.keyed_jagged_tensor(self.names, batch.ids.view(-1), lengths=self.lengths)
        self.backward([self.tables(features).values()], batch)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the libraries print must not mix with the answers
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options["threads"])
    work, optimizer = Workload(**options["work"]), options["optimizer"]
    if options["layer"] == "fbgemm":
        variant: Variant = Fbgemm(work, optimizer, options["dtype"])
    else:
        variant = TorchRecModule(work, optimizer)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print("seconds", variant.time(int(line.split()[1])), file=answers, flush=True)


if __name__ == "__main__":
    main()
