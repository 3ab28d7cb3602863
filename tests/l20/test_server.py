"""Lesson 20. Sessions as clients see them: `session_id` on three routes, /close_session, metrics, and who may do what.

`tests/families/test_sessions.py` has what sessions find behind a crowd, and their tokens.
"""

import json
import sys
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'server'")

from mini_engine.agents.session import Limits
from mini_engine.agents.sessions import Sessions
from mini_engine.engine.request import Request
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.kv.cache_coordinator import caching_manager
from mini_engine.server.answer_models import Closed
from mini_engine.server.fields import MAX_SESSION_ID
from tests.shared.service import PATIENCE, Service, fail_once, greedy

pytestmark = pytest.mark.reference  # no task is about this

ROOM = 47  # usable blocks of 4 tokens
PROMPT = list(range(100, 120))
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
COMPLETION = {"prompt": PROMPT, "max_tokens": 2}
ROUTES = [
    ("/v1/completions", COMPLETION),
    ("/v1/chat/completions", CHAT),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 2}),
]
CLOSE = "/close_session"


class WithSessions(Service):
    """Lesson 7's test server, whose engine evicts what sessions refer to last."""

    def __init__(self, **options):
        self.sessions = Sessions(Limits.of_pool(ROOM + 1))
        manager = partial(caching_manager, policy=self.sessions)
        super().__init__(ROOM + 1, engine_options={"manager": manager}, **options)

    @property
    def open(self):
        """The names of the sessions that are open."""
        return {name for _, name in self.sessions.sessions}

    def ask(self, prompt=PROMPT, max_tokens=4, headers=None, **options):
        """Return the number of cached tokens and the text's tokens of a whole completion."""
        wanted = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "max_tokens": max_tokens}
        found = self.post("/v1/completions", wanted | {"prompt": prompt} | options, **headers or {})
        assert found.status == 200, found
        return found.body["usage"]["prompt_tokens_details"]["cached_tokens"], found.body["choices"][0]["token_ids"]

    def close_session(self, name, headers=None, **options):
        """Close a session; return what the server says."""
        found = self.post(CLOSE, {"session_id": name} | options, **headers or {})
        assert found.status == 200, found
        return Closed.model_validate(found.body).closed

    def metric(self, name):
        """Return a metric's value as it is scraped."""
        lines = [line for line in self.get("/metrics").body.splitlines() if line.startswith(f"mini_engine_{name} ")]
        return float(lines[0].split()[1]) if lines else None


@pytest.fixture(scope="module")
def server():
    with WithSessions() as server:
        yield server
        server.wait_until_idle()


