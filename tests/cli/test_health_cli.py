"""What `persia health` prints."""

import io

from rich.console import Console

from persia.cli.health import _doing, _table
from persia.membership.observing import Answer
from persia.telemetry.metrics import Health, Metric
from persia.types import Member


def test_the_last_lines_of_the_dead_are_printed_as_they_are():
    """A log is no markup."""
    dead = Member("embedding_ps", 1, 1, "tcp://h:1", "dead")
    text = io.StringIO()
    Console(file=text, width=200).print(_table([Answer(dead, None, "dead: no room in [/dev/shm] for table [item]")]))
    assert "no room in [/dev/shm] for table [item]" in text.getvalue()


def test_a_ps_with_rows_on_disk_says_what_is_there():
    counts = {
        "ps_rows": 900, "ps_lookups": 1000, "ps_hits": 800, "ps_disk_rows": 700, "ps_disk_bytes": 2 << 30,
        "ps_spilled": 500, "ps_disk_reads": 250, "ps_promoted": 200, "ps_compacted": 150,
    }  # fmt: skip
    figures = [Metric(name, float(count), {"table": "item"}) for name, count in counts.items()]
    health = Health("embedding_ps", 0, 1, 7, "h", 9.0, "", figures, [])
    expected = "on disk 700 rows, 2.0 GiB, 75.0% of hits in memory, 250 read, write amplification 1.30"
    assert expected in _doing(health)
    assert "on disk" not in _doing(health._replace(figures=figures[:3]))


def test_a_ps_that_publishes_says_how_old_that_is():
    figures = [Metric("ps_publish_age_seconds", 1234.0, {}), Metric("ps_publish_failing", 1.0, {})]
    health = Health("embedding_ps", 0, 1, 7, "h", 9.0, "", figures, [])
    assert "published 1,234 s ago, cannot publish" in _doing(health)
    assert "published" not in _doing(health._replace(figures=[]))
