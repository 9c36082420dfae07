"""Prints what persia and some of its extras need, a requirement a line: `python .ci/requirements.py [EXTRA...]`.

With it the Makefile installs packages while the core compiles, which takes as long.
"""

import re
import sys
import tomllib
from pathlib import Path


def requirements(project, extras):
    """Yields the requirements of a project and of its extras, also those that an extra takes from others."""
    yield from project["dependencies"]
    waiting, seen = list(extras), set()
    while waiting:
        extra = waiting.pop()
        if extra in seen:
            continue
        seen.add(extra)
        for requirement in project["optional-dependencies"][extra]:
            own = re.fullmatch(rf"{project['name']}\[([\w,-]+)\]", requirement)
            if own:
                waiting += own[1].split(",")
            else:
                yield requirement


if __name__ == "__main__":
    with (Path(__file__).resolve().parents[1] / "pyproject.toml").open("rb") as stream:
        print("\n".join(requirements(tomllib.load(stream)["project"], sys.argv[1:])))
