"""Quantities, files of hosts and files of rates."""

import msgspec
import pytest

from persia.errors import ConfigError
from persia.memory import host_memory
from persia.plan import HostKind, Rates, RateSource, load_hosts, load_rates, save_rates, this_host
from persia.plan.rates import DiskRate, RowRate

HOSTS = """
[[hosts]]
name = "rows"
roles = ["embedding_ps"]
count = 30
cores = 416
memory = "12TB"
disk = "1TB"
network = "32Gbit/s"

[[hosts]]
name = "rest"
cores = 30
memory = "120GB"
gpus = 8
"""


def hosts_of(tmp_path, text):
    path = tmp_path / "hosts.toml"
    path.write_text(text)
    return load_hosts(str(path))


def test_hosts(tmp_path):
    rows, rest = hosts_of(tmp_path, HOSTS)
    assert rows == HostKind("rows", 416, 12 * 10**12, ("embedding_ps",), 30, 10**12, 4e9, 0)
    assert (rest.count, rest.disk, rest.network, rest.gpus) == (None, 0, None, 8)
    assert "embedding_ps" in rest.roles


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("cores = 416", "cores = 0"), r"hosts\[0\]\.cores = 0; expected at least 1"),
        (('["embedding_ps"]', '["ps"]'), r"hosts\[0\]\.roles: 'ps'; expected some of: embedding_ps"),
        (('"rest"', '"rows"'), r"distinct names"),
        (('"rest"', '"memory"'), "Invalid name 'memory' of a kind of hosts; .* none of: head, memory, object_store"),
        (('"rest"', '"object_store_memory"'), "Invalid name 'object_store_memory'"),
        (('"rest"', '"head"'), "Invalid name 'head'"),
        (('"rest"', '"GPU"'), "Invalid name 'GPU' of a kind of hosts; expected a lower-case letter"),
        (('"rest"', '"a: 1"'), "Invalid name 'a: 1'"),
        (('"rest"', '""'), "Invalid name ''"),
        (('"12TB"', '"12 boxes"'), r"hosts\[0\]\.memory"),
        (("gpus = 8", "gpu = 8"), "gpu"),
        (("cores = 30", ""), "cores"),
        (('name = "rest"', 'name = "rest"\nroles = ["nn_worker"]'), "No kind of host runs 'embedding_worker'"),
        (("[[hosts]]", "[[hosts"), "not valid TOML"),
    ],
)
def test_invalid_hosts_are_named(tmp_path, change, message):
    assert change[0] in HOSTS
    with pytest.raises(ConfigError, match=message):
        hosts_of(tmp_path, HOSTS.replace(*change, 1))


def test_hosts_that_are_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_hosts(str(tmp_path / "none.toml"))
    assert this_host().cores >= 1


def test_regions_limit_the_memory_of_this_host(tmp_path):
    # Of regions on a disk, their file system; so the test does not depend on the size of /dev/shm.
    assert this_host(str(tmp_path)).memory == host_memory(str(tmp_path)).total
    assert this_host("").memory == this_host().memory == host_memory().total


def rates(machine="a", rows=None, disk=None, sharing=None):
    source = RateSource(machine, 2, "0.1.0", "2026-01-01T00:00:00+00:00", "persia bench rates")
    return Rates(1, [source], rows or {}, disk=disk, sharing=sharing)


def test_rates_are_added_to_a_file(tmp_path):
    path = str(tmp_path / "rates.json")
    first, second = RowRate(1.0, 2.0, 10), RowRate(3.0, 4.0, 10)
    disk = DiskRate("/ssd", 1e5, 1e9)
    save_rates(path, rates(rows={"16/float32/adagrad": first, "8/float32/adagrad": first}, disk=disk))
    save_rates(path, rates(sharing=1.5))
    save_rates(path, rates(rows={"8/float32/adagrad": second}))
    found = load_rates([path])
    assert found.sharing == 1.5
    assert found.rows == {"16/float32/adagrad": first, "8/float32/adagrad": second}
    assert found.disk == disk
    assert [source.file for source in found.sources] == [path]
    with pytest.raises(ConfigError, match=r"rates of another machine \(a\)"):
        save_rates(path, rates("b"))
    other = str(tmp_path / "other.json")
    save_rates(other, rates("b", {"16/float32/adagrad": second}))
    both = load_rates([path, other])
    assert both.rows["16/float32/adagrad"] == second
    assert [source.machine for source in both.sources] == ["a", "b"]


def test_files_that_are_no_rates(tmp_path):
    path = tmp_path / "rates.json"
    with pytest.raises(ConfigError, match=r"Measure them: persia bench rates CONFIG --save .*rates\.json"):
        load_rates([str(path)])
    path.write_text("{}")
    with pytest.raises(ConfigError, match="is not a file of rates"):
        load_rates([str(path)])
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(rates(), version=9)))
    with pytest.raises(ConfigError, match="version 9; expected 1"):
        load_rates([str(path)])


def test_a_missing_rate_names_the_command():
    message = str(rates().missing("the speed of the SSD", " --disk DIR"))
    assert "the speed of the SSD" in message
    assert "persia bench rates CONFIG --disk DIR --save" in message
