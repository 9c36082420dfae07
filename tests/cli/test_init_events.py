"""`persia init --owner`: what it writes for a log of events trains, and what it refuses."""

import tomllib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from persia.cli.init import init, sample
from persia.errors import ConfigError, DataError
from support.command import persia

USERS, EVENTS, ITEMS = 120, 8, 30
START = 1_700_000_000


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def columns(users=USERS, events=EVENTS):
    """Each user's items follow one another by number, in rows of any order."""
    first = np.random.default_rng(0).integers(0, ITEMS, users)
    items = (first[:, None] + np.arange(events)) % ITEMS
    times = START + 3_600 * np.arange(events) + np.arange(users)[:, None]
    order = np.random.default_rng(1).permutation(items.size)
    owners = np.repeat(np.arange(users), events)
    return owners[order], items.reshape(-1)[order], times.reshape(-1)[order]


def config(folder):
    return tomllib.loads((Path(folder) / "config.toml").read_text())


def test_what_it_writes_learns_the_next_item(folder):
    user, item, time = columns()
    pq.write_table(pa.table({"user": user, "price": item * 0.5, "item": item, "time": time}), "log.parquet")
    said = persia("init", "log.parquet", "--owner", "user", "--out", "out")
    assert [path.name for path in Path("out").iterdir()] == ["config.toml"]
    found = config("out")
    assert found["data"]["options"]["owner"] == "user"
    assert found["data"]["options"]["time"] == "time"
    assert [each["name"] for each in found["schema"]["id_features"]] == ["item", "item_before"]
    assert found["schema"]["id_features"][1]["max_length"] == 10
    assert found["trainer"]["retrieval_leave_out"] == ["item_before"]
    assert "# Left out: price" in Path("out/config.toml").read_text()
    train, evaluate = (line.split()[1:] for line in said.splitlines() if line.startswith("  persia "))
    text = persia(*train)
    best = float(text.split("retrieval_hr@10 ")[1].split(".  ")[0].split(" ")[0].rstrip("."))
    assert best > 0.9  # By chance a third.
    assert f"the items of {USERS} samples, ranked among {ITEMS} items" in persia(*evaluate)


def test_a_file_without_names_and_with_texts(folder):
    user, item, time = columns()
    rows = zip(user, item, time, strict=True)
    lines = [f"u{u};{i:03};{t * 1_000}" for u, i, t in rows]
    Path("log.csv").write_text("\n".join(lines) + "\n")
    init("log.csv", "out", owner="column_1", item="column_2")
    found = config("out")
    assert found["data"]["options"]["delimiter"] == ";"
    assert found["data"]["options"]["column_names"] == ["column_1", "column_2", "column_3"]
    assert found["data"]["options"]["time_unit"] == "ms"
    assert [each["kind"] for each in found["schema"]["id_features"]] == ["text", "text"]
    assert "rows trained" in persia("train", "out/config.toml", "--set", "train.max_steps=2")


@pytest.mark.parametrize(
    ("column", "name"),
    [
        ("item/id", "item_id"),
        ("chosen", "chosen"),
        ("class", "class"),
        ("product_id_of_the_catalogue", "product_id_of_the_catalogue"),
        ("ä" * 40, "ä" * 28),
        ('a "{b}" #\u2028', 'a "{b}" #'),
    ],
)
def test_any_name_of_the_item(folder, column, name):
    user, item, time = columns()
    pq.write_table(pa.table({"who": user, column: item, "when": time * 1_000}), "log.parquet")
    init("log.parquet", "out", owner="who", item=column, time="when")
    found = config("out")
    assert [each["name"] for each in found["schema"]["id_features"]] == [name, f"{name}_before"]
    assert found["data"]["options"].get("rename", {name: name}) == {name: column}
    assert found["data"]["options"]["time_unit"] == "ms"
    assert "rows trained" in persia("train", "out/config.toml", "--set", "train.max_steps=2")


def test_items_that_are_chosen_again_stay_in_the_ranking(folder):
    user, item, time = columns()
    pq.write_table(pa.table({"user": user, "item": item % 4, "time": time}), "log.parquet")
    init("log.parquet", "out", owner="user")
    assert "retrieval_leave_out" not in config("out")["trainer"]
    assert "; 50% of the events repeat one, so they are." in Path("out/config.toml").read_text()


