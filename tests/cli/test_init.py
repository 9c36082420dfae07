"""`persia init`: what it guesses, writes and refuses, and that what it writes trains."""

import io
import json
import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

import persia as persia_package
from persia.cli.init import init
from persia.errors import ConfigError, DataError
from support.command import run_here

ROWS = 400


def persia(*arguments):
    """Runs a command in this process; returns the exit status and what it has printed."""
    output = io.StringIO()
    status = run_here(output, *arguments)
    return status, output.getvalue()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    yield tmp_path
    sys.modules.pop("model", None)


def clicks(rows=ROWS):
    """A CSV with columns of all kinds."""
    lines = ["row,user_id,genres,title,city,price,age,created_at,zip,constant,clicked"]
    for i in range(rows):
        genres = "|".join(f"g{j}" for j in range(i % 3 + 1))
        title = f"word{i % 7} word{i % 11} word{i % 13} word{i}"
        price = "" if i % 10 == 0 else f"{i * 0.37:.2f}"
        created = f"2024-05-{1 + i * 28 // rows:02d} 10:00:00"
        lines.append(
            f"{i},{i * 7 % 50},{genres},{title},city {i % 5},{price},{20 + i % 60},{created},0{i % 9}210,x,"
            f"{int(i * 7 % 50 < 25)}"
        )
    return "\n".join(lines) + "\n"


def config(folder):
    return tomllib.loads((Path(folder) / "config.toml").read_text())


def uses(found):
    features = {each["name"]: each for each in found["schema"]["id_features"]}
    return features, [each["name"] for each in found["schema"]["dense_features"]]


def test_uses_of_columns(folder):
    (folder / "clicks.csv").write_text(clicks())
    init("clicks.csv", "out", yes=True)
    found = config("out")
    features, _ = uses(found)
    assert found["schema"]["labels"] == ["clicked"]
    assert set(features) == {"user_id", "genres", "title", "city", "zip", "created_at_weekday"}
    assert found["schema"]["dense_features"] == [
        {"name": "price", "fill": "mean", "missing_indicator": True, "scale": "standard"},
        {"name": "age", "scale": "standard"},
    ]
    options = found["data"]["options"]
    assert features["genres"]["split"] == "|"
    assert features["title"]["tokens"] == {"column": "title", "ngrams": [1]}
    assert features["created_at_weekday"]["time"] == {"column": "created_at", "part": "weekday"}
    assert features["zip"]["kind"] == "text"  # 01210 is not 1210.
    split = {"by": "time", "column": "created_at"}
    assert {key: options["split"][key] for key in split} == split
    assert options["split"]["at"].startswith("2024-05-2")
    assert found["eval_data"]["options"]["split"] == {**options["split"], "part": "test"}
    _, left_out = (folder / "out" / "config.toml").read_text().split("# Left out:\n")
    assert "row: differs in every row" in left_out
    assert "created_at" not in left_out


def test_it_says_which_rows_are_held_out(folder, capsys):
    (folder / "clicks.csv").write_text(clicks())
    init("clicks.csv", "by_time", yes=True)
    assert "Held out for testing: the last tenth by created_at, from 2024-05-2" in capsys.readouterr().out

    (folder / "plain.csv").write_text("user,label\n" + "".join(f"u{i % 7},{i % 2}\n" for i in range(100)))
    init("plain.csv", "at_random", yes=True)
    assert "Held out for testing: 20% of the rows, at random" in capsys.readouterr().out

    lines = clicks().splitlines()
    late = [re.sub(r"[01]$", "1", line) for line in lines[-80:]]  # The last tenth has one label only.
    (folder / "late.csv").write_text("\n".join([*lines[:-80], *late]) + "\n")
    init("late.csv", "instead", yes=True)
    assert "Held out for testing: 20% of the rows, at random" in capsys.readouterr().out
    assert config("instead")["eval_data"]["options"]["split"] == {"part": "test", "test": 0.2}
    text = (folder / "instead" / "config.toml").read_text()
    assert "created_at" not in text.partition("# Left out:")[2]  # Its weekday is a feature.


