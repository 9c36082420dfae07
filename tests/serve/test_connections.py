"""Connections that do not read their answers end; bytes of bodies do not count as heads."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import resource
import socket

import pytest
import uvicorn
from uvicorn.server import ServerState

from persia.serve.client import _readable
from persia.serve.http.run import _quiet_uvicorn
from persia.serve.http.uvicorn_protocol import MAX_HEAD_BYTES, limited_protocol


class Transport:
    """Records how a connection ends."""

    def __init__(self):
        self.buffered = 0
        self.ended = ""

    def get_extra_info(self, name, default=None):
        return default

    def get_write_buffer_size(self):
        return self.buffered

    def is_closing(self):
        return bool(self.ended)

    def write(self, data):
        self.buffered += len(data)

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass

    def close(self):
        self.ended = "close"

    def abort(self):
        self.ended = "abort"


async def never(scope, receive, send):
    """An application that does not answer."""
    await asyncio.Event().wait()


def opened(config, state):
    """Returns a protocol of a new connection, and its transport."""
    protocol, transport = config.http_protocol_class(config, state, {}), Transport()
    protocol.connection_made(transport)
    return protocol, transport


def connected(test, head_seconds=3600.0, answer_seconds=3600.0):
    """Runs a test with a protocol and its transport."""

    async def main():
        config = uvicorn.Config(never, http=limited_protocol(head_seconds, answer_seconds, 1000), log_config=None)
        config.load()
        await test(*opened(config, ServerState()))

    asyncio.run(main())


async def ended(transport):
    async with asyncio.timeout(30):
        while not transport.ended:
            await asyncio.sleep(0.001)


def test_a_client_that_does_not_read_is_cut_off():
    async def test(protocol, transport):
        protocol.pause_writing()
        protocol.resume_writing()
        assert protocol._answer_timeout is None
        protocol.pause_writing()
        await ended(transport)
        assert transport.ended == "abort"
        protocol.connection_lost(None)
        assert protocol.flow.write_paused is False  # What waits to send goes on.

    connected(test, answer_seconds=0.001)


@pytest.mark.parametrize("buffered", [0, 1])
def test_a_connection_with_unread_answers_is_aborted(buffered):
    wanted = "abort" if buffered else "close"

    async def keep_alive(_protocol, transport):
        transport.buffered = buffered
        _protocol.timeout_keep_alive_handler()
        assert transport.ended == wanted

    async def late(_protocol, transport):
        transport.buffered = buffered
        await ended(transport)
        assert transport.ended == wanted

    connected(keep_alive)
    connected(late, head_seconds=0.001)


def test_bodies_and_earlier_requests_do_not_count_as_head():
    async def test(protocol, transport):
        size = MAX_HEAD_BYTES + 1000
        protocol.data_received(b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size)
        protocol.data_received(b"x" * size + b"GET /hea")
        assert not transport.ended
        protocol.data_received(b"x" * MAX_HEAD_BYTES)
        assert not transport.ended
        protocol.data_received(b"x")
        assert transport.ended

    connected(test)


def test_a_client_uses_descriptors_of_any_number():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        near, far = socket.socketpair()
        with far, near, socket.socket(fileno=fcntl.fcntl(near, fcntl.F_DUPFD, 1024)) as high:
            assert high.fileno() >= 1024
            assert not _readable(high)
            far.send(b"x")
            assert _readable(high)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_warnings_that_clients_cause_are_rare(caplog):
    logger = logging.getLogger("uvicorn.error")
    for _ in range(2):
        caplog.clear()
        with _quiet_uvicorn():
            for _ in range(100):
                logger.warning("Exceeded concurrency limit.")
                logger.error("a failure of the server")
            logger.warning("another")
        found = [record.getMessage() for record in caplog.records]
        assert [found.count(text) for text in sorted({*found})] == [1, 100, 1]


REQUEST = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"


def several(test, most, app=never):
    """Runs a test with a function that opens connections to one server, which has at most so many."""

    async def main():
        config = uvicorn.Config(app, http=limited_protocol(3600.0, 3600.0, most), log_config=None)
        config.load()
        state = ServerState()
        await test(lambda: opened(config, state))

    asyncio.run(main())


def lost(protocol, transport):
    """Tells a protocol of the end of its connection, as an event loop does."""
    if transport.ended and protocol in protocol.connections:
        protocol.connection_lost(None)


def test_a_new_connection_replaces_the_longest_waiting_one():
    async def test(opens):
        found = [opens() for _ in range(3)]
        found[0][0].data_received(REQUEST)  # Is being answered.
        found[1][0].data_received(REQUEST[:-2])  # Has begun to send, and keeps its place: it waits for its client.
        for ended in (1, 2, 3, 4):
            found.append(opens())
            assert [bool(transport.ended) for _, transport in found].index(True) == 1
            assert found[ended][1].ended == "abort"
            lost(*found[ended])
            assert sum(not transport.ended for _, transport in found) == 3
        assert not found[0][1].ended

    several(test, 3)


def test_late_bodies_and_unread_answers_wait_for_their_clients():
    async def test(opens):
        (slow, first), (unread, second), (busy, third), (idle, fourth) = (opens() for _ in range(4))
        slow.data_received(b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nab")
        unread.data_received(REQUEST)
        busy.data_received(REQUEST * 2)
        ended = [first, second, third, fourth]
        new, fifth = opens()
        assert [transport.ended for transport in ended] == ["abort", "", "", ""]
        lost(slow, first)
        unread.pause_writing()  # From now on.
        for protocol, transport in ((idle, fourth), (new, fifth), (unread, second)):
            assert not transport.ended
            opens()
            assert transport.ended == "abort"
            lost(protocol, transport)
        assert not third.ended

    several(test, 4)


def test_no_connection_that_is_being_answered_gives_way():
    async def test(opens):
        found = [opens() for _ in range(2)]
        for protocol, _ in found:
            protocol.data_received(REQUEST)
        new, transport = opens()
        assert not any(each.ended for _, each in found)
        new.data_received(REQUEST)
        assert not transport.ended  # It is refused with 503 by `limit_concurrency`.
        for protocol, _ in found:
            protocol.connection_lost(None)

    several(test, 2)


def test_a_kept_alive_connection_waits_from_its_answer_on():
    async def answer(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def test(opens):
        (first, kept), (_, idle) = opens(), opens()
        first.data_received(REQUEST)
        async with asyncio.timeout(30):
            while not (first.cycle and first.cycle.response_complete):
                await asyncio.sleep(0)
        opens()
        assert (kept.ended, idle.ended) == ("", "abort")

    several(test, 2, answer)
