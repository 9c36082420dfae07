"""Leave-one-out parts of event logs, against a slow reference, and the readers that have them."""

import contextlib
import json
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia import data
from persia.data.histories import EventColumns, HistorySource, LeaveOneOut, history_feature
from persia.errors import ConfigError, DataError
from persia.schema import IdFeature, Schema

PARTS = get_args(LeaveOneOut)
SCHEMA = Schema([IdFeature("item", dim=2), history_feature(2, "item", "number", 3, None)], labels=["chosen"])


class Log:
    """Events in memory."""

    path = "memory"

    def __init__(self, owners, times, selected):
        items = np.arange(len(owners), dtype=np.uint64)
        ids = {"owner": np.array(owners, np.uint64), "item": items}
        labels, days = np.ones((len(owners), 1), np.float32), np.zeros(len(owners), np.int32)
        self._events = EventColumns(ids, np.array(times, np.int64), labels, days, selected)

    def events(self):
        return self._events


def samples(log, part, min_history=0):
    """Returns each sample's item with its history."""
    source = HistorySource(SCHEMA, log, "owner", {"history": "item"}, min_history, part)
    batches, found = [], {}
    with contextlib.suppress(DataError):  # There are no samples.
        batches = list(source.chunks(0))
    for batch in batches:
        history = batch.id_features["history"]
        for row, item in enumerate(batch.id_features["item"].values.tolist()):
            found[item] = history.slice(row, row + 1).values.tolist()
    return found


EVENTS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.booleans()), min_size=1, max_size=25)


@given(EVENTS, st.integers(0, 2))
def test_parts_are_counted_from_the_newest_selected_event(events, min_history):
    owners, times, chosen = zip(*events, strict=True)
    log = Log(owners, times, np.flatnonzero(chosen))
    expected = {part: {} for part in PARTS}
    for owner in set(owners):
        past = sorted((e for e in range(len(owners)) if owners[e] == owner), key=lambda e: (times[e], e))
        candidates = [e for e in past if chosen[e]]
        for after, event in enumerate(reversed(candidates)):
            before = past[: past.index(event)]
            if len(before) >= min_history:
                expected[("test", "validation", "train")[min(after, 2)]][event] = before[-3:]
    for part in PARTS:
        assert samples(log, part, min_history) == expected[part], part
    everything = samples(log, None, min_history)
    assert everything == expected["train"] | expected["validation"] | expected["test"]


def test_readers_have_the_parts(tmp_path):
    reviews = [("A", "a", 1), ("A", "b", 2), ("A", "c", 3), ("B", "b", 4), ("A", "d", 5), ("B", "a", 6)]
    lines = [{"reviewerID": user, "asin": item, "overall": 5, "unixReviewTime": time} for user, item, time in reviews]
    (tmp_path / "reviews.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "UserBehavior.csv").write_text("".join(f"{ord(u)},{ord(i)},1,buy,{t}\n" for u, i, t in reviews))
    (tmp_path / "train-item-views.csv").write_text(
        "sessionId;userId;itemId;timeframe;eventdate\n"
        + "".join(f"{ord(u)};1;{ord(i)};{t};2016-05-09\n" for u, i, t in reviews)
    )
    readers = {
        "reviews.jsonl": data.amazon,
        "UserBehavior.csv": lambda path, **options: data.taobao(path, max_length=5, **options),
        "train-item-views.csv": lambda path, **options: data.diginetica(path, min_history=0, **options),
    }
    for file, reader in readers.items():
        lengths = {}
        for part in PARTS:
            (batch,) = reader(tmp_path / file, leave_one_out=part)
            lengths[part] = np.diff(batch.id_features["history"].offsets).tolist()
        prints = {str(reader(tmp_path / file, leave_one_out=part).fingerprint()) for part in (None, *PARTS)}
        assert len(prints) == 4  # A run on one part is not resumed on another.
        assert lengths == {"train": [0, 1], "validation": [2, 0], "test": [3, 1]}, file
        with pytest.raises(ConfigError, match="leave_one_out"):
            reader(tmp_path / file, leave_one_out="eval")
    with pytest.raises(ConfigError, match="leave_one_out = 'test' needs histories; give their max_length"):
        data.taobao(tmp_path / "UserBehavior.csv", leave_one_out="test")
