"""Lesson 7. Long texts and large answers: bounded, and never a reason for the others to wait."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mini_engine.server import json_text
from mini_engine.server.errors import ApiError
from mini_engine.server.hardening import bodies
from mini_engine.server.json_text import to_json, to_json_in_pieces
from tests.l7.forms import tool
from tests.shared.service import PATIENCE, Service, held

pytestmark = pytest.mark.reference  # no task is about this

LETTERS = "x" * 400_000
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": LETTERS})}}
HI = {"role": "user", "content": "Hi"}


# Long texts


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": LETTERS}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": LETTERS}]}]},
        {"messages": [HI, {"role": "assistant", "content": "", "tool_calls": [CALL]}]},
        {"messages": [HI], "tools": [{"type": "function", "function": {"name": "f", "description": LETTERS}}]},
        {"messages": [HI], "tools": [tool({"title": LETTERS[:30_000]}, f"f{i}") for i in range(14)]},
    ],
    ids=["content", "part", "arguments", "description", "parameters"],
)
def test_all_text_of_a_conversation_counts(server: Service, body, monkeypatch):
    asked = []
    for name in ("encode", "encode_plain"):
        monkeypatch.setattr(
            server.worker.tokenizer, name, lambda text: asked.extend([text][: len(text) // 10_000]) or [1]
        )
    found = server.post("/v1/chat/completions", body | {"max_tokens": 1, "tool_choice": "none"})
    if body.get("tools"):  # tools that may not be called are not described, and so not counted
        assert found.status == 200
        found = server.post("/v1/chat/completions", body | {"max_tokens": 1})
    assert found.status == 400, found
    assert not asked, "a text that can never fit need not be tokenized: that takes seconds"


@pytest.mark.parametrize("what", ["a large body is read", "a text is tokenized"])
def test_health_is_answered_meanwhile(server: Service, what):
    """However long it takes."""
    owner, name = (bodies, "parsed") if "read" in what else (server.worker.tokenizer, "encode_prompt")
    body = {"prompt": [0.5] * 150_000 if "read" in what else "Once", "max_tokens": 1}
    with held(owner, name) as (entered, leave), ThreadPoolExecutor(1) as pool:
        asking = pool.submit(server.post, "/v1/completions", body)
        try:
            assert entered.wait(PATIENCE) and server.get("/health").status == 200
        finally:
            leave.set()
        assert asking.result().status == (400 if "read" in what else 200)


def test_a_stop_string_may_have_1024_characters(server: Service):
    """What an answer may still become is compared with every beginning of each, for every token, between two steps."""
    assert server.post("/v1/completions", {"prompt": [1], "max_tokens": 1, "stop": "x" * 1024}).status == 200


# Large answers


def test_prompt_logprobs_are_bounded():
    body = {"prompt": [[5] * 40] * 4, "max_tokens": 0, "echo": True, "logprobs": 4}
    with Service(max_prompt_logprobs=4 * 40 * 5) as service:
        assert service.post("/v1/completions", body).status == 200
        for more in ({"logprobs": 5}, {"n": 2}, {"prompt": [[5] * 40] * 5}):
            found = service.post("/v1/completions", body | more)
            assert (found.status, found.body["error"]["param"]) == (400, "logprobs"), found
        assert service.post("/v1/completions", body | {"echo": False, "max_tokens": 1, "n": 2}).status == 200
        service.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_large_answer_is_written_off_the_event_loop(server: Service, monkeypatch, stream):
    threads = set()
    write = json_text.to_json_in_pieces
    monkeypatch.setattr(
        json_text, "to_json_in_pieces", lambda data: threads.add(threading.current_thread().name) or write(data)
    )
    body = {"prompt": [5] * 300, "max_tokens": 0, "echo": True, "logprobs": 20}
    whole = server.stream("/v1/completions", body)[0] if stream else server.post("/v1/completions", body).body
    assert len(whole["choices"][0]["logprobs"]["top_logprobs"]) == 300
    assert threads and "server" not in threads, "json keeps Python's lock: written at once, it stops the event loop"


@pytest.mark.parametrize(
    "value",
    [{}, [], [[]], {"a": {"b": [1.5, None, True, "é\n"]}}, list(range(1000)), [{"x": [0.25] * 700}] * 3, "text", None],
)
def test_pieces_are_the_same_json(value):
    assert to_json_in_pieces(value) == to_json(value)


def test_a_piece_that_is_no_number_is_an_error():
    with pytest.raises(ApiError):
        to_json_in_pieces({"a": [0.0] * 1000 + [float("nan")]})


def test_no_piece_is_large(monkeypatch):
    sizes = []
    dumps = json.dumps
    monkeypatch.setattr(
        json_text.json, "dumps", lambda data, **options: sizes.append(size(data)) or dumps(data, **options)
    )
    to_json_in_pieces({"choices": [{"logprobs": {"top_logprobs": [dict.fromkeys(map(str, range(20)), 0.5)] * 4000}}]})
    assert max(sizes) <= 1 + 21 * json_text.PIECE, f"{max(sizes)} values were written at once"


def size(data) -> int:
    """The number of values in it."""
    children = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return 1 + sum(map(size, children))
