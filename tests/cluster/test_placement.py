"""`Placement`: what it accepts, its plain data, and where it is read."""

from __future__ import annotations

import tomllib

import msgspec
import numpy as np
import pytest

from persia.cli.run_config import ClusterConfig
from persia.cluster import Placement, RayOptions
from persia.cluster.ray.placement import Place, nn_worker_gpus, read_place
from persia.config import convert, dump
from persia.errors import ConfigError


@pytest.mark.parametrize(
    ("memory", "expected"),
    [(0, 0), (10**9, 10**9), ("100GB", 10**11), ("64 GiB", 2**36), ("1.5tb", 15 * 10**11), ("12", 12)],
)
def test_memory_in_bytes(memory, expected):
    assert Placement(memory=memory).memory_bytes == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"memory": "a lot"}, "Invalid Placement.memory = 'a lot'; expected bytes"),
        ({"memory": -1}, "Invalid Placement.memory"),
        ({"memory": "9999999999TB"}, "Invalid Placement.memory"),
        ({"cpu": -1}, "Invalid Placement.CPU"),
        ({"gpu": 1.5}, "Invalid Placement.GPU = 1.5; expected a whole number, or a fraction"),
        ({"gpu": "one"}, "Invalid Placement.GPU"),
        ({"resources": {"GPU": 1}}, "Invalid name 'GPU' in Placement.resources"),
        ({"resources": {"ssd": -1}}, r"Invalid Placement.resources\['ssd'\]"),
        ({"labels": {"pool": 1}}, r"Invalid Placement.labels\['pool'\] = 1; expected a string"),
        ({"strategy": "heap"}, "Invalid Placement.strategy = 'heap'; expected one of: spread, pack"),
    ],
)
def test_fields_that_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        Placement(**fields)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("ps", "Invalid place = 'ps'; expected a dict by role"),
        ({"server": {}}, "Invalid role in place = 'server'; expected one of: ps, embedding_worker"),
        ({"ps": {"ram": 1}}, r"Invalid place\['ps'\] = .*unknown field `ram`"),
        ({"ps": {"memory": [1]}}, r"Invalid place\['ps'\]"),
        ({"ps": 3}, r"Invalid place\['ps'\] = 3"),
        ({"ps": {"GPU": 1}}, r"place\['ps'\] reserves a GPU, which would idle"),
    ],
)
def test_places_that_are_refused(place, message):
    with pytest.raises(ConfigError, match=message):
        read_place(place)


def test_plain_data_and_records_are_alike():
    plain = {"ps": {"memory": "100GB", "labels": {"pool": "memory"}}, "nn_worker": {"GPU": np.int64(1)}}
    place = read_place(plain)
    assert place == read_place({"ps": Placement("100GB", labels={"pool": "memory"}), "nn_worker": Placement(gpu=1)})
    encoded = msgspec.json.encode(place)
    assert encoded == b'{"ps":{"memory":"100GB","labels":{"pool":"memory"}},"nn_worker":{"GPU":1.0}}'
    assert msgspec.json.decode(encoded, type=Place) == place


def test_in_a_configuration():
    text = """
        kind = "ray"
        [place.ps]
        memory = "100GB"
        [place.nn_worker]
        GPU = 1
        strategy = "pack"
    """
    config = convert(tomllib.loads(text), ClusterConfig, "run.toml")
    assert config.place == {"ps": Placement("100GB"), "nn_worker": Placement(gpu=1, strategy="pack")}
    assert dump(config)["place"] == {"ps": {"memory": "100GB"}, "nn_worker": {"GPU": 1, "strategy": "pack"}}
    with pytest.raises(ConfigError, match=r"run.toml: .*Invalid enum value 'server'"):
        convert({"place": {"server": {}}}, ClusterConfig, "run.toml")
    pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')
    cluster = config.build()
    assert cluster.place == config.place
    assert cluster.gpus == 1


@pytest.mark.parametrize(("gpu", "expected"), [(1, 1), (2, 2), (0.5, 0.5), (0.4, 0.5), (0.3, 1 / 3), (0.2, 0.2)])
def test_parts_of_a_gpu_do_not_cross_gpus(gpu, expected):
    assert Placement(gpu=gpu).demand() == {"GPU": pytest.approx(expected)}


def test_nn_workers_must_train_on_the_gpus_of_the_placement():
    assert nn_worker_gpus(read_place({"nn_worker": {"GPU": 1}}), RayOptions()).gpus == 1
    assert nn_worker_gpus(read_place({"nn_worker": {"GPU": 1}}), RayOptions()).process_group_backend.endswith("nccl")
    assert nn_worker_gpus(read_place({"nn_worker": {"labels": {"a": "b"}}}), RayOptions(gpus=2)).gpus == 2
    assert nn_worker_gpus({}, RayOptions(gpus=2)).gpus == 2
    for gpu in (0, 2):
        with pytest.raises(ConfigError, match=f"reserves {gpu} GPU for each NN worker, but RayOptions.gpus is 1"):
            nn_worker_gpus(read_place({"nn_worker": {"GPU": gpu}}), RayOptions(gpus=1))
