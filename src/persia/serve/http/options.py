"""Options of a prediction server over HTTP."""

from __future__ import annotations

import os

import msgspec

from persia.checks import check_flag, check_seconds, plain_fields
from persia.errors import ConfigError
from persia.secret_files import SecretFile
from persia.serve.http.limits import ServeLimits
from persia.telemetry.process import LOOPBACK, check_port

__all__ = ["HttpOptions"]


class HttpOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of a prediction server.

    Args:
        host: interface to listen on; 0.0.0.0 for all. Interfaces other than loopback need keys, or `insecure`.
        port: port to listen on; 0 for any free port.
        reuse_port: let several servers of this host listen on one port; the kernel spreads connections over them.
        limits: limits of requests.
        key_file: file with the keys of clients, one per line, to which no other user has access. It is read again when
            it changes. Without it, the keys in PERSIA_SERVE_KEYS, or no keys.
        tls_cert: certificate chain, in PEM. Without it, the server speaks plain HTTP.
        tls_key: key of the certificate, in PEM, to which no other user has access.
        insecure: listen on other interfaces without keys, for networks that only trusted clients can reach.
        drain_seconds: time for requests in progress to complete after SIGTERM.

    Raises:
        ConfigError: an option is invalid.
    """

    host: str = LOOPBACK
    port: int = 8080
    reuse_port: bool = False
    limits: ServeLimits = ServeLimits()
    key_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    insecure: bool = False
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        plain_fields(self)
        check_port(self.port, "port")
        check_flag("reuse_port", self.reuse_port)
        check_flag("insecure", self.insecure)
        check_seconds("drain_seconds", self.drain_seconds)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("TLS needs a certificate and its key; give tls_cert and tls_key.", field="tls_cert")
        for name in ("tls_cert", "tls_key"):
            path = getattr(self, name)
            if path is not None and not os.access(path, os.R_OK):
                raise ConfigError(f"Cannot read {name} = {path!r}; give a file in PEM.", field=name)
        if self.tls_key is not None:
            SecretFile(self.tls_key, "The TLS keys in", "Give a file in PEM.").check()
