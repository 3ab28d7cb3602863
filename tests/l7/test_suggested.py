"""Lesson 7. What the checkpoint suggests for sampling holds for what a client leaves out, on each route."""

import pytest

from mini_engine.server.chat_protocol import ChatRequest
from tests.shared.service import tokenizer
from tests.support import random_model

pytestmark = pytest.mark.reference  # no task is about this

SUGGESTED = dict(temperature=0.6, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.1)
LENGTH = dict(max_tokens=5)
SERVER = {
    "model": random_model(
        vocab_size=len(tokenizer().token_bytes), max_position_embeddings=512, sampling=SUGGESTED | LENGTH
    )
}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
BODIES = {"/v1/completions": {"prompt": "Hi"}, "/v1/chat/completions": CHAT, "/v1/responses": {"input": "Hi"}}
LENGTHS = {"/v1/completions": 16, "/v1/chat/completions": 5, "/v1/responses": 5}  # OpenAI's 16, or the suggested one
ALL = dict(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)


@pytest.fixture
def asked(server, added):
    """Post a body; return the sampling parameters that the engine is given, and the length."""

    def ask(route, **body):
        assert server.post(route, BODIES[route] | body).status == 200
        params = added.pop()[2]
        return {name: getattr(params, name) for name in ALL}, params.max_tokens

    return ask


@pytest.mark.parametrize("left_out", [{}, {"temperature": None}], ids=["left out", "null"])
@pytest.mark.parametrize("route", BODIES)
def test_what_is_left_out_is_the_checkpoint_s(asked, route, left_out):
    assert asked(route, **left_out) == (SUGGESTED, LENGTHS[route])


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_what_is_given_counts_even_if_it_is_the_usual_default(asked, route):
    assert asked(route, **ALL, max_tokens=7) == (ALL, 7)


@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_a_response_s_parameters_count_one_by_one(asked, name):
    assert asked("/v1/responses", **{name: 1.0}) == (SUGGESTED | {name: 1.0}, 5)


@pytest.mark.parametrize(("room", "longest"), [(3, 3), (100, 5)])
def test_a_chat_is_no_longer_than_what_fits(room, longest):
    assert ChatRequest.model_validate(CHAT).advised(SUGGESTED | LENGTH).params_of_all([room])[0].max_tokens == longest


def test_a_response_says_what_was_used(server):
    answer = server.post("/v1/responses", BODIES["/v1/responses"] | {"top_p": 0.5}).body
    assert (answer["temperature"], answer["top_p"]) == (SUGGESTED["temperature"], 0.5)
