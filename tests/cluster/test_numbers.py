"""On Ray: several NN workers are one with a larger batch, compression, and resuming here what was saved there."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

import persia
from persia.modes import Sync

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from support.cluster_samples import global_losses, make_trainer, one_torch_thread, options, reader

pytestmark = pytest.mark.usefixtures("ray_here")


@pytest.mark.parametrize("nn_workers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_step_of_many_is_one_of_a_large_batch(nn_workers):
    """`reduction="global"`. Rows are float32, so float64 is exact only in the network, and where rows stay.

    float32: network and rows, all trained, within 1e-5 after 10 steps. float64: the network within 1e-9 after 50 steps,
    on rows that are looked up and pushed, but whose learning rate is too small for float32.
    """
    single = persia.cluster.Embedded(1)
    with one_torch_thread(), persia.cluster.Ray(2, 2, 1, nn_workers, options()) as cluster:
        for feature, dtype, steps, bound in (("trained", "float32", 10, 1e-5), ("fixed", "float64", 50, 1e-9)):
            work = partial(global_losses, feature=feature, dtype=dtype, steps=steps, parts=nn_workers)
            expected = work(single, 1)
            found = cluster.run(lambda work=work: work(cluster, nn_workers))
            for theirs in found:  # The same on each.
                for name, value in expected.items():
                    np.testing.assert_allclose(theirs[name], value, rtol=0, atol=bound, err_msg=f"{feature} {name}")
            assert any(np.ptp(value) > 100 * bound for value in expected.values())


@pytest.mark.slow
def test_compressed_rows_train_almost_alike():
    """float16 with a scale per row: other bits, and the same result."""
    with one_torch_thread():
        here = make_trainer(persia.cluster.Embedded(1))
        expected = here.fit(reader(40), reader(3, 2))
        with persia.cluster.Ray(2, 2, options=options(compression="fp16")) as cluster:
            there = make_trainer(cluster)
            found = there.fit(reader(40), reader(3, 2))
    assert found.stored_rows == expected.stored_rows
    assert found.progressive.log_loss != expected.progressive.log_loss
    assert found.progressive.log_loss == pytest.approx(expected.progressive.log_loss, abs=2e-4)
    assert found.evaluation.auc == pytest.approx(expected.evaluation.auc, abs=2e-3)


@pytest.mark.slow
def test_saved_here_resumed_there_and_back(tmp_path):
    """Embedded -> Ray -> Embedded gives the bits of one run; so does `load` into a trainer of its own."""
    data = reader(15)

    def resumed(directory: str, cluster: object) -> persia.Trainer:
        fresh = make_trainer(persia.cluster.Embedded(1))
        return persia.Trainer.resume(
            directory,
            fresh.model,
            optimizer=lambda params: torch.optim.Adam(params, 1e-2),
            cluster=cluster,
            options=fresh.options,
        )

    with one_torch_thread():
        whole = make_trainer(persia.cluster.Embedded(1))
        torch.manual_seed(1)
        expected = whole.fit(data)
        first = make_trainer(persia.cluster.Embedded(1))
        torch.manual_seed(1)
        first.fit(data, max_steps=4)
        first.save(str(tmp_path / "first"))
        with persia.cluster.Ray(1, 2, 1, 1, options()) as cluster:
            torch.manual_seed(99)
            second = resumed(str(tmp_path / "first"), cluster)
            assert second.fit(data, max_steps=5).global_step == 9
            second.save(str(tmp_path / "second"))
        with persia.cluster.Ray(1, 1, 1, 1, options()) as cluster:
            torch.manual_seed(99)
            third = make_trainer(cluster)
            third.load(str(tmp_path / "second"))
            assert third.fit(data, max_steps=2).global_step == 11
            third.save(str(tmp_path / "third"))
        torch.manual_seed(99)
        last = resumed(str(tmp_path / "third"), persia.cluster.Embedded(1))
        found = last.fit(data)
    assert found.progressive == expected.progressive
    assert found.global_step == expected.global_step == 15
    assert found.stored_rows == expected.stored_rows
    for a, b in zip(whole.model.parameters(), last.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
def test_counts_and_dropout_go_on_from_call_to_call():
    """Two calls of `fit` on two NN workers are one: what is counted, and what dropout draws on each of them."""
    data = reader(24)
    with (
        one_torch_thread(),
        persia.cluster.Ray(1, 1, 1, 2, options()) as one,
        persia.cluster.Ray(1, 1, 1, 2, options()) as two,
    ):
        whole, parts = make_trainer(one, Sync()), make_trainer(two, Sync())
        torch.manual_seed(1)
        expected = whole.fit(data)
        torch.manual_seed(1)
        parts.fit(data, max_steps=5)
        found = parts.fit(data)
        for name in ("staleness_mean", "staleness_max", "absent_rows", "global_step"):
            assert getattr(found, name) == getattr(expected, name), name
        assert found.progressive.auc == expected.progressive.auc
        assert parts.state.earlier == whole.state.earlier
        assert whole.state.earlier.lookups == 24
        for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
            assert torch.equal(a, b)
