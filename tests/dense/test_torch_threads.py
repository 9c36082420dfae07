"""The number of torch's threads: chosen where the user has not said it, kept where he has."""

import logging
import os
import subprocess
import sys
import threading

import pytest
import torch

import persia
from persia.cluster import Embedded
from persia.dense.torch_threads import LARGE, TorchThreads, default_torch_threads, shorten_spinning
from persia.nn import EmbeddingCollection, transfer
from persia.nn.models import DIN, FFNN
from persia.openmp import SPINS, WAITING
from persia.testing import Threads

CORES = len(os.sched_getaffinity(0))
SCHEMA = persia.Schema([persia.IdFeature("item", dim=4)])


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    """As on a machine where nobody has said anything."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", *WAITING):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(TorchThreads, "_set", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


def make_trainer(cluster=None):
    return persia.Trainer(
        FFNN(SCHEMA, hidden=(2,)),
        SCHEMA,
        optimizer=lambda params: torch.optim.SGD(params, 0.1),
        embedding_optimizer=persia.optim.SGD(lr=0.1),
        mode=persia.modes.Sync(),
        cluster=cluster,
        options=persia.TrainerOptions(progress=False),
    )


def test_a_trainer_leaves_half_of_the_cores_to_others(caplog):
    with caplog.at_level(logging.INFO, "persia.trainer"):
        trainer = make_trainer()
        make_trainer()
    assert torch.get_num_threads() == 4
    assert [r.message for r in caplog.records] == [
        "torch computes with 4 of 8 cores, which leaves the others to lookups, updates and reading; "
        "OMP_NUM_THREADS=8 gives it all."
    ]
    assert {f.name: f.value for f in trainer.monitor.observe().figures}["nn_torch_threads"] == 4


def test_on_two_cores_and_on_one_it_is_one_thread(monkeypatch):
    for cores in (2, 1):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        torch.set_num_threads(cores)
        TorchThreads()
        assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("cores", "half", "more"), [(1, 1, 1), (2, 1, 2), (3, 1, 3), (4, 2, 3), (8, 4, 6), (16, 8, 12)]
)
def test_a_large_network_has_more_threads_if_they_sleep_soon(cores, half, more, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv("GOMP_SPINCOUNT", str(SPINS))
    torch.set_num_threads(cores)
    threads = TorchThreads()
    assert torch.get_num_threads() == half
    threads.suit(LARGE // 64 - 1, 64)
    assert torch.get_num_threads() == half
    threads.suit(LARGE // 64, 64)
    assert torch.get_num_threads() == more
    TorchThreads()  # The number of the one before is not the user's.
    assert torch.get_num_threads() == half


def test_a_number_that_is_set_after_a_trainer_was_made_is_kept_for_a_large_network(monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", str(SPINS))
    threads = TorchThreads()
    torch.set_num_threads(5)
    threads.suit(LARGE, 1)
    assert torch.get_num_threads() == 5
    TorchThreads().suit(LARGE, 1)
    assert torch.get_num_threads() == 5


def test_a_trainer_suits_its_threads_to_its_first_batch(monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", str(SPINS))
    trainer = make_trainer()
    monkeypatch.setattr("persia.dense.torch_threads.LARGE", 2 * sum(p.numel() for p in trainer.model.parameters()))
    for rows, threads in ((1, 4), (2, 6)):
        trainer = make_trainer()
        columns = {"item": [1] * rows, "label": [1] * rows}
        trainer.fit([persia.Batch.from_columns(SCHEMA, columns)])
        assert torch.get_num_threads() == threads


def test_a_history_counts_with_all_its_events(monkeypatch):
    past = persia.IdFeature("past", dim=4, table="item", pooling=None, max_length=3)
    schema = persia.Schema([persia.IdFeature("item", dim=4), past])
    trainer = persia.Trainer(
        DIN(schema),
        schema,
        optimizer=lambda params: torch.optim.SGD(params, 0.1),
        embedding_optimizer=persia.optim.SGD(lr=0.1),
        options=persia.TrainerOptions(progress=False),
    )
    asked = []
    monkeypatch.setattr(trainer.step.threads, "suit", lambda *arguments: asked.append(arguments))
    trainer.fit([persia.Batch.from_columns(schema, {"item": [1, 2], "past": [[1], [2, 3, 4]], "label": [1, 0]})] * 2)
    assert asked == [(sum(parameter.numel() for parameter in trainer.model.parameters()), 2 * 3)]


@pytest.mark.parametrize("spins", ["", "300000", "0", "INFINITE"])
def test_threads_that_spin_for_long_or_sleep_at_once_have_half_of_the_cores(spins, monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", spins)
    TorchThreads().suit(LARGE, 1)
    assert torch.get_num_threads() == 4


@pytest.mark.processes
@pytest.mark.parametrize(
    ("first", "environment", "spins"),
    [
        ("persia", {}, str(SPINS)),
        ("torch", {}, "None"),
        ("persia", {"GOMP_SPINCOUNT": "7"}, "7"),
        ("persia", {"OMP_WAIT_POLICY": "active"}, "None"),
    ],
)
def test_importing_persia_before_torch_shortens_spinning(first, environment, spins):
    code = f"import os, {first}, persia, torch; print(os.environ.get('GOMP_SPINCOUNT'))"
    kept = {k: v for k, v in os.environ.items() if k not in WAITING} | environment
    done = subprocess.run([sys.executable, "-c", code], env=kept, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == spins


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_what_the_environment_says_is_kept(name, monkeypatch):
    monkeypatch.setenv(name, "8")
    make_trainer()
    assert torch.get_num_threads() == 8


def test_a_smaller_number_and_one_that_is_set_later_are_kept():
    torch.set_num_threads(7)
    trainer = make_trainer()
    assert torch.get_num_threads() == 7
    torch.set_num_threads(8)
    trainer.fit([persia.Batch.from_columns(SCHEMA, {"item": [1, 2], "label": [1, 0]})])
    assert torch.get_num_threads() == 8


def test_nn_workers_of_one_process_share():
    def work(member):
        make_trainer(member)
        return torch.get_num_threads()

    assert Threads(nn_workers=2).run(work) == [2, 2]
    assert default_torch_threads(16) == 1


def test_in_a_process_group_whoever_made_it_has_chosen(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        make_trainer(Embedded())
        assert torch.get_num_threads() == 8
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.processes
def test_the_default_of_torch_is_recognised():
    """In a fresh process, where nobody has set anything."""
    code = """
