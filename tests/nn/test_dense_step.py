"""A step of the dense network: when an accumulated update ends."""

from types import SimpleNamespace

import torch

from persia.nn.dense_step import DenseStep, StepOptions


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(2, 1)

    def forward(self, dense, embeddings):
        return self.head(dense)


def train(network, value):
    batch = SimpleNamespace(dense=torch.full((4, 2), value), labels=torch.ones(4, 1), weight=4, dummy=False)
    network.forward_backward(batch, {}, all_reduce=True)
    return network.apply()


def test_discarded_gradients_are_in_no_update():
    torch.manual_seed(0)
    networks = [
        DenseStep(Net(), lambda p: torch.optim.SGD(p, 0.1), torch.device("cpu"), StepOptions(accumulation_steps=2))
        for _ in range(2)
    ]
    networks[1].model.load_state_dict(networks[0].model.state_dict())
    assert not train(networks[0], 7.0)
    networks[0].discard()
    for network in networks:
        assert [train(network, 1.0), train(network, 2.0)] == [False, True]
    assert torch.equal(networks[0].model.head.weight, networks[1].model.head.weight)
