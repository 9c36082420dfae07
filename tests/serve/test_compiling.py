"""A predictor computes with compiled code in place of its network, version by version."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

import persia
from persia.errors import ConfigError
from persia.publish import PublishOptions
from persia.serve import Predictor, ServeOptions, compiling
from persia.serve.compiled import CompiledNetwork
from persia.serve.flat_network import InputLayout


class Code:
    """Counts its calls; the weights come before the inputs."""

    def __init__(self, model):
        self.model, self.calls = model, 0

    def boxed_run(self, tensors):
        self.calls += 1
        names = [name for name, _ in self.model.named_parameters()]
        weights, (dense, *values) = dict(zip(names, tensors, strict=False)), tensors[len(names) :]
        embeddings = dict(zip(["id_0", "id_1"], values, strict=True))
        return [torch.func.functional_call(self.model, weights, (dense, embeddings))]


@pytest.mark.parametrize("how", [True, "auto"])
def test_each_version_gets_the_code(tmp_path, monkeypatch, how):
    data = persia.data.synthetic(2000, id_features=2, dense_features=1, dim=4, batch_size=100)
    code, ready, places = None, threading.Event(), []

    def compile_network(model, example, cache_dir):
        nonlocal code
        assert ready.wait(60) or how is True
        places.append(str(cache_dir))
        code = Code(model)
        return CompiledNetwork(model, InputLayout(example[1]), code)

    monkeypatch.setattr(compiling, "compile_network", compile_network)
    if how is True:
        ready.set()

    def network():
        return persia.nn.models.FFNN(data.schema, hidden=(4,))

    trainer = persia.Trainer(
        network(),
        data.schema,
        optimizer=lambda params: torch.optim.Adam(params, 1e-2),
        embedding_optimizer=persia.optim.Adagrad(lr=0.1),
        options=persia.TrainerOptions(progress=False, publish=PublishOptions(str(tmp_path / "log"))),
    )
    trainer.fit(data, max_steps=3)
    batch = next(iter(data))
    options = ServeOptions(compile=how, cache_dir=str(tmp_path / "cache"), poll_seconds=3600.0)
    with Predictor(str(tmp_path / "log"), network(), options) as predictor:
        if how == "auto":
            predictor.predict(batch)
            assert code is None  # It serves while it is compiled.
            ready.set()
            for thread in threading.enumerate():
                if thread.name == "persia-compile":
                    thread.join()
        for steps in (3, 5):
            (expected,) = trainer.predict([batch])
            found = predictor.predict(batch)
            assert found.step == steps
            np.testing.assert_allclose(found.probabilities, expected, rtol=0, atol=1e-6)
            trainer.fit(data, max_steps=2)
            predictor.refresh()
        assert code.calls == 2
    assert places == [str(tmp_path / "cache" / "compiled")]


def test_other_precisions_run_eagerly(caplog):
    data = persia.data.synthetic(100, id_features=2, dim=4, batch_size=100)
    options = compiling.CompilerOptions(True, None, torch.device("cpu"), "bf16")
    network = type("Network", (), {"compute": None})()
    compiling.Compiler(data.schema, options).adopt(network)
    assert network.compute is None
    assert "The network runs eagerly: its precision is bf16" in caplog.text
    with pytest.raises(ConfigError, match="compile"):
        ServeOptions(compile="maybe")
