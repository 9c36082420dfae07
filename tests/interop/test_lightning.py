"""Training with Lightning: the same steps as a loop of one's own, and checkpoints that continue bit by bit."""

import dataclasses
import os
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

import persia
from persia.errors import CheckpointError, ConfigError
from persia.modes import Hybrid, Sync
from persia.types import BucketMap

# Lightning itself uses what torch and its other dependencies have deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]
pl = pytest.importorskip(
    "lightning.pytorch", reason='Lightning is not installed: pip install "persia-recsys[lightning]"'
)

from lightning.pytorch.demos.boring_classes import BoringModel  # noqa: E402

from persia.interop.lightning import PersiaCallback, PrefetchLoader, RecommenderModule  # noqa: E402

READER = persia.data.synthetic(600, id_features=2, ids_per_feature=40, dense_features=2, dim=4, batch_size=50)


class Shuffled:
    """A reader with another order of batches in each epoch."""

    schema = READER.schema

    def batches(self, epoch=0, start=0):
        batches = list(READER)
        return (batches[i] for i in np.random.default_rng(epoch).permutation(len(batches))[start:])

    def __iter__(self):
        return self.batches()

    def fingerprint(self):
        return "shuffled"


SHUFFLED = Shuffled()


def make(mode=None, **options):
    torch.manual_seed(0)
    embeddings = persia.nn.EmbeddingCollection(
        READER.schema,
        optimizer=persia.optim.Adagrad(lr=0.05),
        mode=mode or Sync(),
        options=persia.nn.CollectionOptions(**options),
    )
    model = persia.nn.models.FFNN(READER.schema, hidden=(8,))
    return RecommenderModule(model, embeddings, optimizer=lambda params: torch.optim.Adam(params, 1e-2))


