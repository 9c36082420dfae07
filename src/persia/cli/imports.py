"""Imports user modules, which define modes and models."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from persia.errors import ConfigError

__all__ = ["Imports", "add_folder", "import_modules"]


class Imports(msgspec.Struct, frozen=True):
    """The field of a configuration that must be read before all others.

    Attributes:
        imports: see `RunConfig`.
    """

    imports: list[str] = []


def add_folder(config: str) -> None:
    """Lets modules be imported from the folder of a configuration first, then from the working directory."""
    folder = str(Path(config).resolve().parent)
    sys.path[:] = dict.fromkeys((folder, os.getcwd(), *sys.path))


def import_modules(names: Iterable[str], field: str = "imports") -> None:
    """Imports modules from the working directory or `sys.path`, so that their modes are registered.

    The installed program looks in the working directory, as `python -m persia` does.

    Args:
        names: names of modules.
        field: field of the configuration that names them, for error messages.

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
            raise ConfigError(f"Cannot import {name!r}: {cause}. {remedy}.", field=field, module=name) from error
