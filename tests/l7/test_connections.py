"""Lesson 7. Connections: half a request is not kept for ever, one too many is told so, and /health goes on."""

import asyncio
import json
import socket
import sys
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest

from mini_engine.server import app
from mini_engine.server.hardening import connections
from mini_engine.server.hardening.connections import room_for_connections
from mini_engine.server.hardening.guard import GuardedProtocol
from mini_engine.server.listening import QUEUE
from tests.shared.service import PATIENCE, Service, exchange, listening, raw_request, read_all
from tests.shared.serving import Process, serving

pytestmark = pytest.mark.reference  # no task is about this

BURST = 60
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize("sent", [b"", b"PO", HEAD], ids=["nothing", "two letters", "half a head"])
def test_headers_that_do_not_come_are_not_waited_for(sent):
    with Service(header_seconds=0.3) as service, service.dial() as client:
        client.sendall(sent)
        assert read_all(client).startswith(b"HTTP/1.1 408"), "the connection would stay open for as long as it likes"


def test_a_letter_now_and_then_does_not_help(accepted):
    with Service() as service, service.dial() as client:
        timers = []
        for count in range(1, 4):
            client.sendall(b"G")
            service.wait_until("the letter is read", lambda count=count: accepted and accepted[0].num_received == count)
            timers.append(accepted[0].header_timer)
        assert timers[0] and timers == timers[:1] * 3, "the time is for all headers, not since the last letter"


@pytest.fixture
def timed_from_the_second(accepted, monkeypatch):
    """A connection's first headers have a minute; from then on they have next to no time."""
    complete = GuardedProtocol.on_response_complete

    def hurry(self):
        self.limits = replace(self.limits, header_seconds=0.1)
        complete(self)

    monkeypatch.setattr(GuardedProtocol, "on_response_complete", hurry)


@pytest.mark.parametrize("behind", [b"", b"GET /hea"], ids=["nothing", "half a request"])
def test_a_kept_connection_is_timed_again(timed_from_the_second, behind):
    """Where the half arrived with the request before it, nothing comes any more that could start the clock."""
    with Service(header_seconds=60) as service, service.dial() as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + behind)
        content = read_all(client)
        assert content.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 408" in content, content


@pytest.mark.parametrize("kind", [b"Content-Length: 100\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"])
def test_a_body_that_does_not_come_is_not_waited_for(kind):
    with Service(body_seconds=0.3) as service, service.dial() as client:
        client.sendall(HEAD + kind)
        content = read_all(client)
        assert content.startswith(b"HTTP/1.1 408") and b'"message"' in content, content
        assert service.app.drain.num_in_flight == 0


def test_a_stalled_body_is_not_in_flight_so_a_drain_need_not_wait_for_it():
    with Service() as service, service.dial() as stalled:
        stalled.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        assert service.get("/v1/models").status == 200  # so the server has seen both
        service.wait_until("nothing is in flight", lambda: service.app.drain.num_in_flight == 0)


def test_a_slow_answer_is_not_timed(accepted):
    """The limits are for what the client sends. An answer may take as long as it takes."""
    with Service(body_seconds=0.2) as service:
        run, timers = service.engine.runner.run, []

        def slow(chunks):
            timers.append(accepted[0].header_timer)
            time.sleep(0.1)
            return run(chunks)

        service.engine.runner.run = slow
        with service.connect({"prompt": [5], "max_tokens": 4, "ignore_eos": True}) as client:
            assert read_all(client).startswith(b"HTTP/1.1 200")
        assert timers == [None] * 4, "its headers have come"


def test_one_connection_too_many_is_told_so():
    asked = {"prompt": [1, 2], "max_tokens": 150, "stream": True}
    with Service(max_connections=3) as service, ExitStack() as stack:
        held = [stack.enter_context(service.connect(asked)) for _ in range(3)]
        service.wait_until("all three wait for their answers", lambda: service.worker.num_running == 3)
        with service.dial() as more:
            content = read_all(more)
        assert content.startswith(b"HTTP/1.1 503"), content
        head, _, body = content.partition(b"\r\n\r\n")
        assert b"retry-after" in head.lower() and b"connection: close" in head.lower()
        assert "3 connections" in json.loads(body)["error"]["message"]
        assert all(b"[DONE]" in read_all(client) for client in held), "those inside are served"
        service.wait_until("there is room again", lambda: service.get("/health").status == 200)


def test_two_lengths_of_one_body_are_refused():
    both = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n0\r\n\r\n"
    with Service() as service, service.dial() as client:
        client.sendall(HEAD + both)
        assert read_all(client).startswith(b"HTTP/1.1 400"), "a proxy in front may believe the other one"


