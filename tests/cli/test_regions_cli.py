"""`persia cluster regions`, as a user types it."""

import subprocess

import pytest

from persia.ps.regions import LAYOUT, Regions, leftovers
from persia.store import NativeStore, TableConfig

pytestmark = pytest.mark.processes


@pytest.fixture
def regions(forks, tmp_path):
    def run(*arguments):
        done = forks.run(["-m", "persia", "cluster", "regions", *arguments], tmp_path)
        done.check_returncode()
        return done.stdout

    return run


def test_lists_and_cleans(tmp_path, regions):
    assert "no regions" in regions("--directory", str(tmp_path))
    used, left = (tmp_path / f"persia-{name}" / "ps-0" for name in ("used", "left"))
    stores = [NativeStore(), NativeStore()]
    for store, directory in zip(stores, (used, left), strict=True):
        Regions(str(directory)).create_or_attach(store, [TableConfig("item", 4, capacity=100)])
    stores.pop()
    del store
    text = regions("--directory", str(tmp_path))
    assert "in use" in text
    assert "left over" in text
    assert "item" in text
    assert "3, not" not in text
    assert left.exists()
    text = regions("--directory", str(tmp_path), "--clean")
    assert "removed" in text
    assert not left.parent.exists()
    assert [entry.path for entry in leftovers(str(tmp_path))] == [str(used)]
    assert not leftovers(str(tmp_path))[0].remove()
    assert used.exists()


def test_shows_which_regions_this_version_cannot_read(tmp_path, regions):
    directory = tmp_path / "persia-a" / "ps-0"
    store = NativeStore()
    Regions(str(directory)).create_or_attach(store, [TableConfig("item", 4, capacity=100)])
    del store
    for path in directory.glob("000-item.*"):
        with path.open("r+b") as file:
            file.seek(8)
            file.write((LAYOUT + 1).to_bytes(4, "little"))
    assert f"{LAYOUT + 1}, not {LAYOUT}" in regions("--directory", str(tmp_path))


def test_a_directory_that_is_not_there(tmp_path, regions):
    with pytest.raises(subprocess.CalledProcessError) as caught:
        regions("--directory", str(tmp_path / "misspelt"))
    assert "there is no such directory" in caught.value.stderr
