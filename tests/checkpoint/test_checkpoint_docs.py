from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from support.checkpoint_samples import make_rows

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "checkpoint.md"


def test_snippet_of_the_format_page(saved: Path) -> None:
    section = PAGE.read_text().split("## Reading it without persia")[1]
    (code, *_) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names: dict[str, Any] = {"DIR": saved, "TABLE": "item"}
    exec(code, names)
    expected = make_rows(7, seed=12)
    assert len(names["rows"]) == 10
    for key, row in zip(expected["ids"].tolist(), expected["embeddings"], strict=True):
        np.testing.assert_array_equal(names["rows"][key], row)
