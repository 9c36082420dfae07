"""The command line, `persia`."""

from persia.cli.app import main

__all__ = ["main"]
