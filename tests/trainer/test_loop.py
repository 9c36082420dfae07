"""The training loop with parts that only note what is called."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from persia.trainer.loop import TrainingLoop


def make_loop(nn_workers, batches, error=ZeroDivisionError):
    """A loop over so many batches, whose last one fails in its forward pass; and its network."""
    network = mock.MagicMock()
    network.replicas.nn_workers = nn_workers
    network.replicas.stop = False
    network.forward_backward.side_effect = [
        *([(torch.zeros(1, 1), torch.tensor(0.0))] * (batches - 1)),
        error,
    ]
    network.apply.return_value = False  # In the middle of an accumulated update.
    embeddings = mock.MagicMock()
    embeddings.prefetch.side_effect = lambda *_, **__: (SimpleNamespace(samples=4, batch_id=1) for _ in range(batches))
    state = SimpleNamespace(position=0, global_step=0, local_batch=4, mode=None)
    return TrainingLoop(state, network, embeddings, mock.MagicMock(), lambda: False, None), network


@pytest.mark.parametrize("nn_workers", [1, 2])
def test_gradients_of_an_unfinished_update_do_not_leak(nn_workers):
    """One NN worker applies them, as the PSs do; several cannot without the others, and begin anew."""
    loop, network = make_loop(nn_workers, batches=3)
    with pytest.raises(ZeroDivisionError):
        loop.synchronous(mock.MagicMock(), None, lambda: False)
    assert network.finish.called == (nn_workers == 1)
    assert network.discard.called == (nn_workers == 2)


@pytest.mark.parametrize("error", [StopIteration, GeneratorExit, KeyboardInterrupt])
def test_an_error_of_the_loop_is_raised_as_it_is(error):
    """It is thrown into the generator of the training pass, where some errors have a meaning of their own."""
    loop, _ = make_loop(2, batches=3, error=error)
    with pytest.raises(error):
        loop.synchronous(mock.MagicMock(), None, lambda: False)
