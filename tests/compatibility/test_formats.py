"""Formats are kept from 0.2.0 on: what each released version wrote is loaded, resumed and served."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from compatibility.formats import STEPS, resumed, rows_of, served

ARCHIVES = sorted(Path(__file__).parent.glob("formats-*.zip"), key=str)


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.stem)
def expected(request, tmp_path, monkeypatch):
    """The values of an archive, whose checkpoint and log are in the working directory."""
    with zipfile.ZipFile(request.param) as archive:
        archive.extractall(tmp_path)
    monkeypatch.chdir(tmp_path)
    return json.loads(Path("expected.json").read_text())


def test_there_is_an_archive_of_the_first_release():
    assert [path.name for path in ARCHIVES][:1] == ["formats-0.2.0.zip"]


def test_rows_of_a_checkpoint_are_what_was_written(expected):
    found = rows_of("checkpoint")
    assert found.keys() == expected["rows"].keys()
    for table, arrays in expected["rows"].items():
        assert arrays["ids"]
        for name, values in arrays.items():
            np.testing.assert_array_equal(found[table][name], values, err_msg=f"{table} {name}")


def test_a_run_goes_on_from_a_checkpoint(expected):
    """Also after a change of the mode, which is in the schedule."""
    found, wanted = resumed("checkpoint"), expected["resumed"]
    assert found["begun"] == {"global_step": STEPS, "position": STEPS}
    for name in ("begun", "global_step", "mode", "rows"):
        assert found[name] == wanted[name]
    values = [[result["log_loss"], result["auc"], *result["parameters"]] for result in (found, wanted)]
    # Processors differ in the last bits of sums of products.
    assert values[0] == pytest.approx(values[1], rel=1e-5, abs=1e-5)


def test_a_log_is_served(expected):
    assert served("log") == pytest.approx(expected["served"], abs=1e-6)
