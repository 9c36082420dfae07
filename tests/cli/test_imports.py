"""Modes of a user's module in the commands."""

import json
import re
import sys
from pathlib import Path

import pytest

from persia import rpc, services
from persia.cli.imports import import_modules
from persia.coordinator import TokenScheduler
from persia.errors import ConfigError
from support.toy_mode import EveryOther

pytestmark = pytest.mark.processes

CONFIG = """
imports = ["my_modes"]

[data]
kind = "synthetic"
batch_size = 200
options = { rows = 2000, id_features = 3, ids_per_feature = 50 }

[mode]
kind = "pairs"
size = 2

[trainer]
progress = false
"""

MODULE = """
from persia.modes import Asynchronous, hold_until_full, register


@register
class Pairs(Asynchronous, frozen=True, tag="pairs"):
    size: int

    def group(self, nn_workers, local_batch):
        return self.size

    def arrive(self, arrival):
        return hold_until_full(arrival)
"""

TAKEN = """
from persia.modes import Sync, register


@register
class Other(Sync, frozen=True, tag="sync"):
    pass
"""

INSTALLED = (str(Path(sys.executable).with_name("persia")),)
MODULE_RUN = ("-m", "persia")


@pytest.fixture
def persia(forks):
    def run(program, *arguments, folder, ok=True):
        done = forks.run([*program, *arguments], folder)
        assert (done.returncode == 0) == ok, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    return run


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "my_modes.py").write_text(MODULE)
    return tmp_path


def test_a_mode_of_the_working_directory_trains_and_resumes(folder, persia):
    persia(INSTALLED, "train", "run.toml", "--output", "out", "--json", "one.json", folder=folder)
    assert json.loads((folder / "one.json").read_text())["global_step"] == 5  # Ten batches, in pairs.
    more = ("--set", "train.epochs=2", "--json", "two.json")
    persia(MODULE_RUN, "train", "run.toml", "--resume", "out", *more, folder=folder)
    assert json.loads((folder / "two.json").read_text())["global_step"] == 10
    assert "AUC" in persia(INSTALLED, "evaluate", "run.toml", "--checkpoint", "out", folder=folder)


def test_the_dumped_configuration_has_the_imports(folder, persia):
    dumped = persia(INSTALLED, "train", "run.toml", "--dump-config", folder=folder)
    assert 'imports = ["my_modes"]' in dumped
    assert 'kind = "pairs"' in dumped
    (folder / "dumped.toml").write_text(dumped)
    assert persia(INSTALLED, "train", "dumped.toml", "--dump-config", folder=folder) == dumped


@pytest.mark.parametrize(
    ("imports", "message"),
    [
        ("[]", "mode.kind: Invalid mode 'pairs'; expected one of: async, auto, .*`imports` in a configuration"),
        ('"my_modes"', "imports: Expected `array`, got `str`"),
        ('["my_mode"]', "Cannot import 'my_mode': .*No module named 'my_mode'. Run the command in"),
        ('["my_modes.py"]', "Cannot import 'my_modes.py': .* Give the name of the module, without .py."),
    ],
)
def test_wrong_imports_are_one_line_that_names_the_field(folder, persia, imports, message):
    text = persia(MODULE_RUN, "train", "run.toml", "--set", f"imports={imports}", folder=folder, ok=False)
    assert re.search(message, text), text
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import absent_module", r"ModuleNotFoundError: No module named 'absent_module'\. `python -c 'import broken'`"),
        ("1 / 0", r"'broken': ZeroDivisionError: division by zero\. `python -c 'import broken'` shows"),
        ("def", r"'broken': SyntaxError: "),
        ("raise SystemExit(0)", r"'broken': SystemExit: 0\. `python -c 'import broken'` shows"),
        ("raise ValueError('two\\nlines.')", r"'broken': ValueError: two lines\. `python"),
        (TAKEN, r"'broken': ConfigError: Mode 'sync' in broken has the name of a mode in persia\.modes\.sync"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named(tmp_path, monkeypatch, text, message):
    (tmp_path / "broken.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ConfigError, match=message):
        import_modules(["broken"])


def test_control_switches_to_a_mode_of_a_users_module(persia):
    tokens = TokenScheduler(5.0)
    with rpc.serve(tokens, protocol=services.TokenService) as server:
        arguments = ("control", "switch", server.address, "every_other", "--set", "limit=7")
        tests = Path(__file__).parents[1]
        persia(MODULE_RUN, *arguments, "--import", "support.toy_mode", folder=tests)
    assert tokens.requested() == EveryOther(7)