@pytest.fixture
def serve_sessions():
    """Return what starts a server with these options, until the test ends."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(WithSessions(**options))


# ---------------------------------------------------------------- what a session is for


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_every_route_takes_a_session(server, path, body, stream):
    name = f"{path} {stream}"
    assert server.post(path, body | {"session_id": name, "stream": stream}).status == 200
    assert server.close_session(name), f"{path} has not told the engine whose turn it was"


def test_openai_s_client_names_its_session_and_closes_it(server):
    openai = pytest.importorskip("openai", reason="needs the openai client")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        client.chat.completions.create(model="tiny", **CHAT, extra_body={"session_id": "openai"})
        closing = client.with_options(base_url=server.url)
        found = [closing.post(CLOSE, cast_to=object, body={"session_id": "openai"}) for _ in range(2)]
    assert found == [{"closed": True}, {"closed": False}]


def test_answers_of_one_request_share_its_session(server):
    found = server.post("/v1/completions", COMPLETION | {"n": 3, "session_id": "three", "temperature": 1})
    assert found.status == 200 and server.close_session("three")
    assert not any(one.num_running for one in server.sessions.sessions.values()), "three turns began, and three ended"


def test_a_server_without_sessions_takes_the_name_and_ignores_it(serve_tiny):
    service = serve_tiny()
    assert service.post("/v1/completions", COMPLETION | {"session_id": "agent"}).status == 200
    assert service.post(CLOSE, {"session_id": "agent"}).body == {"closed": False}
    assert "session" not in service.get("/metrics").body, "nothing to count"


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("name", ["", "x" * (MAX_SESSION_ID + 1), 5, True, ["a"], {"id": "a"}], ids=repr)
@pytest.mark.parametrize(("path", "body"), [*ROUTES, (CLOSE, {})])
def test_what_is_no_name_is_refused_in_one_sentence(server, path, body, name):
    found = server.post(path, body | {"session_id": name})
    assert found.status == 400 and found.body["error"]["param"] == "session_id", found
    assert f"1 to {MAX_SESSION_ID} characters" in found.body["error"]["message"]


@pytest.mark.parametrize(
    "name", ["x" * MAX_SESSION_ID, "\x00", " ", "🦊" * 200, "e\u0301", "\u202eagent", "None"], ids=ascii
)
def test_any_text_is_a_name(server, name):
    server.ask(session_id=name)
    assert server.close_session(name), "the same text is the same session"


def test_half_a_character_is_refused(server):
    body = json.dumps(COMPLETION)[:-1] + r', "session_id": "\ud800"}'
    assert server.post("/v1/completions", body.encode()).status == 400


@pytest.mark.parametrize("hint", ["priority", "retention", "kv_retention", "session_params"])
@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_other_hints_are_refused_by_name_and_the_sentence_names_ours(server, path, body, hint):
    for value in (5, {"id": "agent"}, [{"priority": 100}]):
        found = server.post(path, body | {hint: value})
        assert found.status == 400 and found.body["error"]["param"] == hint, found
        assert all(word in found.body["error"]["message"] for word in (hint, "session_id", "cache_salt"))
    assert server.post(path, body | {hint: None}).status == 200, "null means left out"


def test_closing_needs_a_name_and_nothing_else(server):
    assert server.post(CLOSE, {}).body["error"]["param"] == "session_id"
    assert server.post(CLOSE, {"session_id": "x", "force": True}).body["error"]["param"] == "force"
    assert server.get(CLOSE).status == 405


def test_the_description_says_what_closing_takes_and_gives(server):
    described = server.get("/openapi.json").body
    route, shapes = described["paths"][CLOSE]["post"], described["components"]["schemas"]
    assert route["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/CloseSession")
    assert route["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].endswith("/Closed")
    for body in ("CompletionRequest", "ChatRequest", "ResponsesRequest"):
        field = json.dumps(shapes[body]["properties"]["session_id"])
        assert f'"maxLength": {MAX_SESSION_ID}, "minLength": 1, "type": "string"' in field, "clients can check a name"


# ---------------------------------------------------------------- whose session it is


def test_a_session_belongs_to_its_key_and_its_salt(serve_sessions):
    server = serve_sessions(api_keys=("one", "two"))
    mine, theirs = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    server.ask(session_id="agent", headers=mine, cache_salt="a")
    assert server.post(CLOSE, {"session_id": "agent"}).status == 401, "closing needs a key"
    assert not server.close_session("agent", theirs, cache_salt="a"), "another client's session"
    assert not server.close_session("agent", mine), "the session of a salt is not that of no salt"
    assert server.close_session("agent", mine, cache_salt="a")


# ---------------------------------------------------------------- what goes wrong


def test_a_client_that_goes_away_in_the_middle_of_its_turn(server):
    with server.connect({"prompt": PROMPT, "max_tokens": 100, "stream": True, "session_id": "gone"}) as client:
        client.recv(4096)
    server.wait_until_idle()
    assert server.sessions.sessions[None, "gone"].num_running == 0, "an aborted turn has ended"
    assert server.ask(session_id="gone")[1] == greedy(tuple(PROMPT), 4)
    assert server.close_session("gone")


def test_a_session_that_is_closed_stays_closed_though_its_turn_begins_again(serve_sessions):
    """A turn that waits has not begun, and one that is preempted begins a second time."""
    server = serve_sessions(scheduler_config=SchedulerConfig(max_num_seqs=1, policy="priority"))
    engine, answers = server.engine, []
    with server.connect({"prompt": [9], "max_tokens": 150, "stream": True, "session_id": "first"}) as first:
        first.recv(4096)
        with server.connect({"prompt": PROMPT, "max_tokens": 2, "stream": True, "session_id": "second"}) as second:
            server.wait_until("the second one waits", lambda: server.worker.num_open == 2)
            assert server.close_session("first") and not server.close_session("second")
            [running] = engine.scheduler.running
            server.worker._order(lambda: engine.scheduler.preempt(running))
            for client in (first, second):
                while piece := client.recv(65536):
                    answers.append(piece)
    server.wait_until_idle()
    assert running.num_preemptions, "it was to begin twice"
    assert server.open == set(), "a client that has closed its sessions does not come back to close them again"


def test_a_failing_engine_ends_the_turn_and_no_session(server):
    server.ask(session_id="unlucky")
    fail_once(server.engine.runner, "run", RuntimeError("the roof"))
    assert server.post("/v1/completions", COMPLETION | {"session_id": "unlucky"}).status == 500
    assert server.sessions.sessions[None, "unlucky"].num_running == 0
    assert server.ask(session_id="unlucky")[1] == greedy(tuple(PROMPT), 4)
    assert server.close_session("unlucky")


def test_a_closing_that_fails_is_the_error_of_its_client_alone(server):
    fail_once(server.sessions, "close", RuntimeError("the roof"))
    found = server.post(CLOSE, {"session_id": "agent"})
    assert found.status == 500 and "the roof" in found.body["error"]["message"]
    assert not server.close_session("agent") and server.ask()[1] == greedy(tuple(PROMPT), 4), "the engine goes on"


def test_an_engine_that_has_ended_closes_nothing(serve_sessions):
    server = serve_sessions()
    server.worker.close()
    assert server.post(CLOSE, {"session_id": "agent"}).status == 503


def test_a_prompt_that_is_scored_opens_no_session(server):
    """Its KV is found by no other request, so there is nothing to keep for a next turn."""
    before = server.open
    assert server.post("/v1/completions", COMPLETION | {"echo": True, "logprobs": 0, "session_id": "s"}).status == 200
    assert server.open == before


# ---------------------------------------------------------------- replicas


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra 'distributed'")
@pytest.mark.skipif(sys.platform != "linux", reason="finds the replicas' processes in /proc")
def test_closing_reaches_every_replica():
    """In turn, so that the session's turns are at both."""
    from tests.shared.fleet_server import FleetServer

    with FleetServer("--num-blocks", "100", "--sessions", "--router", "round-robin") as server:
        for _ in range(4):
            assert server.post("/v1/completions", COMPLETION | {"session_id": "agent"}).status == 200
        assert list(server.by_replica("sessions").values()) == [1, 1], "both know it"
        closed = [server.post(CLOSE, {"session_id": "agent"}).body["closed"] for _ in range(2)]
        assert closed == [True, False] and not any(server.by_replica("sessions").values())


