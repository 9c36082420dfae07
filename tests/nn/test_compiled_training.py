"""A compiled network trains what the network trains, and no batch but the first makes code.

The compiler of C++ is replaced: it takes a minute. What torch traces, and when, stays.
"""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.debugging import aot_eager

import persia
from persia.dense import AllReduce
from persia.errors import ConfigError, PersiaError
from persia.nn import compiled_training
from persia.nn.dense_step import DenseStep, StepOptions
from support.staging import as_on_a_gpu

SCHEMA = persia.Schema(
    [
        persia.IdFeature("item", dim=4),
        persia.IdFeature("tags", dim=4, table="item", pooling="mean"),
        persia.IdFeature("last", dim=4, table="item", pooling=None, max_length=2),
    ],
    dense_features=["price"],
    labels=["click"],
)


class Network(torch.nn.Module):
    """All features side by side; with BatchNorm, which no padding may reach."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(17)
        self.layers = torch.nn.Sequential(torch.nn.Linear(17, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def forward(self, dense, embeddings):
        last = embeddings["last"]
        sequence = torch.where(last.mask.unsqueeze(2), last.values, 0.0).flatten(1)
        values = torch.cat([dense, embeddings["item"], embeddings["tags"], sequence], 1)
        return self.layers(self.norm(values))


class InParts(Network):
    """With lines that torch.compile cannot compile."""

    def forward(self, dense, embeddings):
        if embeddings["item"].sum().item() > 1e9:
            return dense
        return super().forward(dense, embeddings)


def batch_of(size, seed):
    rng = np.random.default_rng(seed)
    offsets = np.arange(0, 2 * size + 1, 2, dtype=np.int64)

    def ids(count):
        return rng.integers(0, 30, count).astype(np.uint64)

    return persia.Batch(
        {
            "item": persia.IdColumn(ids(size)),
            "tags": persia.IdColumn(ids(2 * size), offsets),
            "last": persia.IdColumn(ids(2 * size), offsets),
        },
        rng.random((size, 1), np.float32),
        (rng.random((size, 1)) < 0.5).astype(np.float32),
    )


@pytest.fixture
def compiled(monkeypatch):
    """The graphs that were compiled, each with the sizes of the batches that have run it; without inductor."""
    graphs = []

    def backend(graph, inputs, **_):
        sizes, made = [], aot_eager(graph, inputs)
        graphs.append(sizes)

        def run(*arguments):
            sizes.append(next(len(a) for a in arguments if isinstance(a, torch.Tensor) and a.shape[1:] == (4,)))
            return made(*arguments)

        return run

    monkeypatch.setattr(compiled_training, "BACKEND", backend)
    torch._dynamo.reset()
    yield graphs
    torch._dynamo.reset()


class Counting(Network):
    """Its code fits one call: the number of calls is a constant of it."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, dense, embeddings):
        self.calls += 1
        return super().forward(dense, embeddings) * self.calls


def trained(sizes, compile_mode=None, network=Network, before=lambda size: None, *, averaged=False, on_gpu=False):
    """Losses, parameters, and rows of a run over batches of these sizes."""
    torch.manual_seed(0)
    step = DenseStep(
        network(),
        lambda parameters: torch.optim.Adam(parameters, 0.01),
        torch.device("cpu"),
        StepOptions(compile=compile_mode),
        SCHEMA,
    )
    replicas = AllReduce(step.trained, 1) if averaged else None
    step.replicas = replicas or step.replicas
    embeddings = persia.nn.EmbeddingCollection(SCHEMA, optimizer=persia.optim.Adagrad(lr=0.1), mode=persia.modes.Sync())
    if on_gpu:
        as_on_a_gpu(embeddings)
    losses = []
    step.model.train()
    for batch in embeddings.prefetch((batch_of(size, seed) for seed, size in enumerate(sizes)), replicas):
        before(len(batch))
        _, loss = step.forward_backward(batch, embeddings(batch), all_reduce=True)
        step.apply()
        losses.append(loss.item())
    rows = embeddings.rows("item", np.arange(30, dtype=np.uint64)).values
    return losses, step.model.state_dict(), rows


@pytest.mark.parametrize(("mode", "on_gpu"), [("default", False), ("reduce-overhead", False), ("default", True)])
def test_a_compiled_network_trains_the_same(compiled, mode, on_gpu):
    sizes = [16, 16, 17, 7, 9, 17]
    losses, parameters, rows = trained(sizes, mode, on_gpu=on_gpu)
    expected, others, other_rows = trained(sizes)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert list(parameters) == list(others)  # Those of the network itself.
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter, others[name], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(rows, other_rows, rtol=1e-4, atol=1e-5)
    # A CUDA graph has one size.
    assert compiled == {"default": [sizes], "reduce-overhead": [[16, 16], [17, 17]]}[mode]


def test_whole_batches_make_code_again_if_it_does_not_fit(compiled):
    losses, _, _ = trained([16, 7, 16], "default", Counting)
    assert compiled == [[16], [16]]
    np.testing.assert_allclose(losses, trained([16, 7, 16], None, Counting)[0], rtol=1e-5)


