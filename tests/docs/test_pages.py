"""Tables of figures are written by `python -m benchmarks.pages`; pages keep the sizes that were agreed on."""

import re
from pathlib import Path

import pytest
from benchmarks.page_topics import HEADLINE, TOPICS, Row

from benchmarks import pages

ROOT = Path(__file__).parents[2]
FIGURES = pages.Figures.read()
LINE = {
    "name": "store.x",
    "value": 1.5,
    "unit": "ratio",
    "at_least": 2.0,
    "at_most": None,
    "holds": False,
    "interval": None,
    "machine": "AMD EPYC, 2 cores",
    "commit": "08ca8788",
}


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.stem)
def test_tables_are_up_to_date(page):
    text = page.read_text(encoding="utf-8")
    assert pages.rewritten(text, FIGURES) == text, "run: python -m benchmarks.pages"


def test_every_topic_is_shown_and_every_block_is_known():
    text = "".join(page.read_text(encoding="utf-8") for page in pages.PAGES)
    assert {match[2] for match in pages.BLOCK.finditer(text)} == {*TOPICS, "headline"}
    assert len(HEADLINE) == 3


def words(text):
    """Counts words without code fences, comments and the bars of tables."""
    return len(re.sub(r"<!--.*?-->|\|", " ", text).split())


def test_pages_that_are_read_first_are_short():
    assert words((ROOT / "README.md").read_text(encoding="utf-8")) <= 900
    assert words((ROOT / "docs" / "performance.md").read_text(encoding="utf-8")) <= 2_000


def test_no_figure_of_the_performance_page_is_typed_by_hand():
    text = pages.BLOCK.sub("", (ROOT / "docs" / "performance.md").read_text(encoding="utf-8"))
    explained = text[text.index("## What bounds what misses") :]
    assert re.findall(r"\d[\d.]*(?:x| M rows/s| samples/s)\b", explained) == []


def test_a_row_has_the_newest_line_of_each_machine_and_says_what_misses():
    figures = pages.Figures({"store.x": [LINE, LINE | {"machine": "Intel(R) Xeon(R)", "value": 2.5, "holds": True}]})
    row = pages.table([Row("store.x", "lookups")], figures).splitlines()[-1]
    assert row == "| store.x: lookups | 1.50x; 2.50x | ≥ 2.00x: **1 of 2 missed** | E 08ca878; X 08ca878 |"


def test_a_figure_in_a_sentence_is_the_newest_of_all_machines():
    figures = pages.Figures({"store.x": [LINE, LINE | {"machine": "Intel(R) Xeon(R)", "value": 2.5}]})
    text = "of <!-- figure store.x -->1.00x<!-- end --> and <!-- figure store.* --><!-- end -->."
    shown = "of <!-- figure store.x -->2.50x<!-- end --> and <!-- figure store.* -->2.50x<!-- end -->."
    assert pages.rewritten(text, figures) == shown


def test_runs_on_other_days_are_shown():
    figures = pages.Figures({"store.x": [LINE | {"others": [1.9, 1.2]}]})
    assert "| 1.50x (also 1.20x to 1.90x) |" in pages.table([Row("store.x", "lookups")], figures)


def test_a_pattern_has_its_smallest_and_largest_value():
    figures = pages.Figures({f"store.{i}": [LINE | {"value": 1.0 + i, "holds": i > 0}] for i in range(3)})
    row = pages.table([Row("store.*", "lookups")], figures).splitlines()[-1]
    assert row == "| store: lookups | 1.00x to 3.00x | ≥ 2.00x: **1 of 3 missed** | E 08ca878 |"


def test_a_range_has_its_unit_once_and_a_single_value_once():
    lines = [LINE | {"value": value, "unit": "steps"} for value in (0.938, 0.984)]
    assert pages.figure(lines) == "0.938 to 0.984 steps"
    assert pages.figure([LINE | {"value": value, "unit": "steps"} for value in (7.931, 7.929)]) == "7.93 steps"
    assert pages.figure([LINE | {"value": 6e6, "unit": "rows/s", "others": [9.5e6, 8.2e6]}]).endswith(
        "(also 8.2 to 9.5 M rows/s)"
    )


@pytest.mark.parametrize(
    ("low", "high", "unit", "shown"),
    [(0.05, 0.2, "s", "50 ms to 0.2 s"), (0.01, 0.02, "fraction", "1 to 2 %"), (-0.1, 0.1, "AUC", "-0.1000 to 0.1000")],
)
def test_spans(low, high, unit, shown):
    assert pages.span(low, high, unit) == shown


def test_a_commit_with_uncommitted_changes_has_a_plus():
    figures = pages.Figures({"store.0": [LINE | {"commit": "0a641297-dirty"}], "store.1": [LINE]})
    rows = pages.table([Row("store.0", ""), Row("store.1", ""), Row("store.*", "")], figures).splitlines()[2:]
    assert [row.split(" | ")[-1] for row in rows] == ["E 0a64129+ |", "E 08ca878 |", "E 08ca878+ |"]


def test_a_measure_without_a_line_is_refused():
    with pytest.raises(KeyError, match="No line"):
        pages.table([Row("store.gone", "")], FIGURES)


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (0.0173, "s", "17 ms"),
        (2.9, "s", "2.9 s"),
        (6.855e6, "rows/s", "6.9 M rows/s"),
        (39.01, "rows/s", "39 rows/s"),
        (27.59, "bytes", "27.6 bytes"),
        (-0.00001, "AUC", "0.0000"),
        (0.013, "fraction", "1.3 %"),
        (1.0, "fraction", "100 %"),
    ],
)
def test_quantities(value, unit, shown):
    assert pages.quantity(value, unit) == shown
