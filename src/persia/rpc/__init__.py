"""Calls between processes: zero-copy tensor messages over ZeroMQ. A service is a plain class.

    server = rpc.serve(EmbeddingServer(...), "tcp://127.0.0.1:*", protocol=EmbeddingPS)
    ps = rpc.connect(server.address, EmbeddingPS, peer="embedding PS 0")
    rows = ps.lookup({"item": ids}, train=True)

The wire format is specified in `docs/reference/wire.md`.
"""

from persia.rpc.interface import inline, once, waits
from persia.rpc.key_file import add_key, make_keys, promote_key, retire_keys
from persia.rpc.limits import Limits
from persia.rpc.server import Server, serve
from persia.rpc.stub import Future, cast_to, close, connect, start, statistics, within

__all__ = [
    "Future",
    "Limits",
    "Server",
    "add_key",
    "cast_to",
    "close",
    "connect",
    "inline",
    "make_keys",
    "once",
    "promote_key",
    "retire_keys",
    "serve",
    "start",
    "statistics",
    "waits",
    "within",
]