def test_gradients_of_a_compiled_network_are_averaged(compiled):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        losses, parameters, _ = trained([16, 16, 7], "default", averaged=True)
    finally:
        dist.destroy_process_group()
    expected, others, _ = trained([16, 16, 7])
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert list(parameters) == list(others)
    assert len(compiled) == 1


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_smaller_batch_makes_no_code(compiled, mode):
    numbers = []
    trained([16, 16, 7, 2, 16, 3], mode, before=lambda _: numbers.append(len(compiled)))
    assert numbers == [0, 1, 1, 1, 1, 1]
    assert len(compiled) == 1


def test_a_batch_of_one_sample_is_computed_as_it_is(compiled):
    """Torch would make code for it that fits no other batch."""

    class Plain(Network):
        def forward(self, dense, embeddings):
            return self.layers(
                torch.cat([dense, *(embeddings[name] for name in ("item", "tags"))], 1).repeat(1, 2)[:, :17]
            )

    trained([1, 16, 1, 16], "default", Plain)
    assert len(compiled) == 1


def test_another_number_of_threads_makes_code_once(compiled):
    """Compiled code depends on it, and a pass that begins to look up ahead changes it."""
    threads = torch.get_num_threads()
    order = iter([1, 1, 2, 2, 1, 2])
    try:
        trained([16] * 6, "default", before=lambda _: torch.set_num_threads(next(order)))
    finally:
        torch.set_num_threads(threads)
    assert len(compiled) == 2


def test_what_cannot_be_compiled_is_named(compiled, caplog):
    with caplog.at_level(logging.WARNING, "persia.nn"):
        losses, _, _ = trained([16, 16, 8], "default", InParts)
    (record,) = [r for r in caplog.records if "several parts" in r.getMessage()]
    assert "item()" in record.getMessage()
    assert "TORCH_LOGS=graph_breaks" in record.getMessage()
    np.testing.assert_allclose(losses, trained([16, 16, 8], None, InParts)[0], rtol=1e-5)


def test_a_compiler_that_fails_is_an_error_that_says_what_to_do(monkeypatch):
    def fails(graph, inputs, **_):
        raise FileNotFoundError("no g++ here")

    monkeypatch.setattr(compiled_training, "BACKEND", fails)
    torch._dynamo.reset()
    with pytest.raises(PersiaError, match=r"compile=.default.*: torch.compile has failed: .*no g\+\+ here"):
        trained([16], "default")
    torch._dynamo.reset()


def test_evaluation_and_dummy_batches_make_no_code(compiled):
    step = DenseStep(
        Network(), lambda p: torch.optim.SGD(p, 0.1), torch.device("cpu"), StepOptions(compile="default"), SCHEMA
    )
    embeddings = persia.nn.EmbeddingCollection(SCHEMA, optimizer=persia.optim.SGD(lr=0.1)).eval()
    for batch in embeddings.prefetch([batch_of(16, 0)]):
        assert step.logits(batch, embeddings(batch)).shape == (16, 1)
        batch.dummy = True
        step.replicas.nn_workers = 2  # So that the batch takes part in a collective.
        step.forward_backward(batch, embeddings(batch), all_reduce=True)
    assert compiled == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compile": "fast"}, "expected one of: default, reduce-overhead"),
        ({"compile": True}, "expected one of: default, reduce-overhead"),
        ({"compile": "reduce-overhead", "accumulation_steps": 2}, 'Use compile = "default"'),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(ConfigError, match=message) as raised:
        persia.TrainerOptions(**options)
    assert raised.value.fields["field"] == "compile"


@pytest.mark.parametrize(
    ("mode", "schedule"),
    [
        (persia.modes.Async(), []),
        (persia.modes.Sync(), [(5, persia.modes.Async())]),
        (persia.modes.Auto(persia.modes.Async()), []),
    ],
    ids=["begin", "schedule", "auto"],
)
def test_cuda_graphs_are_refused_in_modes_with_dense_pss(compiled, mode, schedule):
    with pytest.raises(ConfigError, match=r'"reduce-overhead" does not go with the mode Async: .* "default"') as raised:
        persia.Trainer(
            Network(),
            SCHEMA,
            optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
            embedding_optimizer=persia.optim.Adagrad(lr=0.1),
            mode=mode,
            options=persia.TrainerOptions(
                device="cpu", compile="reduce-overhead", progress=False, mode_schedule=schedule
            ),
        )
    assert raised.value.fields["field"] == "compile"
    assert compiled == []


def test_a_trainer_compiles_its_network(compiled, tmp_path):
    batches = [batch_of(16, seed) for seed in range(3)] + [batch_of(5, 3)]
    found = []
    for mode in ("default", None):
        torch.manual_seed(0)
        trainer = persia.Trainer(
            Network(),
            SCHEMA,
            optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
            embedding_optimizer=persia.optim.Adagrad(lr=0.1),
            mode=persia.modes.Sync(),
            options=persia.TrainerOptions(
                device="cpu", compile=mode, progress=False, checkpoint_dir=str(tmp_path / str(mode))
            ),
        )
        trainer.fit(batches)
        found.append(np.concatenate([np.asarray(part) for part in trainer.predict(batches)]))
    assert len(compiled) == 1
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-5)