def trainer(folder, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    callbacks = [PersiaCallback(), *options.pop("callbacks", [])]
    options = {"max_epochs": 1, "enable_checkpointing": False, **quiet, **options}
    return pl.Trainer(default_root_dir=folder, callbacks=callbacks, num_sanity_val_steps=0, **options)


def rows_of(module):
    found = {}
    for name in READER.schema.resolved_tables():
        ids = persia.interop.table_ids(module.embeddings, name)
        read = module.embeddings.rows(name, ids, state=True)
        found[name] = [ids, read.values, read.state.values, read.state.update_count]
    return found


def assert_same(module, other):
    for name, tensor in module.model.state_dict().items():
        assert torch.equal(tensor, other.model.state_dict()[name]), name
    for ours, theirs in zip(rows_of(module).values(), rows_of(other).values(), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_lightning_takes_the_steps_of_a_loop_of_ones_own(tmp_path, accumulate):
    own = make(accumulation_steps=accumulate)
    optimizer = own.configure_optimizers()
    for number, batch in enumerate(own.embeddings.prefetch(READER), 1):
        (torch.nn.functional.binary_cross_entropy_with_logits(own(batch), batch.labels) / accumulate).backward()
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    module = make(accumulation_steps=accumulate)
    fit = trainer(tmp_path, accumulate_grad_batches=accumulate, log_every_n_steps=1)
    fit.fit(module, PrefetchLoader(module.embeddings, READER), PrefetchLoader(module.embeddings, READER))
    assert module.embeddings.global_step == 12 // accumulate
    assert module.embeddings.pushed.released == 0
    assert_same(module, own)
    metrics = fit.callback_metrics
    assert metrics["val_auc"] > 0.6
    assert metrics["persia/rows_applied"] > 100
    assert metrics["persia/staleness"] == 0


def test_the_loss_of_a_step_is_weighted_and_masked():
    label = persia.Label("click", missing="mask")
    schema = msgspec.structs.replace(READER.schema, labels=[label], sample_weight="weight")
    embeddings = persia.nn.EmbeddingCollection(schema, optimizer=persia.optim.Adagrad(lr=0.05), mode=Sync())
    model = persia.nn.models.FFNN(schema, hidden=(8,))
    module = RecommenderModule(model, embeddings, optimizer=lambda params: torch.optim.Adam(params, 1e-2))
    module.log = lambda *args, **kwargs: None
    plain = next(iter(READER))
    labels, weights = plain.labels.copy(), np.random.default_rng(0).random(len(plain), np.float32)
    labels[::3] = np.nan
    known = torch.from_numpy(np.where(np.isnan(labels[:, 0]), 0, weights))
    for batch in embeddings.prefetch([dataclasses.replace(plain, labels=labels, weights=weights)]):
        found = module.training_step(batch, 0)
        by_row = torch.nn.functional.binary_cross_entropy_with_logits(
            module(batch)[:, 0], batch.labels[:, 0].nan_to_num(), reduction="none"
        )
        torch.testing.assert_close(found, (by_row * known).sum() / known.sum())


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_checkpoints_continue_where_they_were_written(tmp_path):
    whole = make()

    def saving():
        options = {"every_n_train_steps": 5, "save_top_k": 2, "monitor": "step", "mode": "max"}
        saved = pl.callbacks.ModelCheckpoint(tmp_path / "one", "{step}", **options)
        return trainer(tmp_path, max_epochs=2, enable_checkpointing=True, callbacks=[saved])

    train, test = PrefetchLoader(whole.embeddings, SHUFFLED), PrefetchLoader(whole.embeddings, SHUFFLED)
    saving().fit(whole, train, test)
    position = train.state_dict()
    assert (position["epoch"], position["batch"], test.state_dict()["epoch"]) == (2, 0, 1)  # Tests are of epoch 0.
    # 24 steps: of 5, 10, 15 and 20 the last two are kept, with their rows.
    assert sorted(os.listdir(tmp_path / "one")) == ["step=15.ckpt", "step=15.rows", "step=20.ckpt", "step=20.rows"]
    path = tmp_path / "one" / "step=15.ckpt"
    resumed = make()
    trainer(tmp_path, max_epochs=2).fit(resumed, PrefetchLoader(resumed.embeddings, SHUFFLED), ckpt_path=path)
    assert resumed.embeddings.global_step == 24
    assert_same(resumed, whole)
    scores = torch.cat(trainer(tmp_path).predict(resumed, PrefetchLoader(resumed.embeddings, READER)))
    assert scores.shape == (600, 1)
    assert resumed.embeddings.global_step == 24  # Reading trains nothing.
    fresh = make()
    (tested,) = trainer(tmp_path, max_epochs=2).test(fresh, PrefetchLoader(fresh.embeddings, READER), ckpt_path=path)
    assert tested["test_auc"] > 0.6
    assert fresh.embeddings.global_step == 15
    os.rename(tmp_path / "one" / "step=15.rows", tmp_path / "away")
    with pytest.raises(CheckpointError, match=r"step=15\.rows"):
        trainer(tmp_path, max_epochs=2).test(make(), PrefetchLoader(fresh.embeddings, READER), ckpt_path=path)


def test_a_position_belongs_to_its_data(caplog):
    module = make()

    def drawn(data, state=None, most=100, **options):
        loader = PrefetchLoader(module.embeddings, data, **options)
        if state is not None:
            loader.load_state_dict(state)
        count = 0
        for count, pending in enumerate(loader, 1):
            pending.to(torch.device("cpu"))
            if count == most:
                break
        state = loader.state_dict()
        loader.close()
        return count, state

    def other(**changes):
        return dataclasses.replace(READER, **changes)

    _, state = drawn(READER, most=4)
    assert (state["epoch"], state["batch"]) == (0, 4)
    assert drawn(READER, state)[0] == 8
    assert not caplog.records
    assert drawn(other(seed=1), state)[0] == 12
    assert "Continuing the model on other data" in caplog.text
    with pytest.raises(ConfigError, match=r"batch_size changed in the middle of a pass.*restart_data=True"):
        drawn(other(batch_size=25), state)
    assert drawn(other(batch_size=25), state, restart_data=True)[0] == 24
    assert drawn(list(READER), state)[0] == 12


def test_rows_are_as_new_as_the_network_of_their_checkpoint(tmp_path, monkeypatch):
    module = make(Hybrid(4, warmup=0))  # Else the second lookup waits for the first push.
    worker, wait = type(module.embeddings.connection.worker), module.embeddings.await_pushes
    push, applied, waiting = worker.push, [], threading.Event()

    def late(self, header, contributions):
        waiting.wait(20)  # Until the checkpoint waits for this push.
        counts = push(self, header, contributions)
        applied.append(header.step)
        return counts

    def await_pushes():
        waiting.set()
        wait()
        waiting.clear()

    class Save(pl.Callback):
        def on_validation_batch_start(self, trainer, *_):
            assert len(applied) == trainer.global_step

        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step % 2:  # After step 3 there is a validation.
                if trainer.global_step == trainer.max_steps:
                    waiting.set()
                return
            trainer.save_checkpoint(tmp_path / "now.ckpt")
            assert len(applied) == trainer.global_step
            rows = persia.checkpoint.open(tmp_path / "now.rows")
            assert rows.global_step == trainer.global_step

    monkeypatch.setattr(worker, "push", late)
    monkeypatch.setattr(module.embeddings, "await_pushes", await_pushes)
    fit = trainer(tmp_path, max_steps=5, val_check_interval=3, limit_val_batches=2, callbacks=[Save()])
    fit.fit(module, PrefetchLoader(module.embeddings, READER), PrefetchLoader(module.embeddings, READER))
    assert len(applied) == 5


class OwnModule(pl.LightningModule):
    """A module of a user, without a base class of persia."""

    def __init__(self, tables):
        super().__init__()
        self.tables = tables
        self.net = torch.nn.Linear(10, 1)

    def training_step(self, batch, batch_idx):
        logits = self.net(torch.cat([*self.tables(batch).values(), batch.dense], 1))
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_module_of_ones_own(tmp_path):
    tables = make().embeddings
    module = OwnModule(tables)
    fit = trainer(tmp_path, precision="bf16-mixed")
    fit.fit(module, PrefetchLoader(tables, list(READER)))
    assert tables.global_step == 12
    with pytest.raises(ConfigError, match="has 0 embedding collections"):
        trainer(tmp_path).fit(BoringModel())


def test_gradients_of_scaled_losses_are_unscaled(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    mixed = pl.plugins.precision.MixedPrecision("16-mixed", "cpu", scaler)
    plain, module = make(), make()
    trainer(tmp_path).fit(plain, PrefetchLoader(plain.embeddings, READER))
    trainer(tmp_path, plugins=[mixed]).fit(module, PrefetchLoader(module.embeddings, READER))
    assert module.embeddings.grad_scaler is scaler
    for ours, theirs in zip(rows_of(module).values(), rows_of(plain).values(), strict=True):
        np.testing.assert_array_equal(ours[0], theirs[0])
        np.testing.assert_allclose(ours[2], theirs[2], rtol=0.2, atol=1e-4)  # The squares of the gradients.


def test_failures_of_the_data_end_the_run(tmp_path):
    def broken():
        yield from READER.batches(start=10)
        raise RuntimeError("the source has dried up")

    class Broken:
        def __iter__(self):
            return broken()

    module = make()
    with pytest.raises(RuntimeError, match="dried up"):
        trainer(tmp_path).fit(module, PrefetchLoader(module.embeddings, Broken()))
    trainer(tmp_path).fit(module, PrefetchLoader(module.embeddings, READER))  # Nothing is left behind.


def test_what_cannot_be_trained_is_refused(tmp_path):
    module = make()
    loader = PrefetchLoader(module.embeddings, READER)
    several = pl.Trainer(devices=2, accelerator="cpu", strategy="ddp", logger=False, default_root_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"2 processes.*Trainer\(devices=1.*persia\.cluster\.Ray\(nn_workers=2\)"):
        PersiaCallback().setup(several, module, "fit")
    with pytest.raises(ConfigError, match=r"CollectionOptions\(accumulation_steps=2\)"):
        trainer(tmp_path, accumulate_grad_batches=2).fit(module, loader)
    plain = pl.Trainer(
        max_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        default_root_dir=tmp_path,
        enable_checkpointing=False,
    )
    plain.fit(module, loader)
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    loader.close()  # Which the callback does otherwise.
    with pytest.raises(CheckpointError, match="saved without PersiaCallback"):
        trainer(tmp_path).fit(module, loader, ckpt_path=tmp_path / "plain.ckpt")
    with_rows = trainer(tmp_path, max_steps=1)
    with_rows.fit(module, loader)
    with_rows.save_checkpoint(tmp_path / "rows.ckpt")
    loader.close()
    with pytest.raises(CheckpointError, match="has rows, which only PersiaCallback reads"):
        plain.fit(module, loader, ckpt_path=tmp_path / "rows.ckpt")
    options = {"model": module.model, "embeddings": module.embeddings, "optimizer": torch.optim.Adam}
    RecommenderModule.load_from_checkpoint(tmp_path / "rows.ckpt", **options)  # The network alone.
    for data in (READER, torch.utils.data.DataLoader(list(READER), batch_size=None)):
        with pytest.raises(ConfigError, match=r"without rows; pass PrefetchLoader\(module\.embeddings, data\)"):
            trainer(tmp_path).fit(make(), data)
    with pytest.raises(ConfigError, match="Invalid optimizer"):
        RecommenderModule(module.model, module.embeddings, optimizer=torch.optim.SGD(module.model.parameters(), 0.1))
    ticket = next(iter(PrefetchLoader(module.embeddings, READER)))
    with pytest.raises(ConfigError, match=r'CollectionOptions\(device="cuda"\)'):
        ticket.to(torch.device("cuda"))


def test_the_directory_of_rows():
    from persia.interop.lightning.row_checkpoints import rows_directory

    assert rows_directory(Path("a/last.ckpt")) == "a/last.rows"
    assert rows_directory("s3://b/x") == "s3://b/x.rows"


def test_rows_that_move_meanwhile_are_no_checkpoint(tmp_path, monkeypatch):
    from persia.interop.lightning.row_checkpoints import save_tables

    embeddings = make().embeddings
    for batch in embeddings.prefetch([next(iter(READER))]):
        embeddings(batch)
    assert save_tables(embeddings, str(tmp_path / "all")) == embeddings.global_step
    monkeypatch.setattr(embeddings.connection.servers[0], "buckets", lambda: BucketMap.even(2))  # One PS has joined.
    with pytest.raises(CheckpointError, match="has 2 embedding PSs, and this process knows 1"):
        save_tables(embeddings, str(tmp_path / "some"))
    assert not list((tmp_path / "some").glob("step-*"))
