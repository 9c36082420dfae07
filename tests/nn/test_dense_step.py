"""A step of the dense network: when an accumulated update ends, and losses that need more than logits."""

from types import SimpleNamespace

import pytest
import torch

from persia import IdFeature, Schema
from persia.errors import ConfigError
from persia.nn.dense_step import DenseStep, StepOptions
from persia.nn.output import ModelOutput

SCHEMA = Schema([IdFeature("user", 4)], dense_features=["a", "b"])


def samples(value, labels=1):
    return SimpleNamespace(
        dense=torch.full((4, 2), value), labels=torch.ones(4, labels), weights=None, groups=None, samples=4, dummy=False
    )


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(2, 1)

    def forward(self, dense, embeddings):
        return self.head(dense)


def train(network, value):
    network.forward_backward(samples(value), {}, all_reduce=True)
    return network.apply()


def test_discarded_gradients_are_in_no_update():
    torch.manual_seed(0)
    networks = [
        DenseStep(
            Net(), lambda p: torch.optim.SGD(p, 0.1), torch.device("cpu"), StepOptions(accumulation_steps=2), SCHEMA
        )
        for _ in range(2)
    ]
    networks[1].model.load_state_dict(networks[0].model.state_dict())
    assert not train(networks[0], 7.0)
    networks[0].discard()
    for network in networks:
        assert [train(network, 1.0), train(network, 2.0)] == [False, True]
    assert torch.equal(networks[0].model.head.weight, networks[1].model.head.weight)


class WithExtra(Net):
    def forward(self, dense, embeddings):
        return ModelOutput(self.head(dense), {"norm": self.head.weight.square().sum()})


class WithLoss(WithExtra):
    def loss(self, logits, labels, extra):
        return (logits - labels).square().mean() + extra["norm"]


def test_the_loss_gets_what_the_model_returned_beside_logits():
    model = WithLoss()
    step = DenseStep(model, lambda p: torch.optim.SGD(p, 0.1), torch.device("cpu"), StepOptions(), SCHEMA)
    batch = samples(1.0)
    logits, loss = step.forward_backward(batch, {}, all_reduce=False)
    expected = (logits - 1).square().mean() + model.head.weight.square().sum()
    torch.testing.assert_close(loss, expected.detach())
    assert torch.equal(step.logits(batch, {}), logits)


def test_a_model_output_without_a_loss_that_uses_it_is_refused():
    step = DenseStep(WithExtra(), lambda p: torch.optim.SGD(p, 0.1), torch.device("cpu"), StepOptions(), SCHEMA)
    batch = samples(1.0)
    with pytest.raises(ConfigError, match=r"WithExtra returned a ModelOutput.*loss\(logits, targets, extra\)"):
        step.forward_backward(batch, {}, all_reduce=True)
    two = Schema(SCHEMA.id_features, ["a", "b"], ["click", "buy"])
    step = DenseStep(WithExtra(), lambda p: torch.optim.SGD(p, 0.1), torch.device("cpu"), StepOptions(), two)
    with pytest.raises(ConfigError, match=r"logits of shape \[4, 1\]"):
        step.logits(samples(1.0, 2), {})
