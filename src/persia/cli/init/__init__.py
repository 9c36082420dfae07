"""The command `persia init`, which writes a configuration, a model and a program for a file of samples."""

from persia.cli.init.command import init

__all__ = ["init"]
