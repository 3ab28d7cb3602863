"""Lesson 11. Lesson 7's server over a hybrid: the same routes, and prefixes are shared through checkpoints."""

import json
import urllib.request

import pytest

pytest.importorskip("fastapi", reason="needs the server's packages")

from mini_engine import LLM
from mini_engine.engine.worker import EngineWorker
from mini_engine.server.app import create_app
from mini_engine.server.background import in_background
from mini_engine.server.metrics import Metrics
from mini_engine.server.server_config import ServerConfig

pytestmark = pytest.mark.reference  # no task is about this

PROMPT = "The capital of France is Paris. France is a country in Europe. The main language of France is"


@pytest.fixture(scope="module")
def ask():
    """Post a body to a route of a server over the pocket hybrid; return the answer."""
    config, metrics, llm = ServerConfig("pocket-hybrid"), Metrics(), LLM("pocket-hybrid")
    with EngineWorker(llm.engine, llm.tokenizer, config.max_waiting, metrics) as worker:
        metrics.watch(worker)
        with in_background(create_app(worker, config, metrics)) as url:

            def post(route: str, **body) -> dict:
                data = json.dumps({"model": "pocket-hybrid", "temperature": 0} | body).encode()
                headers = {"Content-Type": "application/json"}
                with urllib.request.urlopen(urllib.request.Request(url + route, data, headers), timeout=60) as answer:
                    return json.load(answer)

            yield post


def test_a_completion_comes_twice_and_the_second_time_from_a_checkpoint(ask):
    first, second = (ask("/v1/completions", prompt=PROMPT, max_tokens=4) for _ in range(2))
    assert first["choices"][0]["text"].startswith(" French.") and second["choices"] == first["choices"]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second)]
    assert cached[0] == 0 and cached[1] >= 16


def test_a_chat_answers(ask):
    chat = [{"role": "user", "content": "Count to twenty."}]
    answer = ask("/v1/chat/completions", messages=chat, max_tokens=8)
    assert answer["choices"][0]["message"]["content"].startswith("One, two, three")
