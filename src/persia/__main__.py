"""Runs the command `persia` as `python -m persia`."""

from persia.cli import main

main()
