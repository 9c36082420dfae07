"""How the study of Adagrad's defaults is scored."""

from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from benchmarks import defaults
from persia import data
from persia.schema import INITIAL_ACCUMULATOR as DEFAULT
from persia.schema import RsqrtDim, Uniform


def test_the_score_is_that_of_the_default_at_a_documented_rate():
    one = {(DEFAULT, 0.05): 0.70, (DEFAULT, 0.1): 0.72, (DEFAULT, 0.2): 0.76, (1e-2, 0.2): 0.75}
    assert defaults.lost(one) == pytest.approx(-0.04)  # 0.2 is no documented rate of the default.
    other = dict.fromkeys(one, 0.7) | {(1e-2, 0.2): 0.79}
    assert defaults.mean([one, other])[1e-2, 0.2] == pytest.approx(0.77)
    assert defaults.lost(defaults.mean([one, other])) == pytest.approx(0.71 - 0.77)


def test_the_study_has_the_default_at_its_documented_rates():
    assert DEFAULT in defaults.ACCUMULATORS["smoke"]
    assert DEFAULT in defaults.ACCUMULATORS["laptop"]
    assert set(defaults.DOCUMENTED) <= set(defaults.RATES["laptop"])


def test_first_values_are_compared_each_at_its_best_rate(monkeypatch):
    areas = {(Uniform(), 0.05): 0.70, (Uniform(), 0.1): 0.71, (RsqrtDim(), 0.05): 0.72, (RsqrtDim(), 0.1): 0.60}

    def trained(seed, task, optimizer, first_values):
        assert len(task.train) == defaults.BATCHES["smoke"]
        return SimpleNamespace(evaluation=SimpleNamespace(auc=areas[first_values, optimizer.lr] + seed / 1000))

    monkeypatch.setattr(defaults, "trained", trained)
    (found,) = defaults.first_values("smoke")
    assert found.name == "quality.first_values.sparse"
    assert found.value == pytest.approx(0.01)
    assert found.details["rates"] == {"uniform": 0.1, "rsqrt_dim": 0.05}


def test_data_that_are_not_here_are_skipped_with_a_line(monkeypatch, capsys):
    monkeypatch.setattr(data, "find", lambda name: None)
    assert defaults.globo_rows("smoke") is None
    assert defaults.adult_rows("smoke") is None
    globo, adult = capsys.readouterr().err.splitlines()
    assert globo.startswith(
        "globo_ctr is not here; set PERSIA_DATA to the directory that holds it. globo_ctr is made by"
    )
    assert adult == "adult is not here; set PERSIA_DATA to the directory that holds it."
