"""A single-process PyTorch script for globo_ctr: the peer of `benchmarks/globo.py`.

Sixteen-dimensional embeddings for user, article, mean of history (the articles' table) and six contexts; the product
article x history; MLP 256-128; Adagrad 0.2 on the embeddings (initial accumulator 0.01), Adam 1e-3 on the network;
batches of 1024, one pass, progressive validation. Vocabularies are taken from the data in advance, which persia does
not need. Context columns share one `nn.Embedding` by offsets, as this is the fastest plain way.

    python -m benchmarks.baselines.globo_torch [--seed 0] [--days 4] [--max-rows N] [--delay K]
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torch.nn import functional as F

CONTEXTS = ("environment", "device_group", "os", "country", "region", "referrer")
DIM = 16
BATCH = 1024


class Day(NamedTuple):
    """One file as tensors: ids int64, labels float32."""

    user: Tensor  # [rows]
    article: Tensor  # [rows]
    history: Tensor  # [ids]
    offsets: Tensor  # [rows + 1] into history
    contexts: Tensor  # [rows, 6], offsets of the vocabularies added
    label: Tensor  # [rows]


def data_files(days: int | None = None) -> list[Path]:
    """The day files in `$PERSIA_DATA`; the first `days` of them."""
    base = os.environ.get("PERSIA_DATA")
    if base and (files := sorted(Path(base, "globo_ctr").glob("day=*.parquet"))):
        return files[:days]
    raise FileNotFoundError("globo_ctr is not there; set PERSIA_DATA to the directory that contains it.")


def vocabularies(files: Sequence[Path]) -> dict[str, int]:
    """Largest id + 1 by column."""
    sizes = dict.fromkeys(("user_id", "article_id", *CONTEXTS), 0)
    for file in files:
        table = pq.read_table(file, columns=[*sizes, "history"])
        for name in sizes:
            sizes[name] = max(sizes[name], pc.max(table[name]).as_py() + 1)
        longest = pc.max(pc.list_flatten(table["history"])).as_py()
        sizes["article_id"] = max(sizes["article_id"], (-1 if longest is None else longest) + 1)
    return sizes


def read_day(file: Path, starts: np.ndarray) -> Day:
    table = pq.read_table(file).combine_chunks()

    def ids(name: str) -> np.ndarray:
        return table[name].to_numpy().astype(np.int64)

    history = table["history"].chunk(0)
    contexts = np.stack([ids(name) for name in CONTEXTS], axis=1) + starts
    return Day(
        torch.from_numpy(ids("user_id")),
        torch.from_numpy(ids("article_id")),
        torch.from_numpy(history.values.to_numpy().astype(np.int64)),
        torch.from_numpy(history.offsets.to_numpy().astype(np.int64)),
        torch.from_numpy(contexts),
        torch.from_numpy(table["label"].to_numpy().astype(np.float32)),
    )


def batches(day: Day, size: int = BATCH) -> Iterator[Day]:
    for low in range(0, len(day.label), size):
        high = min(low + size, len(day.label))
        bounds = day.offsets[low : high + 1]
        yield Day(
            day.user[low:high],
            day.article[low:high],
            day.history[int(bounds[0]) : int(bounds[-1])],
            bounds - bounds[0],
            day.contexts[low:high],
            day.label[low:high],
        )


class Model(nn.Module):
    """Embeddings and network."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self.user = nn.Embedding(sizes["user_id"], DIM, sparse=True)
        self.article = nn.Embedding(sizes["article_id"], DIM, sparse=True)
        self.contexts = nn.Embedding(sum(sizes[name] for name in CONTEXTS), DIM, sparse=True)
        for table in (self.user, self.article, self.contexts):
            nn.init.uniform_(table.weight, -0.01, 0.01)
        inputs = (4 + len(CONTEXTS)) * DIM
        self.mlp = nn.Sequential(nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1))

    def tables(self) -> list[nn.Parameter]:
        """The embedding tables."""
        return [self.user.weight, self.article.weight, self.contexts.weight]

    def forward(self, b: Day) -> Tensor:
        """Logits `[rows]`."""
        article = self.article(b.article)
        history = F.embedding_bag(
            b.history, self.article.weight, b.offsets, mode="mean", sparse=True, include_last_offset=True
        )
        contexts = self.contexts(b.contexts).flatten(1)
        return self.mlp(torch.cat([self.user(b.user), article, history, contexts, article * history], 1)).squeeze(1)


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Area under the ROC curve; ties count half; nan with one class only."""
    order = np.argsort(scores, kind="stable")
    ranked, positive = scores[order], labels[order] > 0.5
    _, first, counts = np.unique(ranked, return_index=True, return_counts=True)
    ranks = np.repeat(first + (counts + 1) / 2, counts)
    p = int(positive.sum())
    n = len(positive) - p
    return float((ranks[positive].sum() - p * (p + 1) / 2) / (p * n)) if p and n else float("nan")


def run(
    seed: int = 0,
    days: int | None = None,
    max_rows: int | None = None,
    delay: int = 0,
    delays: Sequence[int] | None = None,
    files: Sequence[Path] | None = None,
) -> dict[str, object]:
    """Trains for one pass and scores each batch before training on it.

    Args:
        seed: of the initial values.
        days: how many files to read, from the first on.
        max_rows: how many rows to read at most.
        delay: the number of batches by which embedding gradients are late. Gradients of the network are never late.
        delays: the delay of each batch instead, as recorded elsewhere: batch i sees the embeddings after the gradients
            of batches 0 to i - 1 - delays[i]. A gradient that has been applied stays.
        files: the day files; searched for by default.

    Returns:
        `rows_per_s` (reading and training; neither the search for vocabularies nor the AUC), `auc_mean` over the days,
        `auc_per_day`, `auc_all`, `rows`, `seconds`.
    """
    files = data_files(days) if files is None else list(files)[:days]
    sizes = vocabularies(files)
    starts = np.cumsum([0] + [sizes[name] for name in CONTEXTS[:-1]])
    torch.sparse.check_sparse_tensor_invariants.disable()  # said aloud, or torch warns
    torch.manual_seed(seed)
    model = Model(sizes)
    tables = model.tables()
    network = torch.optim.Adam(model.mlp.parameters(), 1e-3, fused=True)
    embeddings = torch.optim.Adagrad(tables, 0.2, initial_accumulator_value=0.01)
    waiting: deque[list[Tensor | None]] = deque()  # gradients of the embeddings, oldest first
    scores: list[list[Tensor]] = []
    labels: list[list[Tensor]] = []
    rows = step = 0

    def apply(keep: int) -> None:
        while len(waiting) > keep:
            for table, gradient in zip(tables, waiting.popleft(), strict=True):
                table.grad = gradient
            embeddings.step()

    begin = time.perf_counter()
    for file in files:
        if max_rows is not None and rows >= max_rows:
            break
        scores.append([])
        labels.append([])
        for batch in batches(read_day(file, starts)):
            apply(keep=delay if delays is None else delays[step])
            logits = model(batch)
            loss = F.binary_cross_entropy_with_logits(logits, batch.label)
            network.zero_grad()
            embeddings.zero_grad()
            loss.backward()
            network.step()
            waiting.append([table.grad for table in tables])
            scores[-1].append(logits.detach())
            labels[-1].append(batch.label)
            rows += len(batch.label)
            step += 1
            if max_rows is not None and rows >= max_rows:
                break
    apply(keep=0)
    seconds = time.perf_counter() - begin

    day_scores = [torch.cat(day).numpy() for day in scores]
    day_labels = [torch.cat(day).numpy() for day in labels]
    per_day = [auc(y, s) for y, s in zip(day_labels, day_scores, strict=True)]
    return {
        "rows_per_s": rows / seconds,
        "auc_mean": float(np.mean(per_day)),
        "auc_per_day": per_day,
        "auc_all": auc(np.concatenate(day_labels), np.concatenate(day_scores)),
        "rows": rows,
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Plain PyTorch on globo_ctr; prints one JSON line.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--days", type=int)
    parser.add_argument("--max-rows", type=int)
    parser.add_argument("--delay", type=int, default=0)
    args = parser.parse_args()
    print(json.dumps(run(args.seed, args.days, args.max_rows, args.delay)))


if __name__ == "__main__":
    main()
