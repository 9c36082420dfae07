"""Prints the lowest version of each dependency of persia, as constraints of pip: `python .ci/lowest.py > lowest.txt`.

Extras are left out: their versions are as new as these allow.
"""

import re
import tomllib
from pathlib import Path


def lowest(dependencies):
    """Yields `NAME==VERSION` for each `NAME>=VERSION`; refuses a dependency without a lowest version."""
    for dependency in dependencies:
        bound = re.fullmatch(r"([\w-]+)>=([\w.]+)", dependency)
        if bound is None:
            raise SystemExit(f"{dependency!r} in pyproject.toml has no lowest version; write it as NAME>=VERSION.")
        yield f"{bound[1]}=={bound[2]}"


if __name__ == "__main__":
    with (Path(__file__).resolve().parents[1] / "pyproject.toml").open("rb") as stream:
        print("\n".join(lowest(tomllib.load(stream)["project"]["dependencies"])))
