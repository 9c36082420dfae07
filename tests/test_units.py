import pytest

from persia.errors import ConfigError
from persia.units import format_bytes, format_count, format_seconds, parse_bandwidth, parse_bytes, parse_count


@pytest.mark.parametrize(
    ("text", "count"),
    [("12TB", 12e12), ("64GiB", 64 * 2**30), (5, 5), ("1_000", 1000), ("1.5 kB", 1500), ("2e3", 2000), ("0", 0)],
)
def test_bytes(text, count):
    assert parse_bytes(text, "memory") == count


@pytest.mark.parametrize(
    "text", ["12XB", "", "GB", "-1GB", None, True, [1], "1GB/s", "1..5GB", "1e999", 10**400, float("inf"), -1]
)
def test_invalid_bytes_are_named(text):
    with pytest.raises(ConfigError, match=r"Invalid memory = .*; expected bytes, such as 480GB"):
        parse_bytes(text, "memory")


def test_counts_and_bandwidths():
    assert parse_count("1.2e9", "rows") == 1_200_000_000
    assert parse_count("50M", "rows") == 50_000_000
    assert parse_bandwidth("100Gbit/s", "network") == 12.5e9
    assert parse_bandwidth("12GB/s", "network") == 12e9
    with pytest.raises(ConfigError, match="expected a bandwidth"):
        parse_bandwidth("fast", "network")


def test_formatted():
    assert [format_bytes(size) for size in (5, 2.5e6, 223.4e12)] == ["5 B", "2.50 MB", "223.4 TB"]
    assert [format_count(count) for count in (12, 5e7, 781.25e9)] == ["12", "50 M", "781.2 G"]
    assert [format_seconds(seconds) for seconds in (0.51, 45, 600, 36000)] == ["0.51 s", "45 s", "10 min", "10.0 h"]