def test_columns_that_are_missing_or_several(folder):
    user, item, time = columns()
    table = pa.table({"user": user, "item_id": item, "product": item, "time": time})
    pq.write_table(table, "log.parquet")
    with pytest.raises(ConfigError, match=r"which column has the item .* --item: item_id or product\.$"):
        init("log.parquet", "out", owner="user")
    with pytest.raises(ConfigError, match=r"which column has the time .* --time: product\.$"):
        pq.write_table(table.drop_columns("time"), "other.parquet")
        init("other.parquet", "out", owner="user", item="item_id")
    with pytest.raises(ConfigError, match="has no column 'who'; it has user, item_id, product, time"):
        init("log.parquet", "out", owner="who")
    with pytest.raises(ConfigError, match="owner 'user', the item 'user' and the time 'time' of an event are three"):
        init("log.parquet", "out", owner="user", item="user")
    with pytest.raises(ConfigError, match="name whose they are with --owner"):
        init("log.parquet", "out", time="time")
    with pytest.raises(ConfigError, match="events need no label"):
        init("log.parquet", "out", owner="user", label="item_id")
    assert not Path("out").exists()


def test_owners_with_too_few_events(folder):
    for events in (3, 4):
        user, item, time = columns(events=events)
        pq.write_table(pa.table({"user": user, "item": item, "time": time}), f"{events}.parquet")
    with pytest.raises(DataError, match="fewer than two of 'user' have 4 events"):
        init("3.parquet", "out", owner="user")
    init("4.parquet", "out", owner="user")
    assert "rows trained" in persia("train", "out/config.toml", "--set", "train.max_steps=2")


def test_owners_are_counted_in_all_rows(folder, monkeypatch):
    """The first rows of a long log in order of time have few events of each owner."""
    monkeypatch.setattr(sample, "MAX_ROWS", 2 * USERS)
    user, item, time = columns()
    order = np.argsort(time)
    pq.write_table(pa.table({"user": user[order], "item": item[order], "time": time[order]}), "log.parquet")
    init("log.parquet", "out", owner="user")
    text = Path("out/config.toml").read_text()
    assert f"{USERS} different ones, with {EVENTS} events at the median" in text
    assert f"different ones in the first {2 * USERS} rows" in text


def test_what_no_log_of_events_has(folder):
    user, item, time = columns()
    table = pa.table({"user": user, "item": item, "time": time, "tags": [[1, 2]] * len(user), "price": item * 0.5})
    missing = table.append_column("late", pa.array([None, *time[1:].tolist()]))
    pq.write_table(missing.append_column("name", pa.array(["a b"] * len(user))), "log.parquet")
    for option, message in (
        ({"item": "tags"}, "Column 'tags' has lists, but an event has one item"),
        ({"item": "item", "time": "name"}, "Column 'name' has no times"),
    ):
        with pytest.raises(ConfigError, match=message):
            init("log.parquet", "out", owner="user", **({"time": "time"} | option))
    with pytest.raises(DataError, match=f"1 of {len(user)} rows have no 'late'"):
        init("log.parquet", "out", owner="user", item="item", time="late")
    lines = [f"{u},{i},{t}\n" for u, i, t in zip(user, item, time, strict=True)]
    Path("log.dat").write_text("".join(["user,item,time\n", *lines]))
    with pytest.raises(DataError, match=r"log\.dat: .* rename it to end in \.csv"):
        init("log.dat", "out", owner="user")
    assert not Path("out").exists()


def test_a_column_that_is_no_item_is_not_taken_for_it(folder):
    user, item, time = columns()
    pq.write_table(pa.table({"user": user, "content": item * 1_000, "stage": item % 5, "time": time}), "log.parquet")
    with pytest.raises(ConfigError, match=r"--item: content or stage\.$"):
        init("log.parquet", "out", owner="user")


def test_files_of_another_model_are_not_left_behind(folder):
    user, item, time = columns()
    pq.write_table(pa.table({"user": user, "item": item, "time": time}), "log.parquet")
    Path("out").mkdir()
    Path("out/model.py").touch()
    with pytest.raises(ConfigError, match=r"has model\.py of another model"):
        init("log.parquet", "out", owner="user", force=True)
