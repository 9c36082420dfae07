"""A click model with TorchRec's fused tables; `torchrec_after.py` continues it in persia."""

import os
import sys
import warnings

import numpy as np
import torch

try:
    warnings.simplefilter("ignore")  # Of TorchRec and FBGEMM.
    import torchrec
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
except ImportError as error:
    print(f"TorchRec cannot be imported ({error}); docs/guide/from-torchrec.md says how to install it.")
    sys.exit()

STEPS = 100 if os.environ.get("PERSIA_EXAMPLE_SMALL") else 1_000
USERS, ITEMS, DIM, BATCH = 2_000, 5_000, 16, 512


def clicks(first, steps):
    """Yields users, visited items with the number of each user, two numbers, and clicks."""
    taste = np.random.default_rng(0).standard_normal(ITEMS)
    for step in range(first, first + steps):
        draw = np.random.default_rng(step + 1)
        users, lengths = draw.integers(0, USERS, BATCH), draw.integers(1, 5, BATCH)
        visited = (ITEMS * draw.random(lengths.sum()) ** 2).astype(np.int64)
        dense = draw.standard_normal((BATCH, 2)).astype(np.float32)
        score = np.add.reduceat(taste[visited], np.cumsum(lengths) - lengths) + dense[:, 0]
        labels = draw.random(BATCH) < 1 / (1 + np.exp(-score))
        yield users, visited, lengths, dense, labels.astype(np.float32)[:, None]


def batches(first, steps):
    """Yields a KeyedJaggedTensor, dense features and labels."""
    for users, visited, lengths, dense, labels in clicks(first, steps):
        ids = torch.from_numpy(np.concatenate([users, visited]))
        counts = torch.from_numpy(np.concatenate([np.ones(BATCH, np.int64), lengths]))
        features = torchrec.KeyedJaggedTensor(["user", "visited"], ids, lengths=counts)
        yield features, torch.from_numpy(dense), torch.from_numpy(labels)


def main() -> None:
    torch.manual_seed(0)
    tables = [
        torchrec.EmbeddingBagConfig(
            name=name, embedding_dim=DIM, num_embeddings=rows, feature_names=[name], pooling=torchrec.PoolingType.MEAN
        )
        for name, rows in (("user", USERS), ("visited", ITEMS))
    ]
    options = {"lr": 0.05, "eps": 1e-8}
    embeddings = FusedEmbeddingBagCollection(tables, torchrec.optim.RowWiseAdagrad, options, device=torch.device("cpu"))
    net = torch.nn.Sequential(torch.nn.Linear(2 * DIM + 2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    criterion = torch.nn.BCEWithLogitsLoss()

    running = 0.69
    for ids, dense, labels in batches(0, STEPS):
        loss = criterion(net(torch.cat([embeddings(ids).values(), dense], dim=1)), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        running += 0.05 * (loss.item() - running)
    print(f"{STEPS} steps, loss {running:.4f}")

    os.makedirs("runs", exist_ok=True)
    rows = {"model": embeddings.state_dict(), "optimizer": embeddings.fused_optimizer().state_dict()}
    torch.distributed.checkpoint.save(rows, checkpoint_id="runs/torchrec", no_dist=True)
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, "runs/torchrec.pt")


if __name__ == "__main__":
    main()
