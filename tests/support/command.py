"""Commands that run in the process of the test, as importing torch anew takes seconds."""

from __future__ import annotations

import contextlib
import io
import sys
from unittest import mock

from persia.cli.app import main

__all__ = ["persia", "run_here"]


def persia(*arguments: object, ok: bool = True, errors: bool = True) -> str:
    """Runs a command that has to succeed, or with `ok=False` to fail; returns what it prints, to stderr too."""
    output = io.StringIO()
    status = run_here(output, *arguments, errors=errors)
    assert (status == 0) == ok, output.getvalue()
    assert "Traceback" not in output.getvalue()
    return output.getvalue()


def run_here(output: io.StringIO, *arguments: object, errors: bool = True) -> int | str:
    """Runs a command; returns its exit status.

    Args:
        output: gets what it prints.
        arguments: of the command.
        errors: whether `output` gets stderr, too.
    """
    argv = mock.patch.object(sys, "argv", ["persia", *map(str, arguments)])
    stderr = contextlib.redirect_stderr(output) if errors else contextlib.nullcontext()
    with argv, contextlib.redirect_stdout(output), stderr:
        try:
            main()
        except SystemExit as end:
            return end.code or 0
    return 0