@pytest.mark.parametrize(
    ("text", "separator", "header"),
    [
        ("user;label\n" + "".join(f"u{i % 7};{i % 2}\n" for i in range(50)), ";", True),
        ("".join(f"u{i % 7}\t{i % 2}\n" for i in range(50)), "\t", False),
        ("name,label\n" + "".join(f'"a, b{i % 7}",{i % 2}\n' for i in range(50)), ",", True),
        ("".join(f"{i % 5} {i % 3} {i % 2}\n" for i in range(50)), " ", False),
        ("\ufeffuser,label\n" + "".join(f"u{i % 7},{'yes' if i % 3 else 'no'}\n" for i in range(50)), ",", True),
    ],
)
def test_separator_and_header(folder, text, separator, header):
    (folder / "data.csv").write_text(text)
    init("data.csv", "out", yes=True)
    options = config("out")["data"]["options"]
    assert options.get("delimiter", ",") == separator
    assert ("column_names" not in options) == header


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        (["<=50K", "<=50K", ">50K"], "income == '>50K'"),
        (["yes", "yes", "no"], "income == 'yes'"),
        (["1", "1", "2"], "income >= 2"),
        (["1", "1", ""], None),
    ],
)
def test_labels_by_rule(folder, values, rule):
    lines = "".join(f"u{i % 5},{values[i % len(values)]}\n" for i in range(120))
    (folder / "data.csv").write_text(f"user,income\n{lines}")
    if values[-1] == "":
        with pytest.raises(DataError, match="'income' has one value only; a label has two"):
            init("data.csv", "out", label="income", yes=True)
        return
    init("data.csv", "out", label="income", yes=True)
    assert config("out")["data"]["options"]["labels"] == {"income": rule}


def test_a_file_of_a_spreadsheet_with_decimal_commas(folder):
    rows = "".join(
        f"{1 + i * 27 // ROWS}.5.2024 08:{i % 60:02d};{i % 7:03d};"
        f"{['1.234,50', '5,0', '12,25', '0,07', 'k.A.'][i % 5]};{i % 12 + 100},{i % 25};{5 + i % 3},5;"
        f"{1 + i % 9}/31/2024;{'ja' if i % 3 else 'nein'}\n"
        for i in range(ROWS)
    )
    names = "Datum;Größe;Preis (€);Gesehen;Rabatt;Lieferung;Rückgabe"
    (folder / "bestellungen.csv").write_text(f"\ufeff{names}\n{rows}".replace("\n", "\r\n"), encoding="utf-8")
    _, output = persia("init", "bestellungen.csv", "--yes")
    assert "Numbers are written with a decimal comma and '.' between thousands." in " ".join(output.split())
    found = config("bestellungen_model")
    features, dense = uses(found)
    options = found["data"]["options"]
    assert dense == ["Preis (€)", "Rabatt"]
    assert set(features) == {"Größe", "Gesehen", "Datum_weekday"}
    assert {key: options[key] for key in ("decimal", "thousands", "null_values")} == {
        "decimal": ",",
        "thousands": ".",
        "null_values": ["k.A."],
    }
    assert features["Gesehen"]["split"] == ","  # Pairs of ids, no numbers.
    assert options["split"]["at"].startswith("2024-05-25 08:")
    assert "Lieferung: dates with slashes" in (folder / "bestellungen_model" / "config.toml").read_text()
    status, output = persia(
        "train", "bestellungen_model/config.toml", "--set", "train.max_steps=2", "--set", "trainer.progress=false"
    )
    assert status == 0, output


@pytest.mark.parametrize(
    ("name", "values", "numerals"),
    [
        ("x", ["1,234.50", "7", "12"], (".", ",")),
        ("views", ["1,234", "7", "12"], (".", ",")),
        ("x", ["229,453", "7", "12"], (".", "")),  # Perhaps two ids.
        ("x", ["12,5", "7", "3,25"], (".", "")),
        ("x", ["12,5", "7", "3,05"], (",", "")),
        ("x", ["12,5", "7", "7.5"], (".", "")),
        ("x", ["1 234,50", "7", "12,25"], (",", " ")),
        ("x", ["1\u202f234,50", "7\u00a0000", "12,25"], (",", " ")),
        ("x", ["1'234.50", "7", "12.25"], (".", "'")),
    ],
)
def test_writing_of_numbers(folder, name, values, numerals):
    lines = "".join(f'u{i % 5},"{values[i % len(values)]}",{i % 2}\n' for i in range(60))
    (folder / "data.csv").write_text(f"user,{name},label\n{lines}")
    init("data.csv", "out", yes=True)
    found = config("out")
    options = found["data"]["options"]
    assert (options.get("decimal", "."), options.get("thousands", "")) == numerals
    assert (name in uses(found)[1]) == (numerals != (".", ""))


