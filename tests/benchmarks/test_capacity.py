"""The figures of docs/capacity.md that `plan.paper` prints."""

from pathlib import Path

import pytest

from benchmarks import runner

PAGE = Path(__file__).resolve().parents[2] / "docs" / "capacity.md"


@pytest.mark.slow
def test_the_page_says_what_plan_paper_prints():
    (measure,) = runner.run(["plan.paper"], "smoke")
    spilled, checkpoint = (measure.details[name] for name in ("with a tenth of the rows in memory", "checkpoint"))
    page = " ".join(PAGE.read_text().split())
    for text in (
        f"take {spilled['bytes of memory'] / 1e12:.0f} TB of memory ({spilled['hosts of 12 TB']} of the paper's hosts)",
        f"and {spilled['bytes of SSD'] / 1e12:.0f} TB of SSD",
        f"**A checkpoint is {checkpoint['bytes'] / 1e12:.0f} TB**",
    ):
        assert text in page
    assert checkpoint["days"] == pytest.approx(checkpoint["bytes"] / checkpoint["bytes/s here"] / 86_400)
