"""The number of torch's threads: chosen where the user has not said it, kept where he has."""

import logging
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

import persia
from persia.cluster import Embedded
from persia.dense import torch_threads
from persia.dense.torch_threads import BusyCores, TorchThreads, default_torch_threads, shorten_spinning
from persia.nn import EmbeddingCollection, transfer
from persia.nn.models import FFNN
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
    monkeypatch.setattr(TorchThreads, "_last", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


def make_trainer(cluster=None, mode=None):
    return persia.Trainer(
        FFNN(SCHEMA, hidden=(2,)),
        SCHEMA,
        optimizer=lambda params: torch.optim.SGD(params, 0.1),
        embedding_optimizer=persia.optim.SGD(lr=0.1),
        mode=mode or persia.modes.Hybrid(1, warmup=0),
        cluster=cluster,
        options=persia.TrainerOptions(progress=False),
    )


class Counting:
    """Batches, and the number of torch's threads at each step."""

    def __init__(self, trainer, batches=3):
        self.threads = []
        step = trainer.step.optimizer.step
        trainer.step.optimizer.step = lambda: (self.threads.append(torch.get_num_threads()), step())[1]
        self.data = [persia.Batch.from_columns(SCHEMA, {"item": [1, 2], "label": [1, 0]})] * batches
        trainer.fit(self.data)


def test_beside_lookups_that_run_ahead_torch_has_a_core_less(caplog):
    trainer = make_trainer()
    assert torch.get_num_threads() == 8
    with caplog.at_level(logging.INFO, "persia.trainer"):
        assert Counting(trainer).threads == [7] * 3
    assert torch.get_num_threads() == 8
    assert [r.message for r in caplog.records if "torch uses" in r.message] == [
        "torch uses 7 of 8 cores, as lookups and updates run concurrently; set OMP_NUM_THREADS=8 to use all cores."
    ]


@pytest.mark.parametrize("mode", [persia.modes.Sync(), persia.modes.Hybrid("auto")])
def test_in_one_thread_torch_keeps_all_cores(mode):
    assert Counting(make_trainer(mode=mode)).threads == [8] * 3


def test_on_two_cores_and_on_one_it_is_one_thread(monkeypatch):
    for cores in (2, 1):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        torch.set_num_threads(cores)
        assert Counting(make_trainer()).threads == [1] * 3
        assert torch.get_num_threads() == cores


def test_a_warm_up_begins_with_all_cores():
    assert Counting(make_trainer(mode=persia.modes.Hybrid(1, warmup=2)), 4).threads == [8, 8, 7, 7]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("environment", "spins"),
    [({}, str(SPINS)), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_the_command_shortens_spinning_unless_the_user_set_it(environment, spins):
    code = "import os, sys, persia.cli.app as a; a.app = lambda: print(os.environ.get('GOMP_SPINCOUNT')); a.main()"
    kept = {k: v for k, v in os.environ.items() if k not in WAITING} | environment
    done = subprocess.run([sys.executable, "-c", code], env=kept, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == spins


@pytest.mark.processes
def test_importing_persia_changes_nothing_of_torch():
    code = "import os; before = dict(os.environ); import persia, persia.nn, torch; print(before == dict(os.environ))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_what_the_environment_says_is_kept(name, monkeypatch):
    monkeypatch.setenv(name, "8")
    assert Counting(make_trainer()).threads == [8] * 3


def test_a_smaller_number_and_one_that_is_set_meanwhile_are_kept():
    torch.set_num_threads(6)
    assert Counting(make_trainer()).threads == [6] * 3
    torch.set_num_threads(8)
    trainer = make_trainer()
    forward = trainer.model.forward
    trainer.model.forward = lambda *inputs: (torch.set_num_threads(5), forward(*inputs))[1]
    assert Counting(trainer).threads == [5] * 3
    assert torch.get_num_threads() == 5


def test_nn_workers_of_one_process_share():
    def work(member):
        return Counting(make_trainer(member)).threads

    assert Threads(nn_workers=2).run(work) == [[3] * 2] * 2  # Of three batches one has two, the other one and none.
    assert default_torch_threads(16) == 1


def test_in_a_process_group_whoever_made_it_has_chosen(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        assert Counting(make_trainer(Embedded())).threads == [8] * 3
    finally:
        torch.distributed.destroy_process_group()


class Machine:
    """A clock, the seconds for which the cores have computed, and those of this process."""

    def __init__(self, monkeypatch):
        self.now = self.busy = self.own = 0.0
        monkeypatch.setattr(torch_threads.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(torch_threads.time, "process_time", lambda: self.own)
        monkeypatch.setattr(torch_threads, "_busy_seconds", lambda: self.busy)

    def train(self, cores, others, seconds=5.0):
        self.now += seconds
        self.own += cores * seconds
        self.busy += (cores + others) * seconds


def test_busy_cores_are_told_once(monkeypatch, caplog):
    machine, cores = Machine(monkeypatch), BusyCores()
    cores.look()
    for others in (0.0, 0.3, 1.2, 1.2):
        machine.train(1.5, others)
        cores.look()
    (told,) = [record.message for record in caplog.records]
    assert told.startswith("Other processes use 1.2 of the 8 cores.")
    assert "GOMP_SPINCOUNT=1000" in told


@pytest.mark.parametrize(
    ("threads", "environment"), [(1, {}), (8, {"GOMP_SPINCOUNT": "1000"}), (8, {"OMP_WAIT_POLICY": "passive"})]
)
def test_threads_that_lose_nothing_are_no_reason_to_say_it(threads, environment, monkeypatch, caplog):
    torch.set_num_threads(threads)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    machine, cores = Machine(monkeypatch), BusyCores()
    for _ in range(3):
        cores.look()
        machine.train(1.5, 1.2)
    assert not caplog.records


def test_the_time_of_cores_is_that_of_all_programs():
    before, own = torch_threads._busy_seconds(), time.process_time()
    while time.process_time() - own < 0.2:
        pass
    spent = torch_threads._busy_seconds() - before
    assert spent > 0.1


SPINNING = """
import sys, threading, time, torch
from persia.dense.torch_threads import shorten_spinning

torch.set_num_threads({threads})
values = torch.ones(1 << 18)


def milliseconds():
    '''Most processor time of the process while it sleeps after an operation: in other sleeps it may have no core.'''
    spent = []
    for _ in range(20):
        values.neg_()
        begin = time.process_time()
        time.sleep(0.02)
        spent.append(time.process_time() - begin)
    return 1e3 * max(spent)


before, asked, done = milliseconds(), threading.Event(), threading.Event()
thread = threading.Thread(target=lambda: (shorten_spinning(), asked.set(), done.wait()))
thread.start()
asked.wait()
meanwhile = milliseconds()
done.set()
thread.join()
print(before, meanwhile, milliseconds())
"""


@pytest.mark.processes
@pytest.mark.skipif(CORES < 2 or sys.platform != "linux", reason="needs two cores and GNU's OpenMP")
def test_torch_threads_spin_less_while_a_thread_requests_it():
    kept = {k: v for k, v in os.environ.items() if k not in WAITING}
    code = SPINNING.format(threads=CORES)
    done = subprocess.run([sys.executable, "-c", code], env=kept, capture_output=True, text=True, check=True)
    before, meanwhile, after = map(float, done.stdout.split())
    assert meanwhile < 0.4 * max(before, after)


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
def test_the_lookup_thread_shortens_spinning_of_a_cpu_network(on_host, trains, monkeypatch):
    asked = []
    monkeypatch.setattr(transfer, "shorten_spinning", lambda: asked.append(threading.current_thread().name))
    mode = persia.modes.Hybrid(1, warmup=0)
    embeddings = EmbeddingCollection(SCHEMA, optimizer=persia.optim.SGD(lr=0.1), mode=mode).train(trains)
    embeddings._transfer._on_host = embeddings._expander.on_host = on_host
    for _ in embeddings.prefetch([persia.Batch.from_columns(SCHEMA, {"item": [1, 2], "label": [1, 0]})]):
        pass
    assert asked == ["persia-lookup"] * on_host
