"""The URL of a topic: brokers, topic, and settings of librdkafka."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from persia.checks import without_userinfo
from persia.errors import ConfigError

__all__ = ["OWN_SETTINGS", "TopicAddress", "parse_address"]

OWN_SETTINGS = frozenset(
    {
        "acks",
        "auto.offset.reset",
        "bootstrap.servers",
        "enable.auto.commit",
        "enable.auto.offset.store",
        "enable.partition.eof",
        "group.id",
        "message.timeout.ms",
    }
)
"""Settings that persia sets itself."""

_BROKER = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")
_TOPIC = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}")
_SECRET = re.compile(r"password|secret|username|token|\.pem$|\.key$")
"""Settings that must not be in a URL, as it appears in messages, configurations and checkpoints."""


@dataclass(frozen=True)
class TopicAddress:
    """A topic of Kafka.

    Attributes:
        bootstrap: addresses of some brokers, `host:port,host:port`.
        topic: name of the topic.
        settings: settings of librdkafka.
    """

    bootstrap: str
    topic: str
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def url(self) -> str:
        """The URL without settings."""
        return f"kafka://{self.bootstrap}/{self.topic}"


def parse_address(url: str) -> TopicAddress:
    """Parses `kafka://HOST:PORT[,HOST:PORT]/TOPIC[?config=FILE&SETTING=VALUE&...]`.

    Args:
        url: URL of the topic. `config` names a file with a setting `SETTING=VALUE` per line, as for Kafka's tools.

    Raises:
        ConfigError: it has another form, a setting is not allowed, or the file cannot be read.
    """
    shown = without_userinfo(url).partition("?")[0]
    try:
        parts = urlsplit(url)
        settings = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError as error:
        raise ConfigError(f"{shown} is not a URL: {error}.", field="url") from None
    topic = parts.path.removeprefix("/")
    if parts.fragment or not _TOPIC.fullmatch(topic) or not all(map(_BROKER.fullmatch, parts.netloc.split(","))):
        raise ConfigError(
            f"{shown} is not the URL of a topic; expected kafka://HOST:PORT[,HOST:PORT]/TOPIC.", field="url"
        )
    file = settings.pop("config", None)
    for name in settings:
        if _SECRET.search(name):
            raise ConfigError(
                f"{shown} has the setting {name!r}, which would be visible in messages and checkpoints; put it into a "
                "file, and give ?config=FILE.",
                field="url",
            )
    settings = {**({} if file is None else _read(file)), **settings}
    for name in OWN_SETTINGS & settings.keys():
        raise ConfigError(f"{shown} has the setting {name!r}, which persia sets; remove it.", field="url")
    return TopicAddress(parts.netloc, topic, settings)


def _read(file: str) -> dict[str, str]:
    """Returns the settings of a file: a name, `=` and a value per line. Lines that start with # are comments."""
    try:
        lines = [line.strip() for line in Path(file).read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read the settings of Kafka in {file}: {error}.", field="url") from error
    settings = {}
    for number, line in enumerate(lines, 1):
        if line and not line.startswith("#"):
            name, equals, value = line.partition("=")
            if not equals:
                raise ConfigError(f"Invalid line {number} of {file}; expected SETTING=VALUE.", field="url")
            settings[name.strip()] = value.strip()
    return settings
