"""The state of an NN worker that has stopped as others died: it counts what those have lost."""

import msgspec
import pytest
import torch

import persia
from persia.errors import NNWorkersDiedError
from persia.trainer.driver import _Work
from persia.trainer.progress import TrainedRows
from persia.trainer.run_state import captured
from persia.trainer.state import RunTotals
from persia.types import NO_LOSSES, Losses

SCHEMA = persia.Schema([persia.IdFeature("item", dim=4)])


def make():
    return persia.Trainer(
        persia.nn.models.FFNN(SCHEMA, hidden=(2,)),
        SCHEMA,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        embedding_optimizer=persia.optim.SGD(lr=0.1),
    )


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("lost", [Losses(3, 24, 1), NO_LOSSES])
def test_what_the_dead_have_lost_is_counted_once(rank, lost):
    trainer = make()
    trainer.state.rank = rank
    trainer.state.earlier = RunTotals(lookups=5)  # From before all NN workers started; NN worker 0 has it.

    def fit_here(*_, **__):
        raise NNWorkersDiedError("NN workers 2 have died.", ranks=[2], lost=lost)

    trainer.fit_here = fit_here
    state = captured(trainer.step, trainer.state, TrainedRows(0, 0.0))
    trainer.trained_here = TrainedRows(8, 1.0)
    found = _Work(lambda: trainer, None, state, {"epochs": 1, "max_steps": None})()
    counts = msgspec.convert(found.state.training["counts"], RunTotals)
    assert counts.lookups == (5 if rank == 0 else 0)
    assert (counts.pushed.lost_batches, counts.pushed.lost_rows, counts.pushed.lost_gradients) == lost
