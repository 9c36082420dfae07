"""The command line: `persia train | evaluate | predict | checkpoint`."""

from persia.cli.app import main

__all__ = ["main"]
