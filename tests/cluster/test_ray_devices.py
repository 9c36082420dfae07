"""GPUs on Ray: NN workers choose their device themselves, and reserved GPUs are never left idle silently.

Ray believes in a GPU here; see `ray_here`.
"""

from __future__ import annotations

import logging

import pytest
import torch

import persia
from persia.errors import ConfigError

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from support.cluster_samples import make_trainer, options, reader

pytestmark = pytest.mark.usefixtures("ray_here")


def test_nn_workers_choose_their_device_whatever_the_driver_has(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # In this process only.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with caplog.at_level(logging.WARNING, "persia"), persia.cluster.Ray(options=options()) as cluster:
        trainer = make_trainer(cluster, device="auto")
        assert trainer.fit(reader(3)).steps == 3
        assert {p.device.type for p in trainer.model.parameters()} == {"cpu"}
        assert trainer.evaluate(reader(1)).rows > 0
    assert "Ray has GPUs (1), but RayOptions.gpus is 0" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_reserved_gpus_that_would_idle_are_an_error():
    with persia.cluster.Ray(options=options(gpus=1)) as cluster:
        with pytest.raises(ConfigError, match=r"RayOptions.gpus reserves 1 GPU .* would idle"):
            make_trainer(cluster, device="cpu")
        trainer = make_trainer(cluster, device="cuda")  # Without a GPU in this process.
        for _ in range(2):  # Also on new NN workers.
            with pytest.raises(ConfigError, match=r"sees no CUDA device in NN worker 0 on .* or set gpus=0") as raised:
                trainer.fit(reader(3))
            assert raised.value.fields["field"] == "gpus"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_gpus_of_a_placement_that_would_idle_are_an_error():
    """As with RayOptions.gpus. More GPUs than Ray has are refused before a process starts."""
    with persia.cluster.Ray(options=options(), place={"nn_worker": {"GPU": 1}}) as cluster:
        assert cluster.gpus == 1
        with pytest.raises(ConfigError, match=r"RayOptions.gpus reserves 1 GPU .* would idle"):
            make_trainer(cluster, device="cpu")
        with pytest.raises(ConfigError, match=r"sees no CUDA device in NN worker 0 on .* or set gpus=0"):
            make_trainer(cluster, device="cuda").fit(reader(3))
    with persia.cluster.Ray(nn_workers=2, options=options(), place={"nn_worker": {"GPU": 1}}) as cluster:
        with pytest.raises(ConfigError, match=r"NN worker 1 \(of 2\) cannot be placed: no host has GPU 1"):
            make_trainer(cluster, device="cuda")
        assert cluster._roles.processes is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("nn_workers", "gpus"), [(1, 1), (2, 0.5)], ids=["a GPU of its own", "two to a GPU"])
def test_nn_workers_train_on_the_gpus_that_are_reserved(nn_workers, gpus):
    data = reader(40)
    results = []
    for reserved, device in ((0, "cpu"), (gpus, "auto")):
        with persia.cluster.Ray(nn_workers=nn_workers, options=options(gpus=reserved)) as cluster:
            results.append(make_trainer(cluster, device=device).fit(data))
    assert results[0].steps == results[1].steps == 40 // nn_workers
    assert results[0].progressive.auc == pytest.approx(results[1].progressive.auc, abs=0.02)
