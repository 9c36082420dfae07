"""Joined streams: labels against a naive join, resumed anywhere, late clicks, limits; with Kafka and in training."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import persia
from persia.data import EventBatches, KeyedEvents, join
from persia.errors import ConfigError, DataError
from persia.services import SharedStream, Stream
from support.kafka import SCHEMA, Kafka, items

WINDOW = 10  # Seconds.


def stream(name, chunks, batch_size=4, lateness=0):
    """A stream of events (key, seconds), whose row is the position of the event among all."""
    found, number = [], 0
    for chunk in chunks:
        prices = np.array([[(number + i) / 4] for i in range(len(chunk))], np.float32).reshape(-1, 1)
        number += len(chunk)
        batch = persia.Batch(
            {"item": persia.IdColumn(np.array([key for key, _ in chunk], np.uint64))},
            prices,
            np.zeros((len(chunk), 1), np.float32),
        )
        keys = np.array([key for key, _ in chunk], np.uint64)
        times = np.array([at * 1000 for _, at in chunk], np.int64)
        found.append(KeyedEvents(keys, times, batch))
    return EventBatches(name, found, SCHEMA, batch_size, lateness * 1000)


def samples(batches):
    """Returns (impression, label) of all samples, in order."""
    return [pair for b in batches for pair in zip(items(b), b.labels[:, 0].astype(int).tolist(), strict=True)]


def naive(impressions, clicks):
    """Label of each impression by all clicks."""
    return [any(k == key and at <= c <= at + WINDOW for k, c in clicks) for key, at in impressions]


def chunked(events, sizes):
    found, rest = [], list(events)
    for size in sizes:
        found.append(rest[:size])
        rest = rest[size:]
    return [chunk for chunk in [*found, rest] if chunk]


def disordered(events, lateness):
    """Sorted by time, but for as much as is allowed."""
    return sorted(events, key=lambda event: event[1] + hash((event, 7)) % (lateness + 1))


EVENTS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60)), max_size=30)
SIZES = st.lists(st.integers(1, 6), max_size=8)


@given(EVENTS, EVENTS, SIZES, SIZES, st.integers(0, 5), st.integers(1, 9))
def test_labels_equal_a_naive_join_also_when_resumed_anywhere(
    impressions, clicks, cut, cut_clicks, lateness, batch_size
):
    impressions, clicks = disordered(impressions, lateness), disordered(clicks, lateness)

    def made():
        return join(
            stream("impressions", chunked(impressions, cut), batch_size, lateness),
            stream("clicks", chunked(clicks, cut_clicks), batch_size, lateness),
            on="key",
            window=WINDOW,
            flush=True,
        )

    one = made()
    one.begin(0, {}, lambda: False)
    batches = list(one.batches())
    whole = samples(batches)
    assert sorted(whole) == [(number, int(label)) for number, label in enumerate(naive(impressions, clicks))]
    counts = one.statistics()
    assert counts.get("positives", 0) + counts.get("negatives", 0) == len(impressions)
    assert not counts.get("corrections", 0)
    assert not counts.get("open", 0)
    for number in range(len(batches) + 1):
        before = samples(batches[:number])
        assert samples(one.batches(0, number)) == whole[len(before) :]
        other = made()
        other.begin(number, one.offsets(number), lambda: False)
        assert sorted(before + samples(other.batches(0, number))) == sorted(whole)


@given(EVENTS, EVENTS, SIZES, SIZES)
def test_late_clicks_correct_negatives_once_or_are_dropped(impressions, clicks, cut, cut_late):
    """Clicks come in any order, so that some are late."""
    found = {}
    for late in ("correct", "drop"):
        one = join(
            stream("impressions", chunked(sorted(impressions, key=lambda e: e[1]), cut)),
            stream("clicks", chunked(clicks, cut_late)),
            on="key",
            window=WINDOW,
            late=late,
            flush=True,
        )
        one.begin(0, {}, lambda: False)
        batches = list(one.batches())
        found[late] = samples(batches), one.statistics()
        for number in range(len(batches) + 1):
            again = join(one._impressions, one._clicks, on="key", window=WINDOW, late=late, flush=True)
            again.begin(number, one.offsets(number), lambda: False)
            assert sorted(samples([*batches[:number], *again.batches(0, number)])) == sorted(found[late][0])
    labels = naive(sorted(impressions, key=lambda e: e[1]), clicks)
    corrected, counts = found["correct"]
    dropped, counts_of_dropped = found["drop"]
    times = Counter(number for number, _ in dropped)
    assert times == Counter(range(len(impressions)))
    assert sum(label for _, label in dropped) == counts_of_dropped.get("positives", 0)
    assert counts_of_dropped.get("corrections", 0) == 0
    extra = Counter(corrected) - Counter(dropped)
    assert sum(extra.values()) == counts.get("corrections", 0) == counts.get("late_clicks", 0)
    # Corrections are batches of their own, with which the time goes on: without them, impressions are kept for longer.
    assert counts_of_dropped.get("late_clicks", 0) >= counts.get("late_clicks", 0)
    for (number, label), count in extra.items():
        assert (label, count, labels[number]) == (1, 1, True)
        assert (number, 0) in dropped
    assert all(labels[number] for number, label in corrected if label)


def test_a_late_click_is_one_more_sample_with_label_1():
    impressions = stream("impressions", [[(1, 0), (2, 1)], [(3, 30)], [(4, 31)]], batch_size=2)
    clicks = stream("clicks", [[(9, 11)], [(9, 12)], [(1, 5)], [(3, 35)], [(8, 60)]])
    one = join(impressions, clicks, on="key", window=WINDOW, flush=True)
    found = samples(one)
    assert found == [(0, 0), (1, 0), (0, 1), (2, 1), (3, 0)]
    assert one.statistics() == {
        "positives": 1,
        "negatives": 3,
        "corrections": 1,
        "late_clicks": 1,
        "unmatched_clicks": 2,  # That at 60 s may still meet its impression.
        "open": 0,
    }


def test_windows_open_at_the_end_are_left_to_the_next_run():
    first = join(stream("i", [[(1, 0), (2, 5), (3, 20)]]), stream("c", [[(1, 1), (7, 16)]]), on="k", window=WINDOW)
    first.begin(0, {}, lambda: False)
    assert samples(first.batches()) == [(0, 1), (1, 0)]
    assert first.statistics()["open"] == 1
    assert first.offsets(1) == {
        "i": {0: 1},
        "c": {0: 1},
        "i@join_from": {0: 0},
        "c@join_from": {0: 0},
        "i@join_time": {0: 20_000},
    }
    events = [[(1, 0), (2, 5), (3, 20)], [(4, 40)]]
    then = join(stream("i", events), stream("c", [[(1, 1), (7, 16)], [(3, 21)]]), on="k", window=WINDOW)
    then.begin(1, first.offsets(1), lambda: False)
    assert samples(then.batches(0, 1)) == [(2, 1)]


def test_a_missing_key_matches_nothing_a_limit_bounds_buffers():
    keyed = np.array([False, True])
    row = stream("x", [[(0, 0), (0, 1)]])._events[0]
    impressions = EventBatches("i", [row._replace(keyed=keyed)], SCHEMA)
    clicks = EventBatches("c", [row._replace(batch=None, keyed=keyed)], SCHEMA)
    one = join(impressions, clicks, on="k", window=WINDOW, flush=True)
    assert samples(one) == [(0, 0), (1, 1)]
    assert one.statistics()["unmatched_clicks"] == 1
    many = [[(n, n) for n in range(start, start + 10)] for start in range(0, 100, 10)]
    small = join(stream("i", many), stream("c", many), on="k", window=1_000_000, limit=15)
    assert len(samples(small)) == 100 - small.statistics()["open"]
    assert small.statistics()["open"] <= 15


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"window": 0}, "window"),
        ({"late": "never"}, "late"),
        ({"label": "buy"}, "label"),
        ({"limit": 0}, "limit"),
        ({"clicks": [1]}, "clicks"),
        ({"clicks": stream("i", [])}, "clicks"),
    ],
)
def test_invalid_arguments_are_named(change, field):
    arguments = {"impressions": stream("i", []), "clicks": stream("c", []), "on": "k", "window": 1.0, **change}
    with pytest.raises(ConfigError) as raised:
        join(arguments.pop("impressions"), arguments.pop("clicks"), **arguments)
    assert raised.value.fields["field"] == field


def test_it_is_a_stream_that_one_process_reads():
    one = join(stream("i", []), stream("c", []), on="k", window=1.0)
    assert isinstance(one, Stream)
    assert not isinstance(one, SharedStream)
    with pytest.raises(DataError, match="Batch 3 of the joined stream is not recorded; batches 0 to 0 are"):
        one.offsets(3)


def written(kafka, topic, rows, partition):
    kafka.write([json.dumps(row).encode() for row in rows], partition, topic)


@pytest.mark.parametrize("late", ["correct", "drop"])
def test_kafka_clicks_beyond_lateness_are_counted_corrections(late):
    kafka = Kafka()
    shown, clicked = kafka.topic, f"{kafka.topic}-clicks"
    views = [{"item": n, "price": n / 4, "view": n, "at": at} for n, at in enumerate([0, 30])]
    written(kafka, shown, views, 0)
    # A click at 18 s, after which none before 13 s is expected, and so the window of the first impression ends.
    written(kafka, clicked, [{"view": 7, "at": 18}, {"view": "poison", "at": "noon"}, {"view": 0, "at": 5}], 0)
    options = {"bootstrap": kafka.bootstrap, "until": "now", "timeout": 10.0, "event_time": "at", "linger": 0.05}
    options |= {"allowed_lateness": 5.0, "poison": "skip", "config": {"fetch.wait.max.ms": 20}}
    one = join(
        persia.data.kafka(shown, SCHEMA, 1, fill={"click": 0}, **options),
        persia.data.kafka(clicked, persia.Schema([]), 1, **options),
        on="view",
        window=WINDOW,
        late=late,
        flush=True,
    )
    assert samples(one) == ([(0, 0), (0, 1), (1, 0)] if late == "correct" else [(0, 0), (1, 0)])
    assert one.statistics()["late_clicks"] == 1
    assert one.statistics()["corrections"] == (late == "correct")
    found = {metric.name: metric.value for metric in one.observe() if not metric.labels}
    assert (found["join_clicks_late"], found["join_clicks_poison"]) == (1, 1)
    assert (found["stream_late"], found["stream_poison"]) == (0, 0)  # Of the impressions.


def test_late_kafka_impressions_are_dropped_as_their_reader_says():
    kafka = Kafka()
    shown, clicked = kafka.topic, f"{kafka.topic}-clicks"
    views = [{"item": n, "price": n / 4, "view": n, "at": at} for n, at in enumerate([0, 30, 1])]
    written(kafka, shown, views, 0)
    written(kafka, clicked, [{"view": 2, "at": 2}], 0)
    options = {"bootstrap": kafka.bootstrap, "until": "now", "timeout": 10.0, "event_time": "at", "linger": 0.05}
    options |= {"allowed_lateness": 5.0, "config": {"fetch.wait.max.ms": 20}}
    for late, expected in (("drop", [(0, 0), (1, 0)]), ("keep", [(0, 0), (2, 1), (1, 0)])):
        one = join(
            persia.data.kafka(shown, SCHEMA, 4, fill={"click": 0}, late=late, **options),
            persia.data.kafka(clicked, persia.Schema([]), 4, **options),
            on="view",
            window=WINDOW,
            flush=True,
        )
        assert samples(one) == expected
        assert {metric.name: metric.value for metric in one.observe()}["stream_late"] == 1


def test_a_resumed_run_on_joined_kafka_streams_loses_nothing(tmp_path):
    kafka = Kafka()
    shown, clicked = kafka.topic, f"{kafka.topic}-clicks"
    rng = np.random.default_rng(0)
    expected = {}
    for partition in range(2):
        impressions, clicks = [], []
        for number in range(150):
            item = partition * 1000 + number
            impressions.append({"item": item, "price": item / 4, "view": f"view-{item}", "at": float(number)})
            expected[item] = int(rng.random() < 0.3)
            if expected[item]:
                clicks.append({"view": f"view-{item}", "at": number + float(rng.integers(0, 10))})
        written(kafka, shown, impressions, partition)
        written(kafka, clicked, sorted(clicks, key=lambda c: c["at"]), 3 - partition)
    options = {"bootstrap": kafka.bootstrap, "until": "now", "timeout": 10.0, "event_time": "at", "linger": 0.05}
    options["config"] = {"fetch.wait.max.ms": 20}

    def made():
        return join(
            persia.data.kafka(shown, SCHEMA, 16, fill={"click": 0}, **options),
            persia.data.kafka(clicked, persia.Schema([]), 16, **options),
            on="view",
            window=WINDOW,
            flush=True,
        )

    found = samples(made())
    assert sorted(found) == sorted(expected.items())

    def trainer():
        torch.manual_seed(0)
        return persia.Trainer(
            persia.nn.models.DeepFM(SCHEMA, hidden=(8,)),
            SCHEMA,
            optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
            embedding_optimizer=persia.optim.Adagrad(lr=0.1),
            mode=persia.modes.Sync(),
            options=persia.TrainerOptions(progress=False, checkpoint_dir=str(tmp_path)),
        )

    rows = trainer().fit(made(), max_steps=4).rows
    two = trainer()
    two.load(str(tmp_path))
    assert rows + two.fit(made()).rows == 300
    ids = two.embeddings.row_ids("item", np.array(list(expected)))
    assert two.embeddings.rows("item", ids, state=True).state.update_count.tolist() == [1] * 300
    metrics = {m.name: m.value for m in two.monitor.observe().metrics}
    assert metrics["join_open"] == 0
    assert math.isclose(metrics["join_positives"] + metrics["join_negatives"], 300 - rows)
