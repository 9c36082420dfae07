"""The same program in one process and on a cluster: only the argument `cluster` differs.

python examples/cluster.py              # processes on this machine
python examples/cluster.py auto         # on the Ray cluster that this host is part of
"""

import os
import sys
import threading

import torch

import persia

ROWS = 40_000 if os.environ.get("PERSIA_EXAMPLE_SMALL") else 1_000_000


def make_trainer(reader: persia.data.Reader, cluster: object) -> persia.Trainer:
    torch.manual_seed(0)
    return persia.Trainer(
        persia.nn.models.DeepFM(reader.schema, hidden=(64, 32)),
        reader.schema,
        optimizer=lambda params: torch.optim.Adam(params, 1e-3),
        embedding_optimizer=persia.optim.Adagrad(lr=0.05),
        mode=persia.modes.Hybrid(4),
        cluster=cluster,
    )


def main() -> None:
    reader = persia.data.synthetic(ROWS, id_features=8, ids_per_feature=1_000, batch_size=512)
    test = persia.data.synthetic(10_000, id_features=8, ids_per_feature=1_000, batch_size=4096)
    options = persia.cluster.RayOptions(address=sys.argv[1] if len(sys.argv) > 1 else None)

    with persia.cluster.Ray(ps=2, embedding_workers=1, data_loaders=1, nn_workers=2, options=options) as cluster:
        trainer = make_trainer(reader, cluster)
        growing = threading.Thread(target=cluster.scale, kwargs={"embedding_workers": 2})  # While it trains.
        growing.start()
        result = trainer.fit(reader, test)
        growing.join()
        print(f"{result.rows_per_second:,.0f} rows/s, progressive AUC {result.progressive.auc:.4f}")
        for name, counters in sorted(cluster.statistics().items()):
            print(f"  {name:20} {counters.get('cpu_seconds', 0.0):6.1f} s of CPU")


if __name__ == "__main__":
    main()