def test_rows_without_a_label_are_left_out(folder):
    lines = "".join(f"u{i % 5},{['0', '1', ''][i % 3]}\n" for i in range(120))
    (folder / "data.csv").write_text(f"user,label\n{lines}")
    init("data.csv", "out", yes=True)
    assert config("out")["data"]["options"]["where"] == "label is not None"


@pytest.mark.parametrize(
    ("values", "separator"),
    [(["a; b", "b; c; a", "c"], "; "), (["a; b", "b;c", "c"], ";"), (["a|b", "c"], "|"), (["a; b;", "c"], ";")],
)
def test_spaces_after_a_separator_belong_to_it(folder, values, separator):
    lines = "".join(f"u{i % 5},{values[i % len(values)]},{i % 2}\n" for i in range(120))
    (folder / "data.csv").write_text(f"user,tags,label\n{lines}")
    init("data.csv", "out", yes=True)
    assert uses(config("out"))[0]["tags"]["split"] == separator


def test_lists_share_the_embeddings_of_their_items(folder):
    item = np.arange(ROWS) % 40
    table = {
        "item_id": item,
        "user_id": np.arange(ROWS) * 7 % 90 + 1000,
        "seen": [[int(i), int(i + 3) % 40] for i in item],
        "vector": [[0.5, 0.5]] * ROWS,
        "label": item % 2,
    }
    pq.write_table(pa.table(table), folder / "data.parquet")
    init("data.parquet", "out", yes=True)
    features, dense = uses(config("out"))
    assert features["seen"] == {"name": "seen", "dim": 16, "table": "item_id", "pooling": "mean"}
    assert features["item_id"]["dim"] == 16
    assert dense == []
    assert "vector: holds lists of double" in (folder / "out" / "config.toml").read_text()


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_rows_of_several_files_count_together(folder, suffix, monkeypatch):
    (folder / "data").mkdir()
    for part in range(3):
        columns = {"user": [f"u{i % 5}" for i in range(60)], "label": [i % 2 for i in range(60)], "part": [part] * 60}
        write = pq.write_table if suffix == "parquet" else pa_csv.write_csv
        write(pa.table(columns), folder / "data" / f"{part}.{suffix}")
    init("data", "out", yes=True)
    text = (folder / "out" / "config.toml").read_text()
    assert "from its 180 rows" in text
    assert 'name = "part"' in text  # Not the same in every row.
    monkeypatch.setattr("persia.cli.init.sample.MAX_ROWS", 100)
    init("data", "some", yes=True)
    read = 60 if suffix == "parquet" else 100  # Of Parquet, only whole files after the first.
    assert f"from the first {read} rows" in (folder / "some" / "config.toml").read_text()


def test_an_unclear_label_is_asked_or_refused(folder, monkeypatch):
    lines = "".join(f"u{i % 5},{'ab'[i % 2]},{'cd'[i // 2 % 2]},e{i % 3}\n" for i in range(120))
    (folder / "data.csv").write_text(f"user,one,two,three\n{lines}")
    with pytest.raises(ConfigError, match=r"unsure which column to predict: one, two\. Name it with --label COLUMN"):
        init("data.csv", "out")
    assert not (folder / "out").exists()
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    answers = iter(["user", "two"])
    monkeypatch.setattr("typer.prompt", lambda *_, **__: next(answers))
    init("data.csv", "out")
    assert config("out")["schema"]["labels"] == ["two"]
    init("data.csv", "taken", yes=True)
    assert config("taken")["schema"]["labels"] == ["one"]


@pytest.mark.parametrize(
    ("name", "is_id"),
    [
        ("Customer No.", True),
        ("account_number", True),
        ("Kunden-Nr.", True),
        ("customer", True),
        ("customer visits", False),
        ("number of visits", False),
        ("total number", False),
        ("number", False),
        ("nr", False),
    ],
)
def test_names_of_whole_numbers(folder, name, is_id):
    lines = "".join(f"u{i % 5},{100_000 + i * i % 1_009 * 97},{i % 2}\n" for i in range(900))
    (folder / "data.csv").write_text(f"shop,{name},label\n{lines}")
    init("data.csv", "out", yes=True)
    features, dense = uses(config("out"))
    assert (name in features, name in dense) == (is_id, not is_id)


