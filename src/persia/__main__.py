"""`python -m persia` is the command `persia`."""

from persia.cli import main

main()
