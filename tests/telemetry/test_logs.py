"""Log messages cannot control a terminal, whatever handlers a program has."""

import io
import logging
import re
from pathlib import Path

import pytest

import persia
from persia.telemetry.logs import get_logger


@pytest.fixture
def lines():
    log, stream = get_logger("persia.test"), io.StringIO()
    handler = logging.StreamHandler(stream)
    log.addHandler(handler)
    yield log, stream
    log.removeHandler(handler)


def test_names_in_messages_are_escaped_with_handlers_of_the_user(lines):
    log, stream = lines
    log.warning("column %s has %d rows.", "a\x1b[2J", 3)
    log.warning("column %s", "plain")
    assert stream.getvalue() == "column a\\x1b[2J has 3 rows.\ncolumn plain\n"


def test_what_needs_no_escapes_keeps_its_arguments(lines):
    log, _ = lines
    record = log.makeRecord(log.name, logging.INFO, "x", 1, "%s rows", (3,), None)
    assert log.filter(record)
    assert record.args == (3,)


def test_a_record_that_cannot_be_formatted_ends_no_training(lines, monkeypatch):
    log, stream = lines
    monkeypatch.setattr(logging, "raiseExceptions", False)
    log.warning("%d rows", "three")
    log.warning("next")
    assert stream.getvalue() == "next\n"


class Broken:
    """Something that cannot be shown."""

    def __str__(self):
        raise RuntimeError


def test_neither_does_an_argument_that_cannot_be_shown(lines, monkeypatch):
    log, stream = lines
    monkeypatch.setattr(logging, "raiseExceptions", False)
    log.warning("%s", Broken())
    log.warning("%(a)s", {"b": 1})
    log.warning("next")
    assert stream.getvalue() == "next\n"


def test_all_loggers_are_made_in_one_place():
    root = Path(persia.__file__).parent
    made = {
        (path.name, name) for path in root.rglob("*.py") for name in re.findall(r"getLogger\((.*?)\)", path.read_text())
    }
    assert made == {("logs.py", "name"), ("run.py", "name"), ("run.py", '"uvicorn.error"')}