def test_whole_numbers_that_may_be_ids_are_asked(folder, monkeypatch):
    lines = "".join(f"u{i % 5},{i % 60},{i % 2}\n" for i in range(300))
    (folder / "data.csv").write_text(f"user,thing,label\n{lines}")
    init("data.csv", "guessed", yes=True)
    assert uses(config("guessed"))[1] == []
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    monkeypatch.setattr("typer.prompt", lambda *_, **__: "number")
    init("data.csv", "asked")
    assert uses(config("asked"))[1] == ["thing"]


GOOD = "".join(f"{i % 5},{'xyz'[i % 3]},{i % 2}\n" for i in range(100))
HOSTILE = {
    "no label": ("a,b,c\n" + "".join(f"{i % 5},{'xyz'[i % 3]},{i % 7}\n" for i in range(100)), "Name one with --label"),
    "names twice": ("id,x,x\n" + GOOD, "has 2 columns named 'x'; rename"),
    "ragged": ("id,x,label\n" + GOOD + "1,2\n", r"line 102 has 2 fields instead of 3: '1,2'"),
    "zero bytes": (b"\x00\x01\x02" * 999, "is not text: it has zero bytes"),
    "not UTF-8": ("id,x,label\n" + GOOD.replace("x", "ü")).encode("latin-1"),
    "empty": ("", "is empty"),
    "blank": ("\n\n\n", "is empty"),
    "only a header": ("id,x,label\n", "has only one line"),
    "two rows": ("id,x,label\n1,a,0\n2,b,1\n", "has 2 rows; give a file with at least 20"),
    "constant label": ("id,x,label\n" + GOOD.replace(",1\n", ",0\n"), "'label' has one value only; a label has two"),
    "constant label beside a flag": (
        "flag,x,label\n" + "".join(f"{i % 2},{'xyz'[i % 3]},0\n" for i in range(100)),
        "'label' has one value only; a label has two",
    ),
    "two ids": ("user_id,x\n" + "".join(f"{i % 2},{'xyz'[i % 3]}\n" for i in range(100)), "Name one with --label"),
    "texts as labels": (
        "id,label\n" + "".join(f"{i % 5},x{i // 3}\n" for i in range(100)),
        "'label' has 34 different texts; a label has two, or at most 100 classes",
    ),
    "one column": ("label\n" + "0\n1\n" * 100, "has no columns that a comma, tab"),
    "wide": (",".join(f"c{i}" for i in range(9_999)) + ",label\n" + ("1," * 9_999 + "1\n") * 30, "has 10,000 columns"),
    "only numbers": (
        "a,b,label\n" + "".join(f"{i / 7},{i / 3},{i % 2}\n" for i in range(100)),
        "has no column of ids, categories or lists, only numbers",
    ),
    "JSON": ('{"id": 1, "label": 0}\n' * 100, "looks like JSON; if it has an object in each line"),
    "a spreadsheet": (b"PK\x03\x04" + b"1" * 99, "is an archive, or a spreadsheet; save the sheet as CSV"),
    "open quote": ('id,x,label\n1,"open,0\n' + GOOD, "close open quotes"),
    "one positive": (
        "id,x,label\n" + GOOD.replace(",1\n", ",0\n") + "1,x,1\n",
        "'label' is the same in too many rows to train on some and test on others",
    ),
}
HOSTILE["UTF-16"] = (f"id,x,label\n{GOOD}".encode("utf-16"), "is text in UTF-16, not UTF-8; convert it: iconv")
HOSTILE["not UTF-8"] = (HOSTILE["not UTF-8"], "line 2 has the byte 0xfc. Convert it: iconv")


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_and_leave_nothing(folder, name):
    content, message = HOSTILE[name]
    (folder / "data.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        init("data.csv", "out", yes=True)
    assert [path.name for path in folder.iterdir()] == ["data.csv"]


def test_a_corrupt_parquet_file_is_refused(folder):
    (folder / "data.parquet").write_bytes(b"PAR1" + b"1" * 99)
    with pytest.raises(DataError, match="may be truncated, corrupt or of another format"):
        init("data.parquet", "out", yes=True)


def test_unknown_label_and_no_file(folder):
    (folder / "data.csv").write_text(GOOD)
    with pytest.raises(ConfigError, match=r"has no column 'label'; it has column_1 \(0\), column_2 \(x\)"):
        init("data.csv", "out", label="label")
    with pytest.raises(DataError, match="There is no file or directory absent"):
        init("absent.csv", "out")


def test_files_are_overwritten_by_force_only(folder):
    (folder / "data.csv").write_text(f"id,x,label\n{GOOD}")
    init("data.csv", "out", yes=True)
    (folder / "out" / "model.py").write_text("mine")
    with pytest.raises(ConfigError, match="already; give another directory with --out, or overwrite with --force"):
        init("data.csv", "out", yes=True)
    assert (folder / "out" / "model.py").read_text() == "mine"
    init("data.csv", "out", yes=True, force=True)
    assert "class Model" in (folder / "out" / "model.py").read_text()
    (folder / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file; give another directory"):
        init("data.csv", "file", yes=True)


def test_a_failure_to_write_leaves_nothing(folder, monkeypatch):
    (folder / "data.csv").write_text(f"id,x,label\n{GOOD}")
    write = Path.write_text

    def full(path, *arguments, **options):
        if path.name == ".train.py.part":
            raise OSError(28, "No space left on device")
        return write(path, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        init("data.csv", "new/out", yes=True)
    assert [path.name for path in folder.iterdir()] == ["data.csv"]


def test_odd_names_and_quotes_survive(folder):
    head = '"a ""quoted"" name"," km/h",labels = { x = 1 }\n'
    (folder / 'it\'s "odd".csv').write_text(
        head + "".join(f"x{i % 5},{i / 3},{'no' if i % 2 else 'yes'}\n" for i in range(99))
    )
    init('it\'s "odd".csv', "out", label="labels = { x = 1 }", yes=True)
    status, output = persia("train", "out/config.toml", "--set", "train.max_steps=2", "--set", "trainer.progress=false")
    assert status == 0, output


@pytest.mark.processes
def test_both_ways_train_as_they_are(folder, forks):
    (folder / "clicks.csv").write_text(clicks())
    status, printed = persia("init", "clicks.csv", "--yes")
    assert status == 0
    assert "persia train clicks_model/config.toml" in printed
    status, output = persia("train", "clicks_model/config.toml", "--set", "trainer.progress=false")
    assert status == 0, output
    assert "evaluation" in output
    checkpoint = "clicks_model/runs/config/latest"
    status, output = persia("evaluate", "clicks_model/config.toml", "--checkpoint", checkpoint)
    assert status == 0, output
    # As the line says that `persia init` prints; a file that comes later has no label yet.
    lines = [line.rpartition(",") for line in clicks().splitlines()[:51]]
    (folder / "NEW_FILE").write_text("".join(f"{features}\n" for features, _, _ in lines))
    (line,) = re.findall(r"persia (predict .*)", printed)
    status, output = persia(*line.split())
    assert status == 0, output
    assert len((folder / "predictions.csv").read_text().splitlines()) == 51
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    done = forks.run(["../clicks_model/train.py"], elsewhere)
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"On held-out rows: AUC ([\d.]+)", done.stdout)[1]) > 0.9
    assert any(path.name != "config" for path in (folder / "clicks_model" / "runs").iterdir())


AMOUNTS = {
    "dollars": (["$12.30", "$1,234.50", "$7", "$0.5"], {"thousands": ",", "units": {"price": "$"}}, 1234.5),
    "euros": (
        ["12,30 €", "1.234,50 €", "7 €", "0,5 €"],
        {"decimal": ",", "thousands": ".", "units": {"price": "€"}},
        1234.5,
    ),
    "percents": (["17 %", "2.5 %", "7 %", "0.5 %"], {"units": {"price": "%"}}, 17),
}


@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl"])
@pytest.mark.parametrize("name", AMOUNTS)
def test_amounts_are_numbers(folder, name, suffix, capsys):
    texts, options, largest = AMOUNTS[name]
    rows = [{"user": f"u{i % 7}", "price": texts[i % 4], "label": str(i % 2)} for i in range(100)]
    path = folder / f"data.{suffix}"
    if suffix == "csv":
        lines = "".join(";".join(row.values()) + "\n" for row in rows)
        path.write_text(f"user;price;label\n{lines}", encoding="utf-8")
    elif suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        table = pa.Table.from_pylist(rows)
        pq.write_table(table.set_column(1, "price", table.column("price").dictionary_encode()), path)
    init(path.name, "out", yes=True)
    found = config("out")
    assert uses(found)[1] == ["price"]
    assert {key: found["data"]["options"][key] for key in options} == options
    assert f"Amounts: price in {options['units']['price']}." in capsys.readouterr().out
    schema = persia_package.Schema([persia_package.IdFeature("user", dim=2)], dense_features=["price"])
    delimiter = {"delimiter": ";"} if suffix == "csv" else {}
    read = getattr(persia_package.data, suffix)(path, schema, **delimiter, **options)
    assert max(batch.dense.max() for batch in read) == largest


def test_texts_for_missing_numbers_in_parquet(folder):
    prices = ["k.A." if i % 10 == 0 else f"{i},50 €" for i in range(100)]
    table = pa.table({"user": [f"u{i % 7}" for i in range(100)], "price": prices, "label": [i % 2 for i in range(100)]})
    pq.write_table(table, folder / "data.parquet")
    init("data.parquet", "out", yes=True)
    found = config("out")
    assert found["data"]["options"]["null_values"] == ["k.A."]
    assert found["schema"]["dense_features"][0]["missing_indicator"]
    status, printed = persia("train", "out/config.toml", "--set", "train.max_steps=2")
    assert status == 0, printed


def test_json_lines(folder):
    lines = [
        {
            "user": f"u{i % 7}",
            "tags": [f"t{i % 3}"] * (i % 3),
            "at": f"2024-05-{1 + i // 10:02d} 10:00:00",
            "label": i % 2,
        }
        for i in range(100)
    ]
    for number, (begin, end) in enumerate(((0, 60), (60, 100))):
        text = "".join(
            json.dumps(line | {"price": i * (1 if number else 1.5)}) + "\n" for i, line in enumerate(lines[begin:end])
        )
        (folder / f"{number}.jsonl").write_text(text)
    init("*.jsonl", "out", yes=True)
    found = config("out")
    features, dense = uses(found)
    assert found["data"]["kind"] == "jsonl"
    assert set(features) == {"user", "tags"}
    assert dense == ["price"]
    assert found["data"]["options"]["split"]["column"] == "at"
    assert "persia.data.jsonl(" in (folder / "out" / "train.py").read_text()
    status, printed = persia("train", "out/config.toml", "--set", "train.max_steps=2")
    assert status == 0, printed


@pytest.mark.parametrize("name", ["Stars (1-5)", "score/10", "User rating [1..5]", "rating out of 5", "stars_5"])
def test_ratings_are_labels(folder, name):
    rows = "".join(f"u{i % 7},i{i % 9},{1 + i % 5}\n" for i in range(100))
    (folder / "data.csv").write_text(f"user,item,{name}\n{rows}")
    init("data.csv", "out", yes=True)
    found = config("out")
    (label,) = found["schema"]["labels"]
    assert label == {"name": name.replace("/", "_"), "kind": "regression"}
    assert "labels" not in found["data"]["options"]


def test_a_log_of_events_without_a_label(folder):
    rows = "".join(f"i{i % 9},u{i % 7},{1_700_000_000 + 60 * i}\n" for i in range(100))
    (folder / "data.csv").write_text(f"item_id,customer_id,ts\n{rows}")
    with pytest.raises(DataError, match=r"needs no label\. Run it with --owner customer_id --time ts instead\.$"):
        init("data.csv", "out")
    (folder / "data.csv").write_text("".join(f"{line.rpartition(',')[0]}\n" for line in f"item,user,t\n{rows}".split()))
    with pytest.raises(DataError, match=r"COLUMN: item, user\.$"):  # Nothing says when.
        init("data.csv", "out")


def test_a_terminal_is_asked_for_the_label(folder, monkeypatch, capsys):
    rows = "".join(f"u{i % 7},i{i % 9},{1 + i % 5}\n" for i in range(100))
    (folder / "data.csv").write_text(f"user,item,quality\n{rows}")
    with pytest.raises(DataError, match="cannot guess which column to predict"):
        init("data.csv", "out")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("nothing\nuser\nquality\nperhaps\nrule\n"))
    init("data.csv", "out")
    printed = capsys.readouterr().out
    assert "cannot guess which column to predict" in printed
    assert "Choose one of: user, item, quality" in printed
    assert "'user' has 7 different texts" in printed
    assert "Predict the value, or whether quality >= 4?" in printed
    assert "Answer value or rule." in printed
    assert config("out")["schema"]["labels"] == ["quality"]
    assert config("out")["data"]["options"]["labels"] == {"quality": "quality >= 4"}
