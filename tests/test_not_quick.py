"""`tests/not_quick.txt` names tests that exist: one that was renamed would be quick from then on."""

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_the_list_names_tests_that_exist():
    missing = []
    for line in (HERE / "not_quick.txt").read_text().splitlines():
        file, _, name = line.partition("::")
        path = HERE.parent / file
        functions = re.findall(r"def (test_\w+)", path.read_text()) if path.exists() else []
        if line and not line.startswith("#") and name.partition("[")[0] not in functions:
            missing.append(line)
    assert missing == []
