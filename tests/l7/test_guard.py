"""Lesson 7. One connection cannot take the server: not by what it sends, not by what it leaves unread or unsaid."""

import http.client
import json
import socket
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from mini_engine.server.hardening import guard
from mini_engine.server.hardening.guard import GuardedProtocol
from tests.shared.service import PATIENCE, Service, read_all

reference = pytest.mark.reference  # no task is about these

CHUNKED = "POST {} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
TINY = b"1\r\nx\r\n" * 1000


@pytest.fixture
def parsed(monkeypatch) -> list[int]:
    """How many bytes were given to the parser, piece by piece."""
    found, receive = [], guard.h11.Connection.receive_data

    def noting(self, data):
        found.append(len(data))
        receive(self, data)

    monkeypatch.setattr(guard.h11.Connection, "receive_data", noting)
    return found


def test_a_small_answer_is_sent_at_once(service: Service, accepted):
    """Nagle's algorithm holds a small packet back until the one before it is acknowledged: 40 ms on many systems."""
    connection = http.client.HTTPConnection(*service.address, timeout=PATIENCE)
    for _ in range(50):
        connection.request("GET", "/health")
        assert connection.getresponse().read()
    (kept,) = accepted
    option = kept.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    connection.close()
    assert option, "Nagle's algorithm is on: an answer's last packet waits for the client's delayed acknowledgement"


# What a client sends


@reference
@pytest.mark.parametrize("path", ["/health", "/v1/completions", "/nowhere"])
def test_a_refused_request_s_body_is_not_read(path, parsed, monkeypatch):
    monkeypatch.setattr(guard, "LINGER_SECONDS", 0.2)
    with Service(api_keys=("secret",)) as service, service.dial() as client:
        client.sendall(CHUNKED.format(path).encode())
        content = client.recv(65536)
        before = sum(parsed)
        try:
            for _ in range(50):
                client.sendall(TINY)
        except OSError:  # closed meanwhile
            pass
    assert b"connection: close" in content.lower(), f"{content}: the client has to be told"
    assert sum(parsed) == before, "what nothing will look at need not be parsed: one client could send it for ever"


@reference
def test_a_refusal_arrives_although_the_body_is_under_way():
    """Closing a socket with unread bytes resets the connection, and on some systems that takes the answer with it."""
    with Service(api_keys=("secret",)) as service, service.dial() as client:
        client.sendall(CHUNKED.format("/v1/models").encode() + TINY * 4)
        assert read_all(client).startswith(b"HTTP/1.1 401"), "the answer, then an orderly end and no reset"


@reference
def test_a_connection_whose_refused_body_does_not_end_is_closed(monkeypatch, accepted):
    monkeypatch.setattr(guard, "LINGER_SECONDS", 0.1)
    with Service(api_keys=("secret",)) as service, service.dial() as client:
        client.sendall(CHUNKED.format("/v1/models").encode())
        assert client.recv(65536).startswith(b"HTTP/1.1 401")
        service.wait_until("the connection is closed", lambda: not accepted[0].connections)


@reference
def test_a_request_whose_body_was_read_keeps_its_connection(accepted):
    with Service() as service:
        connection = http.client.HTTPConnection(*service.address, timeout=PATIENCE)
        for body in ({"prompt": [1, 2], "max_tokens": 1}, {"prompt": []}, {"prompt": [3], "max_tokens": 1}):
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            assert response.read() and response.headers["connection"] != "close"
        connection.close()
    assert len(accepted) == 1, "a client that keeps its connection saves the time of another one"


