"""What is trained: each task builds its model, gives a rank its share of every batch, and evaluates the result."""

from __future__ import annotations

import ast
import functools
import itertools
import os
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from benchmarks.baselines.globo_torch import auc
from torch import Tensor, nn
from torch.nn import functional as F

from persia import data
from persia.nn.models import FFNN

__all__ = ["TASKS", "Task"]


class Task(ABC):
    """One model and its data.

    Args:
        rank: of this process.
        ranks: how many share each batch.
        seed: of data and model.
    """

    def __init__(self, rank: int, ranks: int, seed: int) -> None:
        self.rank, self.ranks, self.seed = rank, ranks, seed

    @abstractmethod
    def model(self) -> nn.Module:
        """The network, the same on every rank."""

    @abstractmethod
    def loss(self, model: nn.Module, step: int) -> Tensor:
        """Mean loss of this rank's share of a batch."""

    def after_backward(self) -> None:
        """Applies what is not the optimizer's."""
        return None

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Figures on data that it was not trained on; collective."""
        return {}


class PaperFFNN(Task):
    """The paper's network on 208 inputs, 12 M parameters, and labels of a small teacher: for times, and losses too."""

    inputs, batch = 208, 32
    hidden = (4096, 2048, 1024, 512, 256)

    def __init__(self, rank: int, ranks: int, seed: int) -> None:
        super().__init__(rank, ranks, seed)
        torch.manual_seed(12345)
        self.teacher = nn.Sequential(nn.Linear(self.inputs, 32), nn.Tanh(), nn.Linear(32, 1))
        self.generator = torch.Generator().manual_seed(1000 * seed + rank)

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        widths = (self.inputs, *self.hidden)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(widths[-1], 1))

    def samples(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(count, self.inputs, generator=generator)
        with torch.no_grad():
            chance = torch.sigmoid(8 * self.teacher(inputs))
        return inputs, (torch.rand(count, 1, generator=generator) < chance).float()

    def loss(self, model: nn.Module, step: int) -> Tensor:
        inputs, labels = self.samples(self.batch, self.generator)
        return F.binary_cross_entropy_with_logits(model(inputs), labels)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        inputs, labels = self.samples(4096, torch.Generator().manual_seed(77))
        return {"loss": float(F.binary_cross_entropy_with_logits(model(inputs), labels))}


class SmallFFNN(PaperFFNN):
    """The same, 0.2 M parameters: to try things out."""

    hidden = (512, 256)


class ClickThrough(Task):
    """FFNN on stationary synthetic clicks, as `quality.py` has them; 256 rows a rank.

    The embeddings are not what is compared, so they are as simple as can be: every rank keeps all tables, gathers all
    ranks' embedding gradients, and applies their mean with Adagrad, in the same order everywhere. That is Sync.
    """

    batch, dim, lr = 256, 16, 0.05
    rows, test_rows = 1_000_000, 100_000

    def __init__(self, rank: int, ranks: int, seed: int) -> None:
        super().__init__(rank, ranks, seed)
        self.reader = data.synthetic(
            self.rows, pairs=12, latent_dim=4, seed=seed, batch_size=self.batch, shard=(rank, ranks), drop_last=True
        )
        self.batches = self.reader.batches(epoch=0)
        features, ids = self.reader.id_features, self.reader.ids_per_feature
        self.starts = torch.arange(features)[:, None] * ids
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.empty(features * ids, self.dim).uniform_(-0.01, 0.01, generator=generator)
        self.squares = torch.full_like(self.table, 0.01)
        self.rows_used = torch.empty(0, dtype=torch.int64)
        self.leaf = torch.empty(0)

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return FFNN(self.reader.schema, hidden=(256, 128))

    def logits(self, model: nn.Module, batch: data.Batch, train: bool) -> Tensor:
        columns = [torch.from_numpy(column.values.astype(np.int64)) for column in batch.id_features.values()]
        at = torch.stack(columns) + self.starts
        rows = self.table[at.flatten()]
        if train:
            self.rows_used, self.leaf = at.flatten(), rows.requires_grad_()
        parts = rows.view(len(columns), -1, self.dim)
        named = {name: parts[i] for i, name in enumerate(batch.id_features)}
        logits: Tensor = model(torch.from_numpy(batch.dense), named)
        return logits

    def loss(self, model: nn.Module, step: int) -> Tensor:
        batch = next(self.batches)
        logits = self.logits(model, batch, train=True)
        return F.binary_cross_entropy_with_logits(logits, torch.from_numpy(batch.labels))

    def after_backward(self) -> None:
        assert self.leaf.grad is not None
        rows = torch.empty(self.ranks * len(self.rows_used), dtype=torch.int64)
        gradients = torch.empty(len(rows), self.dim)
        dist.all_gather(list(rows.chunk(self.ranks)), self.rows_used)
        dist.all_gather(list(gradients.chunk(self.ranks)), self.leaf.grad)
        unique, inverse = torch.unique(rows, return_inverse=True)
        total = torch.zeros(len(unique), self.dim).index_add_(0, inverse, gradients).div_(self.ranks)
        squares = self.squares[unique].addcmul_(total, total)
        self.squares[unique] = squares
        self.table[unique] -= self.lr * total / squares.sqrt().add_(1e-10)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        batches = itertools.islice(self.reader.batches(epoch=1), self.test_rows // self.batch // self.ranks)
        scored = [(self.logits(model, batch, train=False), torch.from_numpy(batch.labels)) for batch in batches]
        own = torch.cat([torch.cat(pair, 1) for pair in scored])
        everyone = torch.empty(len(own) * self.ranks, 2)
        dist.all_gather(list(everyone.chunk(self.ranks)), own)
        logits, labels = everyone.unbind(1)
        loss = float(F.binary_cross_entropy_with_logits(logits, labels))
        return {"auc": auc(labels.numpy(), logits.numpy()), "loss": loss}


class SmallClickThrough(ClickThrough):
    """The same, tested on few rows: to try things out."""

    rows, test_rows = 20_000, 4_096


class Block(nn.Module):
    """Two 3 x 3 convolutions with batch norm, and a shortcut around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(after), nn.BatchNorm2d(after)])
        self.shortcut = nn.Identity() if before == after else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(inner)) + self.shortcut(x))


class Digits(Task):
    """A ResNet of three blocks on scikit-learn's 1,797 digits of 8 x 8, a fifth of them for the test; 32 rows a rank.

    Each rank keeps its own statistics of batch norm, as DDP's ranks do between broadcasts; rank 0's are evaluated.
    """

    batch = 32

    def __init__(self, rank: int, ranks: int, seed: int) -> None:
        from sklearn.datasets import load_digits

        super().__init__(rank, ranks, seed)
        digits = load_digits()
        images = torch.from_numpy(digits.images).float().div_(8.0).sub_(1.0)[:, None]
        labels = torch.from_numpy(digits.target)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        self.test = order[: len(order) // 5]
        self.train = order[len(order) // 5 :]
        self.images, self.labels = images, labels
        self.generator = torch.Generator().manual_seed(seed)

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        stem = [nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
        blocks = [Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)]
        return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))

    def loss(self, model: nn.Module, step: int) -> Tensor:
        drawn = torch.randint(len(self.train), (self.ranks, self.batch), generator=self.generator)
        rows = self.train[drawn[self.rank]]
        return F.cross_entropy(model(self.images[rows]), self.labels[rows])

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        logits, labels = model(self.images[self.test]), self.labels[self.test]
        return {
            "loss": float(F.cross_entropy(logits, labels)),
            "accuracy": float((logits.argmax(1) == labels).float().mean()),
        }


@functools.cache
def docstrings(modules: int | None = None) -> Tensor:
    """The docstrings of the standard library's first top-level modules, or of all, as ASCII codes in int64."""
    texts = []
    for path in sorted(Path(os.__file__).parent.glob("*.py"))[:modules]:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                texts.append(ast.get_docstring(node) or "")
    text = "\n\n".join(text for text in texts if text)
    return torch.frombuffer(bytearray(text.encode("ascii", "ignore")), dtype=torch.uint8).long()


class DigitsTuning(Digits):
    """Digits, tested on a fifth of their training rows, which is held out: for the choice of a learning rate."""

    def __init__(self, rank: int, ranks: int, seed: int) -> None:
        super().__init__(rank, ranks, seed)
        held_out = len(self.train) // 5
        self.test, self.train = self.train[:held_out], self.train[held_out:]


class LanguageModel(Task):
    """A transformer of two layers that predicts the next character of docstrings; 8 pieces of 64 a rank."""

    batch, context, width, vocabulary = 8, 64, 64, 128
    modules: int | None = None

    def __init__(self, rank: int, ranks: int, seed: int) -> None:
        super().__init__(rank, ranks, seed)
        text = docstrings(self.modules)
        self.test, self.text = text[: len(text) // 10], text[len(text) // 10 :]
        self.generator = torch.Generator().manual_seed(seed)

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return Transformer(self.vocabulary, self.width, self.context)

    def pieces(self, text: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        windows = text[at[:, None] + torch.arange(self.context + 1)]
        return windows[:, :-1], windows[:, 1:]

    def loss(self, model: nn.Module, step: int) -> Tensor:
        last = len(self.text) - self.context - 1
        at = torch.randint(last, (self.ranks, self.batch), generator=self.generator)[self.rank]
        inputs, targets = self.pieces(self.text, at)
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        at = torch.linspace(0, len(self.test) - self.context - 1, 256).long()
        inputs, targets = self.pieces(self.test, at)
        logits = model(inputs).flatten(0, 1)
        return {
            "loss": float(F.cross_entropy(logits, targets.flatten())),
            "accuracy": float((logits.argmax(1) == targets.flatten()).float().mean()),
        }


class LanguageModelTuning(LanguageModel):
    """The same, tested on a tenth of the training text, which is held out: for the choice of a learning rate."""

    def __init__(self, rank: int, ranks: int, seed: int) -> None:
        super().__init__(rank, ranks, seed)
        held_out = len(self.text) // 10
        self.test, self.text = self.text[:held_out], self.text[held_out:]


class SmallLanguageModel(LanguageModel):
    """The same with less text: to try things out."""

    modules = 10


class SmallLanguageModelTuning(LanguageModelTuning):
    """The same, tested on a part of that text."""

    modules = 10


class Transformer(nn.Module):
    """Embeddings, two layers with causal attention, logits."""

    def __init__(self, vocabulary: int, width: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)
        self.register_buffer("mask", torch.full((context, context), -torch.inf).triu(1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits `[batch, context, vocabulary]` of the characters that follow."""
        x = self.tokens(tokens) + self.positions
        for layer in self.layers:
            x = layer(x, src_mask=self.mask)
        return self.head(self.norm(x))


TASKS: dict[str, type[Task]] = {
    "paper_ffnn": PaperFFNN,
    "small_ffnn": SmallFFNN,
    "click_through": ClickThrough,
    "small_click_through": SmallClickThrough,
    "digits": Digits,
    "digits_tuning": DigitsTuning,
    "language": LanguageModel,
    "language_tuning": LanguageModelTuning,
    "small_language": SmallLanguageModel,
    "small_language_tuning": SmallLanguageModelTuning,
}
