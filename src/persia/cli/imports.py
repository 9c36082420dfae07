"""Modules of a user, which the commands import before they read a mode."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable

import msgspec

from persia.errors import ConfigError

__all__ = ["Imports", "import_modules"]


class Imports(msgspec.Struct, frozen=True):
    """The field of a configuration that is needed to read the others.

    Attributes:
        imports: see `RunConfig`.
    """

    imports: list[str] = []


def import_modules(names: Iterable[str]) -> None:
    """Imports modules from the working directory or `sys.path`, so that their modes are registered.

    The installed program looks in the working directory, as `python -m persia` does.

    Raises:
        ConfigError: a module is not found or raises an error.
    """
    for name in names:
        if (folder := os.getcwd()) not in sys.path:
            sys.path.insert(0, folder)
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:  # A script without a guard for `__main__` exits.
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if name.endswith(".py"):
                remedy = "Give the name of the module, without .py"
            elif missing is not None and f"{name}.".startswith(f"{missing}."):
                remedy = "Run the command in the directory of the module, or install it"
            else:
                remedy = f"`python -c 'import {name}'` shows where"
            cause = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(".")
            raise ConfigError(f"Cannot import {name!r}: {cause}. {remedy}.", field="imports", module=name) from error
