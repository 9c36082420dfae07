"""A PS refuses late pushes of NN workers that have died, in every mode with all-reduce."""

import numpy as np
import pytest

from persia.errors import StalePushError
from persia.modes import Hybrid, Sync
from persia.optim import SGD
from persia.ps import EmbeddingServer, ServerOptions
from persia.schema import Table
from persia.types import Gradients, PackedGradients, PushHeader

IDS = np.arange(2, dtype=np.uint64)
GRADIENTS = PackedGradients.of({"item": Gradients(IDS, np.ones((2, 4), np.float32))})


@pytest.mark.parametrize(
    ("mode", "nn_workers"), [(Sync(), 1), (Hybrid(4), 1), (Hybrid(4, combine=False), 2), (Sync(), 2), (Hybrid(4), 2)]
)
def test_a_push_of_an_earlier_generation_changes_nothing(mode, nn_workers):
    options = ServerOptions(nn_workers=nn_workers, timeout=5.0)
    server = EmbeddingServer({"item": Table("item", 4)}, SGD(1.0), mode, 1, 1, options)
    server.switch(mode, 1, 0)
    rows = server.lookup({"item": IDS}, True)["item"].copy()
    server.switch(mode, 2, 0)
    for parts in (1, 2):
        with pytest.raises(StalePushError, match="generation 1"):
            server.push(PushHeader(1, 0, 1, 0, 2, parts=parts), GRADIENTS)
    assert server.lookup({"item": IDS}, False)["item"].tolist() == rows.tolist()


def test_a_push_of_the_current_or_a_later_generation_is_applied():
    server = EmbeddingServer({"item": Table("item", 4)}, SGD(1.0), Sync(), 1, 1)
    server.switch(Sync(), 2, 0)
    server.lookup({"item": IDS}, True)
    for generation in (2, 3):
        assert server.push(PushHeader(generation, 0, 1, 0, 2), GRADIENTS)["item"].applied == 2
