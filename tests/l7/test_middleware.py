"""Lesson 7. Middleware: the API key, the body size limit, and the drain before the server ends."""

import asyncio
import json
import signal
from contextlib import nullcontext

import pytest

from mini_engine.base.errors import UserError
from mini_engine.cli import serve
from mini_engine.server import background
from mini_engine.server.hardening.bodies import BodyLimit
from mini_engine.server.listening import listen
from mini_engine.server.middleware import ApiKey, Drain
from mini_engine.server.server_config import ServerConfig
from tests.shared.service import PATIENCE, Service, exchange, held, listening, read_answer
from tests.support import refused

SCOPE = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}


class Inner:
    """An app that notes how many requests are in flight, and answers 200, or raises `fails`."""

    def __init__(self, fails=None):
        self.seen, self.fails, self.drain = [], fails, None

    async def __call__(self, scope, receive, send):
        self.seen.append(self.drain.num_in_flight if self.drain else scope["path"])
        if self.fails:
            raise self.fails
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


def call(app, scope=SCOPE):
    """(status, headers, body) of one request to an ASGI app."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b""}

    async def send(message):
        sent.append(message)

    asyncio.run(app(dict(scope), receive, send))
    start, body = sent
    return start["status"], {k.decode(): v.decode() for k, v in start.get("headers", [])}, json.loads(body["body"])


def draining(**options):
    inner = Inner(**options)
    inner.drain = Drain(inner)
    return inner.drain, inner


@pytest.mark.task(6)
def test_requests_are_served_and_counted_while_in_flight():
    drain, inner = draining()
    assert call(drain)[0] == 200, "no drain has begun: the request is passed on to the app"
    assert inner.seen == [1], "one request was in flight while it was served"
    assert drain.num_in_flight == 0, "and none afterwards"


@pytest.mark.task(6)
def test_requests_at_the_same_time_are_all_counted():
    async def scene():
        counts, leave = [], [asyncio.Event(), asyncio.Event()]

        async def inner(scope, receive, send):
            await leave[scope["number"]].wait()

        drain = Drain(inner)
        serving = [asyncio.create_task(drain(SCOPE | {"number": number}, None, None)) for number in range(2)]
        for number in (0, 1, None):
            await asyncio.sleep(0)
            counts.append(drain.num_in_flight)
            if number is not None:
                leave[number].set()
                await serving[number]
        return counts

    found = asyncio.run(asyncio.wait_for(scene(), PATIENCE))
    assert found == [2, 1, 0], (
        f"num_in_flight was {found} while two requests came and left one by one; "
        "a count that forgets one ends the server before that one's answer is complete"
    )


@pytest.mark.task(6)
@pytest.mark.parametrize("error", [KeyError("inside"), asyncio.CancelledError()], ids=["an error", "a cancellation"])
def test_a_request_that_fails_is_no_longer_in_flight(error):
    drain, _ = draining(fails=error)
    with pytest.raises(type(error)):
        call(drain)
    assert drain.num_in_flight == 0, (
        f"num_in_flight is {drain.num_in_flight} after {error!r}: the count must go down however a request ends, "
        "or the server never ends"
    )


@pytest.mark.task(6)
def test_a_draining_server_refuses_new_requests_and_says_when_to_retry():
    drain, inner = draining()
    drain.begin()
    status, headers, body = call(drain)
    assert status == 503, "no new request may be served during the drain: 503"
    assert inner.seen == [], "a request that is refused is not passed on to the app"
    assert int(headers.get("retry-after", 0)) >= 1, f"say when to retry, as the page's table does: {headers}"
    assert headers.get("connection") == "close", f"Connection: close sends the client to another server: {headers}"
    assert body["error"]["code"] == "shutting_down", f"programs look for the code 'shutting_down': {body}"
    assert drain.num_in_flight == 0, "a refused request is not in flight: the server would wait for it"


def test_health_and_metrics_pass_every_middleware():
    drain, inner = draining()
    drain.begin()
    assert call(ApiKey(drain, ["secret"]), SCOPE | {"path": "/health"})[0] == 200 and len(inner.seen) == 1


@pytest.mark.parametrize("header", [b"", b"Bearer wrong", b"secret", b"Basic secret", b"Bearer secret ", b"\xff\xfe"])
def test_a_wrong_key_is_401(header):
    scope = SCOPE | {"headers": [(b"authorization", header)]}
    status, _, body = call(ApiKey(Inner(), ["other", "secret"]), scope)
    assert status == 401 and body["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("header", [b"Bearer secret", b"bearer secret", b"BEARER  secret"])  # a scheme has no case
@pytest.mark.parametrize("keys", [["secret"], ["secret", "other"], ["other", "secret"]])
def test_the_right_key_opens(header, keys):
    assert call(ApiKey(Inner(), keys), SCOPE | {"headers": [(b"authorization", header)]})[0] == 200


def test_no_key_is_asked_for_by_default():
    assert call(ApiKey(Inner(), []))[0] == 200


@pytest.mark.parametrize(
    ("length", "status"), [(b"10", 200), (b"11", 413), (b"9" * 5000, 413), (b"-1", 200), (b"x", 200)]
)
def test_a_content_length_that_is_too_large_is_believed(length, status):
    assert call(BodyLimit(Inner(), 10), SCOPE | {"headers": [(b"content-length", length)]})[0] == status


def test_a_body_is_counted_as_it_comes():
    sent, inner = [], Inner()

    async def receive():
        return {"type": "http.request", "body": b"12345", "more_body": True}

    async def send(message):
        sent.append(message)

    asyncio.run(BodyLimit(inner, 12)(dict(SCOPE), receive, send))
    assert sent[0]["status"] == 413 and not inner.seen, "the app runs only once the body is there"


@pytest.mark.parametrize("key", ["", " ", "secret\n", " secret", "two words", "schlüssel", "\x7f"])
def test_a_key_that_no_client_could_send_is_refused(key):
    with pytest.raises(UserError):
        ServerConfig(api_keys=("good", key))


@pytest.mark.parametrize(
    ("variable", "arguments", "keys"),
    [
        (None, [], ()),
        ("of-the-environment", [], ("of-the-environment",)),
        ("of-the-environment", ["--api-key", "one", "--api-key", "two"], ("one", "two")),
        ("k1,k2", [], ("k1", "k2")),
        ("k1,k2", ["--api-key", "k1,k2"], ("k1,k2",)),
        ("k1,", [], None),
        ("", [], None),  # a variable that was meant to hold a key must not open the door
    ],
)
def test_keys_come_from_the_options_or_else_from_the_environment(options, monkeypatch, variable, arguments, keys):
    monkeypatch.delenv("MINI_ENGINE_API_KEY", raising=False)
    if variable is not None:
        monkeypatch.setenv("MINI_ENGINE_API_KEY", variable)
    with nullcontext() if keys is not None else pytest.raises(UserError):
        assert serve.server_config(options(*arguments)).api_keys == keys


@pytest.mark.parametrize("host", ["ä..b", "ä" * 70, ""])
def test_a_host_that_cannot_be_is_refused_in_one_sentence(host):
    """An empty one is not the whole network, as `--host "$HOST"` has it where the variable is not set."""
    with refused(UserError, host and f"{host}:0"):
        listen(host, 0)


# Over real sockets


def test_more_answers_than_may_wait_are_refused_for_good():
    with Service(max_waiting=2) as service:
        found = service.post("/v1/completions", {"prompt": [1], "n": 3, "max_tokens": 1})
        assert found.status == 400 and "2" in found.body["error"]["message"], (
            f"{found.status}: who is told to come back would come back for ever"
        )


def test_with_a_key_set_only_its_owner_is_served():
    with Service(api_keys=("secret",)) as service:
        assert service.get("/v1/models").status == 401 and service.get("/health").status == 200
        assert service.get("/v1/models", Authorization="Bearer secret").status == 200


def test_a_drain_lets_running_answers_finish_and_refuses_new_ones():
    async def scene(service):
        async with listening(service) as server:
            running = asyncio.create_task(exchange(service, {"prompt": [1, 2, 3], "max_tokens": 300, "stream": True}))
            await asyncio.to_thread(service.wait_until, "it runs", lambda: service.worker.num_running)
            server.handle_exit(signal.SIGTERM, None)
            return await exchange(service, {"prompt": [1], "max_tokens": 1}), await running

    with Service() as service:
        (new_status, new_content), (status, content) = asyncio.run(asyncio.wait_for(scene(service), PATIENCE))
        assert status == 200 and read_answer(content)["finish_reason"] == "length", "a running answer must finish"
        assert new_status == 503 and json.loads(new_content)["error"]["code"] == "shutting_down"
        service.wait_until_idle()


def test_when_the_grace_is_over_who_is_left_is_cut_off(monkeypatch):
    monkeypatch.setattr(background, "CUT_SECONDS", 0.2)  # it is waited for twice

    async def scene(service):
        async with listening(service, grace_seconds=0) as server:
            stuck = service.connect({"prompt": [1, 2, 3], "max_tokens": 400, "stream": True})
            await asyncio.to_thread(service.wait_until, "it runs", lambda: service.worker.num_running)
            server.handle_exit(signal.SIGTERM, None)
        stuck.close()

    with Service() as service:
        with held(service.engine.runner, "run"):  # no answer ends before
            asyncio.run(asyncio.wait_for(scene(service), PATIENCE))
        service.wait_until_idle()
        assert 'finish_reason="error"} 1.0' in service.metrics.text().decode(), "what is cut off ends with an error"
