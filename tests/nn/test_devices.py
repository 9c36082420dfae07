"""Where the network runs: which device is chosen, and how arrays get there."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import persia
from persia import batching
from persia.cluster import RayOptions
from persia.errors import ConfigError
from persia.nn import staging
from persia.nn.options import CollectionOptions
from persia.nn.prepared import loss_scale
from persia.nn.staging import CpuStaging, array_block, block_tensors, copied_array, staging_for, tensor_block
from persia.ps import EmbeddingServer
from persia.services import Connection
from persia.worker import Worker

SCHEMA = persia.Schema([persia.IdFeature("item", dim=8)], labels=["click"])

# --- the choice -----------------------------------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch):
    """Makes torch report CUDA devices; their staging is only recorded."""

    def report(count, current=0):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
        monkeypatch.setattr(staging, "CudaStaging", lambda device: device)

    return report


@pytest.mark.parametrize("make", [persia.TrainerOptions, CollectionOptions])
@pytest.mark.parametrize("name", ["gpu", "mps", "cuda:", "cuda:x", "CPU", "cpu:0", "", 1, None])
def test_an_unknown_device_is_refused_at_once(make, name):
    with pytest.raises(ConfigError, match=r"Invalid device .*; expected auto, cpu, cuda or cuda:N"):
        make(device=name)


def test_auto_is_the_default_of_the_trainer():
    assert persia.TrainerOptions().device == "auto"
    assert CollectionOptions().device == "cpu"  # The user's loop moves the network.


@pytest.mark.parametrize(
    ("count", "current", "name", "expected"),
    [
        (0, 0, "auto", "cpu"),
        (0, 0, "cpu", "cpu"),
        (2, 0, "cpu", "cpu"),
        (2, 0, "auto", "cuda:0"),
        (2, 1, "auto", "cuda:1"),
        (2, 1, "cuda", "cuda:1"),
        (2, 1, "cuda:0", "cuda:0"),
    ],
)
def test_the_device_is_that_of_this_process(gpus, count, current, name, expected):
    gpus(count, current)
    found = staging_for(name)
    assert str(found.device if isinstance(found, CpuStaging) else found) == expected


@pytest.mark.parametrize(("count", "name"), [(0, "cuda"), (0, "cuda:0"), (1, "cuda:1")])
def test_a_device_that_is_not_there_is_refused(gpus, count, name):
    gpus(count)
    with pytest.raises(ConfigError, match=rf"Device '{name}' is not available .* sees {count} CUDA devices") as raised:
        staging_for(name)
    assert raised.value.fields["field"] == "device"


class WithGpus:
    """In this process, as an NN worker that has a GPU reserved."""

    def connect(self, schema, optimizer, mode, seed):
        server = EmbeddingServer(schema.resolved_tables(), optimizer, mode, seed, 1)
        return Connection(Worker(schema, [server]), [server], gpus=1.0)


@pytest.mark.parametrize("device", ["cpu", "auto"])  # "auto" is the CPU here.
def test_an_nn_worker_with_a_gpu_does_not_train_on_the_cpu(gpus, device):
    gpus(0)
    with pytest.raises(ConfigError, match=r"RayOptions.gpus reserves 1 GPU .* would idle") as raised:
        persia.nn.EmbeddingCollection(
            SCHEMA, optimizer=persia.optim.SGD(lr=0.1), cluster=WithGpus(), options=CollectionOptions(device=device)
        )
    assert raised.value.fields["field"] == "device"


def test_the_trainer_of_a_cluster_refuses_idle_gpus_first():
    class Processes:
        gpus = 0.5
        recovery_points, share = None, 1

        def connect(self, schema, optimizer, mode, seed):
            raise AssertionError("started")

        run = attempt = fitting = keeping_rows = owning_servers = restart_servers = connect
        feed = scale = statistics = close = connect

    def trainer(device):
        return persia.Trainer(
            persia.nn.models.FFNN(SCHEMA),
            SCHEMA,
            optimizer=lambda params: torch.optim.SGD(params, 0.1),
            embedding_optimizer=persia.optim.SGD(lr=0.1),
            cluster=Processes(),
            options=persia.TrainerOptions(device=device),
        )

    with pytest.raises(
        ConfigError, match=r'Set TrainerOptions\(device="auto"\), or CollectionOptions\(device="auto"\)'
    ):
        trainer("cpu")
    with pytest.raises(AssertionError, match="started"):
        trainer("auto")


@pytest.mark.parametrize(
    ("given_options", "expected"),
    [
        ({}, "gloo"),
        ({"gpus": 0.5}, "gloo"),
        ({"gpus": 1}, "cpu:gloo,cuda:nccl"),
        ({"gpus": 1, "backend": "gloo"}, "gloo"),
        ({"gpus": 2, "backend": "nccl"}, "cpu:gloo,cuda:nccl"),
    ],
)
def test_nn_workers_that_share_a_gpu_use_gloo(given_options, expected):
    assert RayOptions(**given_options).process_group_backend == expected


@pytest.mark.parametrize(
    ("given_options", "message"),
    [
        ({"backend": "mpi"}, "expected one of: auto, gloo, nccl"),
        ({"backend": "nccl"}, "gpus = 0; set gpus=1"),
        ({"backend": "nccl", "gpus": 0.5}, "gpus = 0.5; set gpus=1"),
    ],
)
def test_a_backend_that_cannot_work_is_refused(given_options, message):
    with pytest.raises(ConfigError, match=message) as raised:
        RayOptions(**given_options)
    assert raised.value.fields["field"] == "backend"


# --- the loss scale --------------------------------------------------------------------------------------------------


class OnAnotherDevice(torch.amp.GradScaler):
    """A scaler whose scale is on a GPU: a copy of it to the CPU may arrive after `scale` has returned."""

    def __init__(self):
        super().__init__("cpu")
        self._scale = torch.full((), 8.0, device="meta")

    def scale(self, outputs):
        return torch.zeros_like(outputs)

    def get_scale(self):
        return 8.0


def test_a_loss_scale_of_another_device_is_read_whole():
    assert loss_scale(OnAnotherDevice(), torch.device("cpu")) == 8.0


def test_a_loss_scale_is_that_of_the_next_backward_pass():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.update(4.0)
    found = loss_scale(scaler, torch.device("cpu"))
    assert (found.item(), found.dtype, found.shape) == (4.0, torch.float32, ())
    assert loss_scale(None, torch.device("cpu")) is None
    assert loss_scale(torch.amp.GradScaler("cpu", enabled=False), torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_loss_scale_on_a_gpu_is_read_whole_on_the_cpu():
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    scaler.scale(torch.ones((), device="cuda"))
    torch.cuda._sleep(100_000_000)  # What comes after it is late.
    found = loss_scale(scaler, torch.device("cpu"))
    assert (found.item(), found.device.type) == (8.0, "cpu")


# --- arrays ---------------------------------------------------------------------------------------------------------

DTYPES = [np.float32, np.float16, np.int32, np.int64, np.uint16, np.uint32, np.uint8, np.bool_]


@given(st.sampled_from(DTYPES), st.integers(0, 7), st.integers(1, 3), st.booleans(), st.booleans())
def test_an_array_of_any_kind_is_copied_once_without_a_warning(dtype, rows, step, transposed, read_only):
    array = np.arange(rows * step * 3).astype(dtype).reshape(rows * step, 3)[::step]
    array = array.T if transposed else array
    array.flags.writeable = not read_only
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy = copied_array(array)
    assert copy.is_contiguous()
    np.testing.assert_array_equal(copy.numpy(), array)
    assert copy.numpy().dtype == array.dtype
    if copy.numel():
        copy.zero_()  # Writable, and memory of its own.
        assert array.any() == np.arange(rows * step * 3).astype(dtype).reshape(rows * step, 3)[::step].any()


def in_a_block(array, pool=None):
    """Returns the copy of an array in a block."""
    return block_tensors(*array_block({"it": array}, pool))["it"].numpy()


@st.composite
def some_arrays(draw):
    """Arrays of any dtype and layout, with empty ones and odd sizes, so that parts of a block need padding."""
    arrays = {}
    for number in range(draw(st.integers(0, 6))):
        shape = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
        array = np.arange(np.prod(shape)).reshape(shape).astype(draw(st.sampled_from(DTYPES)))
        arrays[f"a{number}"] = array.T if draw(st.booleans()) else array
        arrays[f"a{number}"].flags.writeable = draw(st.booleans())
    return arrays


@given(some_arrays())
def test_arrays_cross_in_one_block(arrays):
    block, parts = array_block(arrays)
    assert (block.dtype, block.dim()) == (torch.uint8, 1)
    whole = block.clone()  # A device has another copy.
    found = block_tensors(whole, parts)
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name].numpy(), array)
        assert found[name].numpy().dtype == array.dtype
        assert found[name].untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        assert found[name].storage_offset() * found[name].element_size() % staging.ALIGNMENT == 0


def test_a_change_of_one_tensor_of_a_block_is_none_of_the_others():
    """Autograd refuses tensors that were changed after it has saved them, and all views of one tensor count as one."""
    found = block_tensors(*array_block({"dense": np.ones((2, 3), np.float32), "places": np.ones(2, np.int32)}))
    values = torch.ones(3, requires_grad=True)
    loss = (found["dense"] * values).sum()
    found["places"].zero_()
    loss.backward()
    assert values.grad.tolist() == [2, 2, 2]


@given(some_arrays())
def test_tensors_come_back_in_one_block(arrays):
    tensors = {name: copied_array(array) for name, array in arrays.items()}
    if not tensors:
        return
    block, parts = tensor_block(tensors)
    assert (block.dtype, block.dim()) == (torch.uint8, 1)
    found = block_tensors(block.clone(), parts)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype


def test_a_tensor_alone_comes_back_without_a_copy_on_the_device():
    rows = torch.arange(6.0).view(2, 3)
    block, _ = tensor_block({"rows": rows})
    assert block.data_ptr() == rows.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("read_only", [False, True])
def test_a_large_array_is_copied_by_several_threads(dtype, read_only, monkeypatch):
    copied = []
    whole = batching.copy_array
    monkeypatch.setattr(batching, "copy_array", lambda *arguments: copied.append(whole(*arguments)))
    array = (np.arange(3 * 400_001) % 100).astype(dtype).reshape(3, -1)
    array.flags.writeable = not read_only
    pool = batching.ThreadPool(3)
    for one in (array, array.T, array[:, ::2]):
        np.testing.assert_array_equal(in_a_block(one, pool), one)
    assert len(copied) == (array.nbytes >= staging.LARGE)
    in_a_block(array)
    assert len(copied) <= 1


@pytest.mark.parametrize("dtype", [np.int16, np.complex64, np.float32])
def test_a_large_array_of_any_kind_is_copied(dtype):
    pool = batching.ThreadPool(3)
    array = (np.arange(1 << 20) % 100).astype(dtype)
    odd = np.frombuffer(b"x" + array.tobytes(), np.uint8, offset=1).view(dtype)
    assert not odd.flags.aligned
    for one in (array.reshape(2, 4, 8, -1), odd):
        np.testing.assert_array_equal(in_a_block(one, pool), one)


def test_the_host_shares_writable_and_copies_read_only_arrays():
    shared, read_only = np.ones(3, np.float32), np.ones(3, np.float32)
    read_only.flags.writeable = False
    tensors, _ = CpuStaging().to_device({"shared": shared, "read_only": read_only})
    assert tensors["shared"].data_ptr() == shared.ctypes.data
    assert tensors["read_only"].data_ptr() != read_only.ctypes.data


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_read_only_arrays_are_pinned(dtype):
    array = np.arange(100).astype(dtype)
    array.flags.writeable = False
    block, _ = array_block({"it": array}, pin_memory=True)
    assert block.is_pinned()
    tensors, ready = staging_for("cuda").to_device({"it": array})
    ready()
    np.testing.assert_array_equal(tensors["it"].cpu().numpy(), array)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_large_array_arrives_whole():
    cuda = staging_for("cuda")
    arrays = [np.random.default_rng(seed).random(3 * staging.LARGE + 5) for seed in range(5)]
    # Pinned memory of a copy must not be lent again while the device reads it.
    copies = [cuda.to_device({"it": array}) for array in arrays]
    for array, (tensors, ready) in zip(arrays, copies, strict=True):
        ready()
        np.testing.assert_array_equal(tensors["it"].cpu().numpy(), array)