# ---------------------------------------------------------------- what is counted


def test_metrics_say_what_sessions_asked_for_and_found(serve_sessions):
    server = serve_sessions()
    _, answer = server.ask(session_id="agent")  # five blocks of its prompt, and three tokens of its answer with KV
    assert server.metric("sessions") == 1 and server.metric("session_blocks") == 0, "it has yet to come back"
    server.ask([*PROMPT, *answer, 7], session_id="agent")
    assert server.metric("session_blocks") >= 5, "it has come back once, and is held"
    assert server.metric("session_blocks_asked_total") == server.metric("session_blocks_found_total") == 5
    server.ask([8, *PROMPT], session_id="agent")
    assert server.metric("session_texts_left_total") == 1, "the prompt does not continue the session's text"
    for index in range(8):  # more sessions than the pool holds
        server.ask([300 + index] * 44, session_id=f"other {index}")
    assert server.metric("sessions") == 9
    assert server.metric("session_blocks_evicted_total") == server.sessions.stats.evicted
    server.close_session("agent")
    assert server.metric("sessions") == 8


# ---------------------------------------------------------------- a client that never closes


@pytest.mark.parametrize("count", [400, pytest.param(20_000, marks=pytest.mark.nightly)])
def test_any_number_of_names_takes_no_more_than_the_limit_and_nothing_from_another_client(count):
    """Beside them, as fast as they come, another namespace's session finds all of its text again."""
    policy = Sessions(Limits(blocks=35, each=20, sessions=64))
    manager = caching_manager(ROOM + 1, 4, policy=policy)
    honest = [*range(100, 116)]
    for _ in range(2):
        run(manager, "honest", "theirs", honest)
    for index in range(count):
        run(manager, f"forgotten {index}", "mine", [index % 1000, index // 1000, *range(6)])
        assert len(policy.sessions) <= 64 and policy.num_blocks["mine"] <= 20
    names = ("sessions", "ends", "left", "num_sessions", "num_blocks", "_fallen")
    sizes = {name: len(getattr(policy, name)) for name in names}
    assert max(sizes.values()) <= 64, f"each must be bounded: {sizes}"
    assert len(manager.coordinator.requests) == 0, "no request is remembered once it has ended"
    assert run(manager, "honest", "theirs", [*honest, 1]) == len(honest), "another client's session has lost its text"


def run(manager, session, namespace, token_ids):
    """Let a manager begin, compute and end one request, as an engine does. Return how many tokens were cached."""
    request = Request("r", token_ids, SamplingParams(), namespace=namespace, session=session)
    manager.coordinator.request_added(request)
    found = manager.allocate("r", token_ids, namespace)
    manager.grow("r", len(token_ids))
    manager.commit("r", token_ids, len(token_ids))
    manager.free("r", token_ids)
    return found
