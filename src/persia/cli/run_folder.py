"""Folders of runs: `runs/NAME/2026-11-27-142530` next to a configuration, and the link `latest` to the last one."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from pathlib import Path
from types import TracebackType

from persia.cli.config_paths import directory_of
from persia.errors import ConfigError

__all__ = ["LATEST", "RunFolder", "config_of", "runs_of"]

LATEST = "latest"


def runs_of(config: str) -> Path:
    """Returns the directory of the runs of a configuration."""
    return directory_of(config) / "runs" / Path(config).stem


def config_of(run: str) -> str:
    """Returns the configuration of a run by where its directory is: `NAME.toml` of `runs/NAME/RUN`.

    Raises:
        ConfigError: there is none.
    """
    runs = Path(os.path.abspath(run)).parent
    config = runs.parent.parent / f"{runs.name}.toml"
    if runs.parent.name == "runs" and config.is_file():
        return str(config)
    raise ConfigError(
        f"The configuration of the run {run} is not known by its place; give it with --config.", field="config"
    )


class RunFolder:
    """A new folder for a run, named after the time. A context manager; removes a folder without a checkpoint on exit.

    Args:
        config: path of the configuration.

    Raises:
        ConfigError: the folder cannot be made.
    """

    def __init__(self, config: str) -> None:
        self._runs = runs_of(config)
        self.path = self._make()
        self._previous_latest: str | None = None
        """Target of `latest` before this run."""
        self._linked = False

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        from persia.checkpoint import list_checkpoints

        if list_checkpoints(self.path):
            return
        if self._linked:
            self._link(self._previous_latest)
        with contextlib.suppress(OSError):  # Not empty: the record of a run that saved nothing, or other runs.
            for empty in (self.path, self._runs, self._runs.parent):
                empty.rmdir()

    def link(self) -> None:
        """Points `latest` to this folder, if the file system has links and `latest` is one."""
        latest = self._runs / LATEST
        if latest.is_symlink() or not latest.exists():
            self._previous_latest = os.readlink(latest) if latest.is_symlink() else None
            self._linked = self._link(self.path.name)

    def _make(self) -> Path:
        name = time.strftime("%Y-%m-%d-%H%M%S")
        for number in itertools.count(1):
            path = self._runs / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:  # Another run started in the same second.
                continue
            except OSError as error:
                raise ConfigError(
                    f"Cannot make {path} for this run: {error.strerror}. Give another directory with --output.",
                    path=str(path),
                ) from error
            return path
        raise AssertionError("unreachable")

    def _link(self, target: str | None) -> bool:
        """Points `latest` to a folder, or removes it for None. Returns whether that was possible."""
        latest, draft = self._runs / LATEST, self._runs / f".{LATEST}-{os.getpid()}"
        try:
            if target is None:
                latest.unlink(missing_ok=True)
            else:
                draft.unlink(missing_ok=True)
                draft.symlink_to(target, target_is_directory=True)
                draft.replace(latest)
        except OSError:  # Some file systems have no links.
            return False
        return True
