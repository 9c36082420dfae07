"""How many examples a property test tries: few in the fast loop, more in the slow one; see the Makefile."""

import os

SCALE = float(os.environ.get("PERSIA_EXAMPLES", "1"))


def examples(count: int) -> int:
    """Returns the number of examples to try where `make test-all` tries `count`; at least 5 of them."""
    return max(min(count, 5), round(count * SCALE))
