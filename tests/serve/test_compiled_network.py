"""Compiled networks: the results of the eager one, with any weights and any number of rows."""

import threading

import pytest
import torch

from nn.test_models import inputs, schema
from persia.errors import ConfigError
from persia.nn import models
from persia.serve import compiled
from persia.serve.compiled import CompiledNetwork, compile_network, export_network
from persia.serve.flat_network import InputLayout, sample_inputs
from support.exported_networks import HISTORY, Branching, make


class Exported:
    """The exported program in place of compiled code."""

    def __init__(self, model, layout, tensors):
        self.module = export_network(model, layout, tensors).module()

    def boxed_run(self, tensors):
        return [self.module(*tensors)]


def exported(model, schema_, rows=3):
    example = inputs(schema_, rows=rows)
    layout = InputLayout(example[1])
    return CompiledNetwork(model, layout, Exported(model, layout, sample_inputs(layout.flat(*example))))


def check_rows(network, model, schema_):
    for rows in (0, 1, 2, 5, 33):
        x = inputs(schema_, rows=rows)
        expected = model(*x)
        scale = getattr(model, "temperature", None) or 1  # It divides what was rounded before.
        torch.testing.assert_close(network(*x), expected, rtol=0, atol=1e-6 / min(1, scale))


# Those with sequences, with shapes that depend on values, and with constants beside the weights.
@pytest.mark.parametrize("name", ["FFNN", "DeepFM", "HSTU", "TwoTower"])
def test_an_exported_network_takes_any_rows_and_other_weights(name):
    model, other = make(name), make(name)
    network = exported(model, HISTORY, rows=1)
    check_rows(network, model, HISTORY)
    before = network(*inputs(HISTORY))
    beside = network.with_weights(other.state_dict())
    check_rows(beside, other, HISTORY)
    assert torch.equal(network(*inputs(HISTORY)), before)
    network.load(other.state_dict())
    check_rows(network, other, HISTORY)
    with torch.no_grad():  # The weights are a copy.
        expected = network(*inputs(HISTORY))
        next(other.parameters()).add_(1)
        assert torch.equal(network(*inputs(HISTORY)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", models.__all__)
def test_every_model_can_be_exported(name):
    model, other = make(name), make(name)
    network = exported(model, HISTORY)
    check_rows(network, model, HISTORY)
    network.load(other.state_dict())
    check_rows(network, other, HISTORY)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compiled_code_serves_all_versions_and_is_compiled_once(tmp_path, monkeypatch, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    s = schema()
    first, second = (models.FFNN(s, hidden=(8,)).eval().to(device) for _ in range(2))
    example = inputs(s, rows=1, device=device)
    network = compile_network(first, example, tmp_path)
    assert network.compiled, network.problem
    for model in (first, second):
        network.load(model.state_dict())
        for rows in (0, 1, 2, 100):
            x = inputs(s, rows=rows, device=device)
            torch.testing.assert_close(network(*x), model(*x), rtol=0, atol=1e-6)

    def again(*_, **__):
        raise AssertionError("compiled again")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", again)
    assert compile_network(second, example, tmp_path).compiled
    # A narrower network has code of its own.
    narrow = compile_network(models.FFNN(s, hidden=(4,)).to(device), example, tmp_path)
    assert "compiled again" in narrow.problem
    assert [path.suffix for path in tmp_path.iterdir()] == [".pt2"]

    failures = []

    def call():
        x = inputs(s, rows=9, device=device)
        expected = [model(*x) for model in (first, second)]
        for _ in range(50):
            found = network(*x)
            if not any(torch.allclose(found, e, rtol=0, atol=1e-6) for e in expected):
                failures.append(found)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(50):
        network.load((first, second)[turn % 2].state_dict())
    for thread in threads:
        thread.join()
    assert not failures


def test_a_network_that_cannot_be_compiled_runs_eagerly(tmp_path, caplog):
    model, s = Branching(), schema()
    network = compile_network(model, inputs(s), tmp_path)
    assert not network.compiled
    assert [r.levelname for r in caplog.records if r.name == "persia.serve"] == ["WARNING"]
    assert "Branching runs eagerly, as it cannot be compiled: " in caplog.text
    assert network.problem in caplog.text
    x = inputs(s)
    assert torch.equal(network(*x), model(*x).logits)
    other = Branching()
    network.load(other.state_dict())
    assert torch.equal(network(*x), other(*x).logits)
    assert model.training  # The caller's network is as it was.


def test_a_compiler_that_fails_leaves_no_file(tmp_path, monkeypatch):
    def fails(_, *, package_path):
        with open(package_path, "w") as file:
            file.write("half")
        raise RuntimeError("no compiler\nlong text")

    monkeypatch.setattr(compiled.torch._inductor, "aoti_compile_and_package", fails)
    network = compile_network(make("FFNN"), inputs(HISTORY), tmp_path)
    assert network.problem == "RuntimeError: no compiler"
    assert not list(tmp_path.iterdir())


def test_weights_of_another_network_are_refused():
    s = schema()
    network = CompiledNetwork(models.FFNN(s).eval(), InputLayout(inputs(s)[1]), None)
    before = network(*inputs(s))
    for state in ({}, models.FFNN(s, hidden=(3,)).state_dict(), models.DeepFM(s).state_dict()):
        with pytest.raises(ConfigError, match=r"The weights do not fit FFNN; serve with the model that was trained"):
            network.load(state)
    assert torch.equal(network(*inputs(s)), before)
