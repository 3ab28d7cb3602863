"""Lesson 13. `serve --replicas` without Ray: the routes over a replica in this process, and the command's sentences."""

import asyncio
import json
import subprocess
import sys
from contextlib import contextmanager

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'server'")

from mini_engine.base.errors import UserError
from mini_engine.cli import serve
from mini_engine.distributed.replicas import service
from mini_engine.distributed.replicas.service import LastKnown, ReplicaMetrics, ReplicaService
from mini_engine.distributed.routing.retry import ReplicaLost
from mini_engine.server.app import ServerApp
from mini_engine.server.background import in_background
from mini_engine.server.server_config import ServerConfig
from tests.l13.replicas import PROMPT, cluster, options
from tests.shared.service import Service as Client
from tests.shared.service import read_answer

ONE_REPLICA = """
import sys
from unittest.mock import patch
from mini_engine.cli import serve
from tests.l13.replicas import options

def run(self, sockets):
    print(type(self.app.cut.func.__self__).__name__, "ray" in sys.modules)

with patch("mini_engine.server.background.DrainingServer.run", run):
    serve.run(options("--port", "0"))
"""

# ---------------------------------------------------------------- the server


@contextmanager
def served(replica, ask=None):
    """The app over one replica, and a client of it. ask: how it is asked, if not directly."""

    async def scrape():
        return [("1", replica.scrape()[1]), replica.scrape()]

    async def num_alive():
        return 1

    routes = ReplicaService(cluster(replica, ask), ServerConfig("tiny"), ReplicaMetrics(scrape).scrape, 2, num_alive)
    with in_background(ServerApp(routes)) as url:
        client = Client.__new__(Client)
        client.address = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
        yield client


def test_the_routes_are_those_of_one_engine(replica, expected):
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with served(replica) as client:
        whole = client.post("/v1/completions", body)
        assert whole.status == 200 and whole.body["choices"][0]["token_ids"] == expected
        streamed = client.post("/v1/completions", body | {"stream": True})
        assert read_answer(streamed.body)["token_ids"] == expected
        assert client.post("/v1/completions", body | {"prompt": [99999]}).status == 400
        assert client.get("/health").body == {"status": "ok", "replicas": 2, "alive": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_a_replica_that_has_stopped_has_a_code_of_its_own(replica, stream):
    """The server is not about to end: its clients need no other one."""

    async def ask(jobs, keys):
        raise ReplicaLost("the replica that was answering has ended")
        yield

    with served(replica, ask) as client:
        found = client.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1, "stream": stream})
        assert (found.status, found.body["error"]["code"]) == (503, "replica_stopped"), found
        assert int(found.headers["retry-after"]) >= 1


def test_health_is_the_last_known_state_while_the_new_one_is_not_known(monkeypatch):
    monkeypatch.setattr(service, "ANSWER_SECONDS", 0.02)

    async def scene() -> list[int | None]:
        asked, goes_on = 0, asyncio.Event()

        async def num_alive() -> int:
            nonlocal asked
            asked += 1
            if asked == 2:
                await goes_on.wait()
                raise ConnectionError("Ray's controller has gone")
            return asked

        known = LastKnown(num_alive)
        found = [await known() for _ in range(3)]
        assert asked == 2, "a question that hangs is not asked again and again"
        goes_on.set()
        found += [await known(), await known()]
        monkeypatch.setattr(service, "STALE_SECONDS", 0.0)
        return [*found, await known()]

    found = asyncio.run(asyncio.wait_for(scene(), 60))
    assert found == [1, 1, 1, 1, 3, None], f"{found}: a probe hangs, or is told what is no longer known"


def test_a_schema_is_compiled_by_the_replica(replica):
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": [{"role": "user", "content": "JSON"}], "temperature": 0, "response_format": form}
    with served(replica) as client:
        said = client.post("/v1/chat/completions", body)
        assert json.loads(said.body["choices"][0]["message"]["content"]) == {"a": 7}


def test_metrics_name_the_replica(replica):
    with served(replica) as client:
        lines = client.get("/metrics").body.splitlines()
    held = [line for line in lines if line.startswith("mini_engine_blocks{") and 'state="held"' in line]
    assert held == [f'mini_engine_blocks{{replica="{name}",state="held"}} 0.0' for name in (0, 1)]
    assert len([line for line in lines if line.startswith("# TYPE mini_engine_blocks ")]) == 1, "one family for all"


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize("argv", [["--replicas", "0"], ["--replicas", "99"], ["--router", "x"], ["--beta", "-1"]])
def test_a_wrong_option_is_one_line(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        options(*argv)
    assert caught.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_without_ray_one_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "mini_engine.distributed.replicas.fleet", raising=False)
    with pytest.raises(UserError) as caught:
        serve.run(options("--replicas", "2"))
    assert '.[distributed]"' in str(caught.value) and "make setup" in str(caught.value)


@pytest.mark.nightly
@pytest.mark.reference
def test_one_replica_is_lesson_7s_server_and_needs_no_ray():
    done = subprocess.run([sys.executable, "-c", ONE_REPLICA], capture_output=True, encoding="utf-8", timeout=300)
    assert done.stdout.split()[-2:] == ["EngineWorker", "False"], done.stderr


def test_two_scrapes_at_once_do_not_mix():
    async def ask():
        await asyncio.sleep(0.01)
        return [("0", b"# TYPE a counter\na_total 1.0\n")]

    async def both():
        metrics = ReplicaMetrics(ask)
        return await asyncio.gather(metrics.scrape(), metrics.scrape())

    for text in asyncio.run(both()):
        assert text.count(b"a_total{") == 1, "each sample appears once"
