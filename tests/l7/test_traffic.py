"""Lesson 7. What an operator sees: responses by status, and of refusals and nonsense one line a second."""

import logging
import re
import sys
from types import SimpleNamespace

import pytest

from mini_engine.server.hardening import traffic
from mini_engine.server.hardening.connections import AcceptErrors
from mini_engine.server.hardening.traffic import LineASecond, Traffic
from tests.shared.service import PATIENCE, Service, raw_request, read_all

pytestmark = pytest.mark.reference  # no task is about this

UPGRADE = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close, upgrade\r\nUpgrade: websocket\r\n\r\n"


@pytest.fixture
def quiet(monkeypatch):
    """No second passes: what comes after the first line waits."""
    monkeypatch.setattr(traffic, "LOG_SECONDS", PATIENCE)


def lines(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def counted(service: Service) -> dict[str, int]:
    """Responses by status, as /metrics has them."""
    found = re.findall(r'^mini_engine_responses_total{status="(\d+)"} ([\d.]+)$', service.get("/metrics").body, re.M)
    return {status: int(float(count)) for status, count in found}


def exchange(service: Service, data: bytes) -> bytes:
    """Send these bytes over a connection of its own, and read until the server closes it."""
    with service.dial() as client:
        client.sendall(data)
        return read_all(client)


@pytest.fixture
def timers(monkeypatch) -> list:
    """What waits for the end of a second in the event loop."""
    found = []
    loop = SimpleNamespace(call_later=lambda seconds, work: found.append(work))
    monkeypatch.setattr(traffic.asyncio, "get_running_loop", lambda: loop)
    return found


def test_events_within_a_second_are_one_line_that_counts_them(caplog, timers):
    events = LineASecond("events")
    events.note("a", "the first")
    assert lines(caplog) == ["events: 1 (a: 1), the latest the first"], "the first one is told at once"
    for number in range(1000):
        events.note("ab"[number % 2], str(number))
    assert len(lines(caplog)) == 1 == len(timers)
    timers.pop()()
    assert lines(caplog)[1:] == ["events: 1000 (a: 500, b: 500), the latest 999"], "the rest when the second is over"
    timers.pop()()
    assert len(lines(caplog)) == 2 and not timers, "after a second without any, nothing is told and nothing waits"
    events.note("a", "the next")
    assert lines(caplog)[2:] == ["events: 1 (a: 1), the latest the next"]


def test_failing_to_accept_is_one_line_a_second(caplog, timers):
    handler = AcceptErrors("cannot accept connections")
    context = {"message": "socket.accept() out of system resource", "exception": OSError(24, "Too many open files")}
    for _ in range(1000):
        handler(None, context)  # type: ignore[arg-type]
    timers.pop()()
    told = [record.getMessage() for record in caplog.records]
    assert [line.split(" (")[0] for line in told] == ["cannot accept connections: 1", "cannot accept connections: 999"]
    assert "Too many open files" in caplog.text and "Traceback" not in caplog.text


NONSENSE = [
    b"nonsense\r\n\r\n",
    b"GET / HTTP/1.1\r\nno header\r\n\r\n",
    b"\x16\x03\x01\x02\r\n\r\n",
    b"\x00" * 20_000,
]


def test_a_flood_of_nonsense_is_one_line_with_the_address(quiet, caplog):
    with Service(header_seconds=0.5) as service:
        for data in NONSENSE * 5:
            answer = exchange(service, data)
            assert answer.startswith(b"HTTP/1.1 400 ") and b'"invalid_request_error"' in answer, answer
        assert exchange(service, b"GET /hea").startswith(b"HTTP/1.1 408 ")
        assert counted(service) == {"400": 20, "408": 1}
    (line,) = lines(caplog)
    assert "127.0.0.1:" in line


def test_nonsense_behind_a_request_ends_its_connection_and_nothing_else(quiet, caplog):
    with Service() as service:
        body = {"prompt": [1, 2], "max_tokens": 200, "stream": True}
        request = raw_request(body).replace(b"Connection: close\r\n", b"")
        exchange(service, request + b"\x00nonsense\r\n\r\n")
        service.wait_until_idle()
    assert "Traceback" not in caplog.text and len(lines(caplog)) == 1, caplog.text


def test_a_request_that_asks_to_upgrade_is_served_in_silence(caplog):
    with Service() as service:
        assert exchange(service, UPGRADE).startswith(b"HTTP/1.1 200 ")
    assert not lines(caplog)


def test_refusals_are_counted_and_one_line_a_second(quiet, caplog):
    with Service(api_keys=("secret",)) as service:
        for _ in range(5):
            assert service.get("/v1/models").status == 401
        assert service.get("/nowhere%0aWARNING%20forged").status == 404
        assert service.get("/v1/models", Authorization="Bearer secret").status == 200
        assert counted(service) == {"401": 5, "404": 1, "200": 1}
    (line,) = [line for line in lines(caplog) if "127.0.0.1" in line]
    assert "401" in line and "/v1/models" in line


def test_a_line_has_the_path_without_its_line_breaks(caplog):
    with Service() as service:
        service.get("/nowhere%0aWARNING%20forged")
    assert lines(caplog) and not any("\n" in line for line in lines(caplog))


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_the_process_is_measured():
    text = Traffic().text().decode()
    for name in ("process_resident_memory_bytes", "process_open_fds", "process_max_fds", "process_cpu_seconds_total"):
        assert float(re.search(rf"^{name} (\S+)$", text, re.M)[1]) > 0