@reference
@pytest.mark.parametrize("chunk", [b"1\r\n{\r\n", b"1;" + b"x" * 2000 + b"\r\n{\r\n"], ids=["tiny", "with extensions"])
def test_what_frames_a_body_counts(chunk, parsed):
    limit = 20_000
    with Service(max_body_bytes=limit) as service, service.dial() as client:
        client.sendall(CHUNKED.format("/v1/completions").encode())
        try:
            for _ in range(100_000 // len(chunk)):
                client.sendall(chunk)
        except OSError:
            pass
        assert client.recv(65536).startswith(b"HTTP/1.1 413")
    assert sum(parsed) < limit + guard.MAX_HEAD + guard.PIECE, f"{sum(parsed)} bytes of a body were parsed"


@reference
def test_no_more_than_a_piece_is_parsed_at_a_time(parsed):
    """Between two pieces, the other clients have their turn."""
    with Service() as service:
        found = service.post("/v1/completions", {"prompt": "x" * 100_000})
    assert found.status == 400 and sum(parsed) > 100_000 and max(parsed) <= guard.PIECE


# What a client does not read


LONG_ANSWER = {"prompt": [5] * 500, "max_tokens": 0, "echo": True, "logprobs": 20}


@reference
def test_a_client_that_does_not_read_is_cut_off(accepted):
    with Service(write_seconds=0.3) as service, service.connect(LONG_ANSWER, 2048):
        service.wait_until("the answer is written", lambda: accepted and accepted[0].write_timer)
        service.wait_until("and the connection closed", lambda: not accepted[0].connections)
        assert service.get("/health").status == 200


@reference
def test_not_even_the_last_few_bytes_wait_for_ever(accepted):
    with Service(write_seconds=0.3) as service, service.connect(LONG_ANSWER | {"prompt": [5] * 60}, 2048):
        service.wait_until("the rest is timed", lambda: accepted and accepted[0].write_timer)
        assert accepted[0].transport.get_write_buffer_size() < 2**16, "which is as much as asyncio likes to hold"
        service.wait_until("and the connection closed", lambda: not accepted[0].connections)


@reference
@pytest.mark.parametrize("left", [0, 10_000])
@pytest.mark.parametrize(("read", "is_cut_off"), [(0, True), (guard.LEAST_BYTES - 1, True), (guard.LEAST_BYTES, False)])
def test_a_client_that_reads_slowly_but_steadily_is_timed_again(read, is_cut_off, left):
    done = []
    transport = SimpleNamespace(get_write_buffer_size=lambda: left, abort=lambda: done.append("cut off"))
    connection = SimpleNamespace(transport=transport, time_reading=lambda: done.append("timed again"))
    GuardedProtocol.check_reading(connection, left + read)
    assert done == ["cut off" if is_cut_off else "timed again"]


# What a client leaves unsaid


@reference
@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n", CHUNKED.format("/v1/completions").encode() + b"1\r\n{"],
    ids=["nothing", "half a head", "half a body"],
)
def test_one_connection_too_many_closes_the_one_that_was_silent_longest(sent, accepted):
    with Service(max_connections=3) as service, ExitStack() as stack:
        held = []
        for count in range(1, 4):
            held.append(stack.enter_context(service.dial()))
            held[-1].sendall(sent)
            service.wait_until("it is accepted", lambda count=count: len(accepted) == count)
        service.wait_until("what they sent is read", lambda: all(each.num_received == len(sent) for each in accepted))
        assert service.get("/health").status == 200, "a probe must not wait for those that say nothing"
        content = read_all(held[0])
        assert content.startswith(b"HTTP/1.1 503"), f"it was told {content!r}"
        for client in held[1:]:
            client.setblocking(False)
            with pytest.raises(BlockingIOError):  # open, and nothing to read
                client.recv(1)


@reference
def test_a_letter_now_and_then_makes_no_connection_younger(accepted):
    with Service(max_connections=2) as service, service.dial() as old, service.dial() as young:
        service.wait_until("both are accepted", lambda: len(accepted) == 2)
        old.sendall(b"GET /he")
        service.wait_until("the letters are read", lambda: any(each.num_received for each in accepted))
        assert service.get("/health").status == 200
        assert read_all(old).startswith(b"HTTP/1.1 503")
        young.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert young.recv(65536).startswith(b"HTTP/1.1 200")