# A burst


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("size", [0, 20_000], ids=["small", "in pieces"])
def test_of_a_burst_that_asks_and_hangs_up_nothing_is_begun(stream, size, monkeypatch):
    """Their ends arrive together with the requests: the server's loop, which is this one, waits meanwhile."""
    body = {"prompt": [1, 2], "max_tokens": 50, "stream": stream, "user": "x" * size}
    begun, ended = [], []
    lost, read = GuardedProtocol.connection_lost, app.read_body
    monkeypatch.setattr(GuardedProtocol, "connection_lost", lambda self, exc: ended.append(self) or lost(self, exc))
    monkeypatch.setattr(app, "read_body", lambda *given: begun.append(given) or read(*given))

    async def scene(service: Service) -> int:
        async with listening(service) as server:
            for _ in range(BURST):
                service.connect(body).close()
            while len(ended) < BURST:
                await asyncio.sleep(0.01)
            assert not begun
            status, _ = await exchange(service, body)
            server.begin_drain()
        return status

    with Service() as service:
        assert asyncio.run(asyncio.wait_for(scene(service), PATIENCE)) == 200


def test_a_burst_takes_turns_with_open_connections_and_finds_room_in_the_queue(monkeypatch):
    lengths, listened = [], socket.socket.listen
    monkeypatch.setattr(socket.socket, "listen", lambda self, size: lengths.append(size) or listened(self, size))
    with Service() as service:
        assert service.get("/health").status == 200
    assert max(lengths) == lengths[-1] == QUEUE >= 1024, "beyond the queue, clients try again in a second"
    assert connections.BACKLOG in lengths and connections.BACKLOG <= 32, "what asyncio accepts in one turn of its loop"


# The limit on open files


def test_there_are_fewer_connections_than_descriptors(monkeypatch):
    if connections.resource is None:
        pytest.skip("this system has no limit on open files")
    limits = {"now": (256, 256)}
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(connections.resource, "setrlimit", lambda _, new: limits.update(now=new))
    assert 1 <= room_for_connections(1024) < 256 - connections.OWN_FILES
    limits["now"] = (256, 100_000)
    assert room_for_connections(1024) == 1024 and 1024 < limits["now"][0] < 2000, "raised, where that is allowed"


FEW_FILES = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256));"


@pytest.mark.nightly
@pytest.mark.skipif(connections.resource is None, reason="this system has no limit on open files")
def test_with_256_files_900_half_requests_leave_the_server_well():
    with serving("--header-seconds", "600", before=FEW_FILES) as server, ExitStack() as stack:
        inside, give_up = [stack.enter_context(server.dial()) for _ in range(900)], time.monotonic() + PATIENCE
        for client in inside:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        while len(inside) >= 256:  # some are still to be accepted
            assert time.monotonic() < give_up, f"{len(inside)} of 900 are held"
            inside = [client for client in inside if is_open(client)]
        assert len(inside) > 10
        inside[-1].sendall(b"\r\n")  # the youngest: those before it make room
        inside[-1].settimeout(PATIENCE)
        assert inside[-1].recv(65536).startswith(b"HTTP/1.1 200")
        stack.close()
        server.process.terminate()
        _, said = server.end()
    assert len(said) < 5000 and "Traceback" not in said, said[:2000]


def is_open(client: socket.socket) -> bool:
    """Whether the server has neither answered nor closed this connection."""
    client.settimeout(0.02)
    try:
        client.recv(1)
    except TimeoutError:
        return True
    except OSError:
        return False
    return False


async def status_of(server: Process) -> int:
    """How a server answers a new request."""
    return (await exchange(server, {"prompt": "x", "max_tokens": 1}))[0]


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no signals to a process")
@pytest.mark.parametrize("signals", [1, 2])
def test_what_is_cut_off_at_the_end_is_told_so_without_a_traceback(signals):
    body = {"prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with serving("--grace-seconds", "60" if signals == 2 else "2") as server, server.dial() as client:
        client.sendall(raw_request(body))
        first = client.recv(1000)
        server.process.terminate()
        if signals == 2:
            while asyncio.run(status_of(server)) != 503:  # until the first signal is heeded
                pass
            server.process.terminate()
        content = first + read_all(client)
        _, said = server.end()
    assert b'"error"' in content and b"shutting down" in content, "a stream that just stops looks complete"
    assert "Traceback" not in said and len(said.splitlines()) <= 3, said
