"""Lesson 7. Requests of operators and web pages: open addresses, host names, probes, encodings, and odd requests."""

import signal

import pytest

from mini_engine.cli import serve
from mini_engine.cli.serve import allowed_hosts, is_loopback
from mini_engine.grammars.output_forms import OPEN
from mini_engine.server.background import DrainingServer, draining_on_hangup
from mini_engine.server.tool_calls import CallReader
from tests.l7.forms import ADD
from tests.shared.service import Service

pytestmark = pytest.mark.reference  # no task is about this

SERVER = {"allow_hosts": allowed_hosts("127.0.0.1", ["llm.example"])}


# Who can reach it


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1"])
def test_what_only_this_machine_can_reach_has_local_names(host):
    assert is_loopback(host) and {"localhost", "127.0.0.1", "::1", host} <= {*allowed_hosts(host, [])}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "example.com"])
def test_what_other_machines_can_reach_may_have_any_name(host):
    assert not is_loopback(host) and not allowed_hosts(host, [])


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [(["--host", "0.0.0.0"], True), (["--host", "0.0.0.0", "--api-key", "secret"], False), ([], False)],
)
def test_a_server_that_is_open_to_all_says_so(options, arguments, warned, caplog, monkeypatch):
    monkeypatch.delenv("MINI_ENGINE_API_KEY", raising=False)
    monkeypatch.setattr(serve, "serve_one", lambda *given: 0)
    assert serve.run(options("--port", "0", *arguments)) == 0
    said = [record.getMessage() for record in caplog.records]
    assert bool(said) == warned and all("--api-key" in message for message in said), said


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/health", "/docs"])
@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "localhost@evil"])
def test_a_page_whose_name_suddenly_leads_here_is_refused(server: Service, host, path):
    assert server.get(path, Host=host).status == 403, "the browser thinks that this answer is the page's own"


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "127.0.0.1:80", "[::1]:8000", "LOCALHOST", "llm.example:443"]
)
def test_the_server_s_own_names_are_served(server: Service, host):
    assert server.get("/v1/models", Host=host).status == 200


@pytest.mark.parametrize("path", ["/health/", "/v1/models/", "/v1/completions/", "/docs/"])
def test_no_redirect_leads_to_the_host_that_a_client_names(service: Service, path):
    found = service.get(path, Host="evil.example")
    assert found.status == 404 and "evil.example" not in str(found.headers), found


# What it is called


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], ["pocket"]),
        (["--model", "pocket-hybrid"], ["pocket-hybrid"]),
        (["--model", "."], ["My-Model"]),
        (["--model", "./"], ["My-Model"]),
        (["--model", "layers/.."], ["My-Model"]),
        (["--model", "layers/"], ["layers"]),
        (["--model", "../My-Model"], ["My-Model"]),
        (["--model", "/"], ["model"]),
        (["--model", "Qwen/Qwen3-0.6B"], ["Qwen3-0.6B", "Qwen/Qwen3-0.6B"]),
        (["--model", "Qwen/Qwen3-0.6B", "--model-name", "small"], ["small"]),
    ],
)
def test_a_model_is_called_by_its_folder_or_by_its_hub_id(options, arguments, names, tmp_path, monkeypatch):
    (tmp_path / "My-Model" / "layers").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "My-Model")
    config = serve.server_config(options(*arguments))
    assert [config.model_name, *config.aliases] == names


def test_a_hub_id_and_its_name_are_one_model():
    with Service(aliases=("owner/tiny",)) as service:
        assert [card["id"] for card in service.get("/v1/models").body["data"]] == ["tiny", "owner/tiny"]
        for name in ("tiny", "owner/tiny"):
            assert service.get(f"/v1/models/{name}").body["id"] == name
            body = {"prompt": [1], "max_tokens": 1, "model": name}
            assert service.post("/v1/completions", body).status == 200
        assert service.get("/v1/models/tiny/owner").status == 404


# Probes and signals


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_a_probe_may_ask_for_the_head_alone(server: Service, path):
    found = server.request("HEAD", path, None, {})
    assert (found.status, found.body) == (200, "")


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_draining_server_is_well_but_takes_no_requests(method):
    with Service(api_keys=("secret",)) as service:
        assert service.request(method, "/ready", None, {}).status == 200
        service.app.drain.begin()
        assert service.request(method, "/ready", None, {}).status == 503, "a balancer sends its requests elsewhere"
        assert service.request(method, "/health", None, {}).status == 200, "what watches the process leaves it alone"


def test_a_server_whose_engine_has_stopped_is_not_ready(service: Service):
    service.worker.close()
    assert service.get("/ready").status == service.get("/health").status == 503


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no SIGHUP")
@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN], ids=["usually", "under nohup"])
def test_a_closed_terminal_drains_unless_it_is_to_be_ignored(service: Service, before):
    own = signal.signal(signal.SIGHUP, before)
    try:
        server = DrainingServer(service.app, 5)
        with draining_on_hangup(server):
            signal.raise_signal(signal.SIGHUP)
        assert server.drain.draining == (before == signal.SIG_DFL), "without a handler SIGHUP cuts every answer off"
        assert signal.getsignal(signal.SIGHUP) == before
    finally:
        signal.signal(signal.SIGHUP, own)


# Odd requests


@pytest.mark.parametrize("coding", ["gzip", "br", "deflate, gzip"])
def test_an_encoded_body_is_refused_by_name(server: Service, coding):
    found = server.post("/v1/completions", b"\x1f\x8b\x08", **{"Content-Encoding": coding})
    assert found.status == 400 and coding in found.body["error"]["message"], found


def test_a_body_may_say_that_it_is_not_encoded(server: Service):
    body = {"prompt": [1], "max_tokens": 1}
    assert server.post("/v1/completions", body, **{"Content-Encoding": "identity"}).status == 200


@pytest.mark.parametrize("size", [*range(1, len(OPEN) + 1), len(OPEN) + 12])
def test_a_call_that_max_tokens_cuts_off_is_not_shown_as_text(size):
    begun = f'{OPEN}\n{{"name": "add"'[:size]
    for cut, shown, why in ((True, "", "half a mark is no text"), (False, begun, "an answer that ended meant it")):
        reader = CallReader()
        reader.push("Well. " + begun)
        reader.push("", ended=True, cut=cut)
        assert reader.text == "Well. " + shown, why


def test_a_cut_call_over_http(server: Service):
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [ADD], "tool_choice": "required", "temperature": 0}
    for max_tokens in range(1, 8):
        choice = server.post("/v1/chat/completions", body | {"max_tokens": max_tokens}).body["choices"][0]
        if choice["finish_reason"] == "length":
            assert not choice["message"]["content"], f"{choice} shows how calls are written"
