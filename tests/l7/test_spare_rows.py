"""Lesson 7. A model with more rows than the tokenizer has tokens: such ids have no text on any route."""

import pytest

from tests.l7.forms import as_schema
from tests.shared.service import tokenizer
from tests.support import random_model

pytestmark = pytest.mark.reference  # no task is about this

TOKENS = len(tokenizer().token_bytes)
SPARE = TOKENS + 52
SERVER = {"model": random_model(vocab_size=TOKENS + 64, max_position_embeddings=512)}
FORCED = {"temperature": 0, "max_tokens": 3, "logit_bias": {str(SPARE): 100}}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def test_a_completion_echoes_and_scores_them(server):
    body = FORCED | {"prompt": [1, SPARE, 2], "echo": True, "logprobs": 2, "return_token_ids": True}
    status, _, answer = server.post("/v1/completions", body)
    [choice] = answer["choices"]
    assert (status, choice["token_ids"]) == (200, [SPARE] * 3)
    assert choice["text"] == tokenizer().text_of([1, 2])
    assert choice["logprobs"]["tokens"] == [tokenizer().text_of([id]) for id in (1, SPARE, 2, *[SPARE] * 3)]


def test_a_chat_scores_them(server):
    status, _, answer = server.post("/v1/chat/completions", CHAT | FORCED | {"logprobs": True, "top_logprobs": 2})
    [choice] = answer["choices"]
    scored = [(each["token"], each["bytes"]) for each in choice["logprobs"]["content"]]
    assert (status, choice["message"]["content"], scored) == (200, "", [("", [])] * 3)


def test_a_stream_has_an_end(server):
    chunks = server.stream("/v1/chat/completions", CHAT | FORCED)
    assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]][-1] == "length"


def test_the_responses_route_answers(server):
    status, _, answer = server.post("/v1/responses", {"input": "Hi", "temperature": 0, "max_output_tokens": 3})
    assert (status, answer["object"]) == (200, "response")


def test_no_form_allows_them(server):
    asked = {"max_tokens": 20, "response_format": as_schema({"enum": ["yes"]})}
    status, _, answer = server.post("/v1/chat/completions", CHAT | FORCED | asked)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, '"yes"')
