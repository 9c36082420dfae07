"""The page of the command line has the commands with the options that they take."""

import re
from collections import defaultdict
from pathlib import Path

import pytest
import typer

from persia.cli.app import app

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "command-line.md"
ABRIDGED = ("serve",)
"""Commands with more options than a synopsis should have; its line ends with an ellipsis."""


def synopsis():
    """Returns the options by command of the first code block of the page. Continued lines are indented."""
    options = defaultdict(set)
    block = PAGE.read_text(encoding="utf-8").split("```")[1].replace("\n    ", " ")
    for line in block.splitlines()[1:]:
        name = re.match(r"persia((?: [a-z-]+)+)", line)[1]
        options[name.strip()] |= set(re.findall(r"--[a-z-]+", line))
    return options


@pytest.mark.parametrize(("name", "options"), [pytest.param(*item, id=item[0]) for item in synopsis().items()])
def test_a_command_has_the_options_of_its_synopsis(name, options):
    command = typer.main.get_command(app)
    for word in name.split():
        command = command.commands[word]
    taken = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
    if name in ABRIDGED:
        assert options <= taken
    else:
        assert options == taken
