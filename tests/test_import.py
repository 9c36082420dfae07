"""`import persia` stays cheap: no library is loaded before something needs it."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

HEAVY = (
    "numpy",
    "torch",
    "pyarrow",
    "ray",
    "zmq",
    "msgspec",
    "fsspec",
    "safetensors",
    "rich",
    "typer",
    "persia._core",
    "asyncio",
)


def loaded(statement):
    code = f"import sys; {statement}; print(*sorted(sys.modules))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_the_package_alone_loads_no_library():
    assert loaded("import persia").isdisjoint(HEAVY)


def test_a_schema_needs_no_torch():
    found = loaded("import persia; persia.Schema([persia.IdFeature('item', dim=8)])")
    assert found.isdisjoint({"torch", "pyarrow", "ray", "rich", "typer"})
    assert "msgspec" in found  # The check sees what a name loads.


def test_a_trainer_of_batches_of_ones_own_needs_no_readers():
    found = loaded("import persia; persia.Trainer; persia.nn.models.FFNN")
    assert not [name for name in found if name.startswith("persia.data")]
    assert "torch" in found


def test_the_process_of_a_ps_loads_nothing_of_other_roles():
    """It joins, or restarts, while training waits for it."""
    pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')
    found = loaded("import persia.cluster.ray.server_host")
    others = ("coordinator", "data", "worker", "nn", "trainer", "checkpoint", "cluster.embedded", "metrics")
    names = tuple(f"persia.{name}" for name in others)
    assert not [name for name in found if name in names or name.startswith(tuple(f"{n}." for n in names))]
    assert "persia.ps.server" in found
