"""`run_on_rank0`: one NN worker acts, and all know its result, with its type, or its error."""

from concurrent.futures import ThreadPoolExecutor
from types import NoneType
from typing import NamedTuple

import pytest
import torch

from persia.dense import AllReduce
from persia.errors import PersiaError
from persia.modes import Gba, Mode
from persia.nn.replicas import SingleReplica
from persia.testing.thread_replicas import Meeting, ThreadReplicas
from support.processes import Processes

pytestmark = pytest.mark.processes


class Place(NamedTuple):
    epoch: int
    position: int


CASES = [(False, bool), (7, int), ("", str), (None, NoneType), (Gba(8), Mode | None), ([Place(1, 2)], list[Place])]


def ask(rank, replicas):
    """All results, and the error of a function that fails; the result of another rank's function is never seen."""
    found = [
        replicas.run_on_rank0(lambda value=value: value if rank == 0 else pytest.fail("on rank 1"), kind)
        for value, kind in CASES
    ]
    with pytest.raises((PersiaError, OSError)) as caught:
        replicas.run_on_rank0(fail, bool)
    return found, type(caught.value), str(caught.value), replicas.run_on_rank0(lambda: rank, int)


def fail():
    raise OSError("The disk is full.")


def ask_all_reduce(rank):
    return ask(rank, AllReduce(torch.nn.Linear(1, 1)))


def with_processes():
    with Processes(2) as processes:
        return processes.run(ask_all_reduce)


def with_threads():
    meeting = Meeting(2, timeout=60.0)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: ask(rank, ThreadReplicas(torch.nn.Linear(1, 1), rank, meeting)), range(2)))


@pytest.mark.parametrize("run", [with_processes, with_threads])
def test_all_get_the_result_of_the_first_and_its_error(run):
    expected = [value for value, _ in CASES]
    (first, kind, error, rank), (second, other_kind, other_error, other_rank) = run()
    assert first == second == expected
    assert list(map(type, second)) == list(map(type, expected))
    assert isinstance(second[-1][0], Place)
    assert (kind, error) == (OSError, "The disk is full.")
    assert other_kind is PersiaError
    assert "NN worker" in other_error
    assert other_error.endswith("The disk is full.")
    assert rank == other_rank == 0


def test_a_single_one_is_the_first():
    found, kind, error, rank = ask(0, SingleReplica(torch.nn.Linear(1, 1)))
    assert (found, kind, error, rank) == ([value for value, _ in CASES], OSError, "The disk is full.", 0)