import os, torch
from persia.dense.torch_threads import TorchThreads
before = torch.get_num_threads()
TorchThreads()
print(before, torch.get_num_threads(), len(os.sched_getaffinity(0)))
"""
    unset = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", *WAITING)
    environment = {k: v for k, v in os.environ.items() if k not in unset}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    before, after, cores = map(int, done.stdout.split())
    assert before <= cores  # Of cores with two hardware threads each torch takes one.
    assert after == (max(1, cores // 2) if before == cores else before)


SPINNING = """
import sys, threading, time, torch
from persia.dense.torch_threads import shorten_spinning

torch.set_num_threads({threads})
values = torch.ones(1 << 18)


def milliseconds():
    '''Processor time of the process, while it sleeps after an operation of all threads.'''
    spent = []
    for _ in range(20):
        values.neg_()
        begin = time.process_time()
        time.sleep(0.02)
        spent.append(time.process_time() - begin)
    return 1e3 * sum(spent) / len(spent)


before, done = milliseconds(), threading.Event()
thread = threading.Thread(target=lambda: (shorten_spinning(), done.wait()))
thread.start()
time.sleep(0.1)
meanwhile = milliseconds()
done.set()
thread.join()
print(before, meanwhile, milliseconds())
"""


@pytest.mark.processes
@pytest.mark.skipif(CORES < 2 or sys.platform != "linux", reason="needs two cores and GNU's OpenMP")
def test_threads_of_torch_spin_less_while_a_thread_has_asked_for_it():
    kept = {k: v for k, v in os.environ.items() if k not in WAITING}
    code = SPINNING.format(threads=CORES)
    done = subprocess.run([sys.executable, "-c", code], env=kept, capture_output=True, text=True, check=True)
    before, meanwhile, after = map(float, done.stdout.split())
    assert meanwhile < 0.4 * max(before, after)


@pytest.mark.processes
@pytest.mark.skipif(CORES < 2 or sys.platform != "linux", reason="needs two cores and GNU's OpenMP")
def test_threads_of_torch_spin_less_if_persia_is_imported_first():
    kept = {k: v for k, v in os.environ.items() if k not in WAITING}
    # Only the number before the thread of the script counts here.
    code = SPINNING.format(threads=CORES)
    spent = []
    for first in ("persia", "torch"):
        done = subprocess.run(
            [sys.executable, "-c", f"import {first}{code}"], env=kept, capture_output=True, text=True, check=True
        )
        spent.append(float(done.stdout.split()[0]))
    assert spent[0] < 0.4 * spent[1]


@pytest.mark.parametrize("name", WAITING)
def test_what_the_environment_says_of_waiting_is_kept(name, monkeypatch):
    for other in WAITING:
        monkeypatch.delenv(other, raising=False)
    operations = []
    monkeypatch.setattr(torch, "ones", lambda *_: operations.append(1) or torch.zeros(1))
    shorten_spinning()
    assert operations
    operations.clear()
    monkeypatch.setenv(name, "1000")
    shorten_spinning()
    assert not operations


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("trains", [True, False])
def test_the_thread_that_looks_up_asks_for_it_beside_a_network_on_the_cpu(on_host, trains, monkeypatch):
    asked = []
    monkeypatch.setattr(transfer, "shorten_spinning", lambda: asked.append(threading.current_thread().name))
    embeddings = EmbeddingCollection(SCHEMA, optimizer=persia.optim.SGD(lr=0.1)).train(trains)
    embeddings._transfer._on_host = embeddings._expander.on_host = on_host
    for _ in embeddings.prefetch([persia.Batch.from_columns(SCHEMA, {"item": [1, 2], "label": [1, 0]})]):
        pass
    assert asked == ["persia-lookup"] * on_host
