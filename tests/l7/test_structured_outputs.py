"""Lesson 7. Forms of the text by vLLM's names, for completions and chats, and stop strings that are shown."""

import json
import re

import pytest

pytest.importorskip("llguidance", reason="needs the extra 'server'")

from mini_engine.grammars.output_forms import as_regex
from tests.l7.forms import ADD, DIGIT, as_schema, is_digit
from tests.shared.service import Service, greedy, tokenizer
from tests.support import OneOf

pytestmark = [pytest.mark.reference, pytest.mark.ci]  # no task is about this

BODIES = {
    "/v1/completions": {"prompt": [5, 6, 7], "temperature": 0, "max_tokens": 60},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 60},
}
CHAT = "/v1/chat/completions"


def text_of(found) -> str:
    assert found.status == 200, found
    (choice,) = found.body["choices"]
    assert choice["finish_reason"] == "stop", choice
    return choice["text"] if "text" in choice else choice["message"]["content"]


def streamed(service: Service, path, body) -> str:
    choices = [chunk["choices"][0] for chunk in service.stream(path, body)]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


FORMS = {
    "json": ({"structured_outputs": {"json": DIGIT}}, is_digit),
    "json as a text": ({"structured_outputs": {"json": json.dumps(DIGIT)}}, is_digit),
    "regex": ({"structured_outputs": {"regex": r"\d{3}/[ab]"}}, re.compile(r"\d{3}/[ab]").fullmatch),
    "anchored": ({"structured_outputs": {"regex": r"^\d{3}\$$"}}, re.compile(r"\d{3}\$").fullmatch),
    "choice": ({"structured_outputs": {"choice": ["<|im_end|>", "no\n"]}}, ["<|im_end|>", "no\n"].__contains__),
    "guided_json": ({"guided_json": DIGIT}, is_digit),
    "guided_json as a text": ({"guided_json": json.dumps(DIGIT)}, is_digit),
    "guided_regex": ({"guided_regex": "a|bc"}, ["a", "bc"].__contains__),
    "guided_choice": ({"guided_choice": ["yes", "no"]}, ["yes", "no"].__contains__),
    "no whitespace": ({"structured_outputs": {"json": DIGIT, "disable_any_whitespace": True}}, is_digit),
    "of other backends": (
        {
            "structured_outputs": {"json": DIGIT, "whitespace_pattern": " ?", "disable_fallback": False},
            "guided_decoding_backend": "outlines",
            "guided_whitespace_pattern": " ?",
        },
        is_digit,
    ),
    "response_format": ({"response_format": as_schema(DIGIT)}, is_digit),
    "as older clients write it": ({"response_format": {"type": "json_object", "schema": DIGIT}}, is_digit),
    "beside a text": (
        {"response_format": {"type": "text"}, "guided_choice": ["yes", "no"]},
        ["yes", "no"].__contains__,
    ),
    "null": ({"structured_outputs": {"json": DIGIT, "regex": None, "grammar": None}, "guided_json": None}, is_digit),
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", FORMS)
def test_an_answer_has_the_form(server: Service, path, name):
    form, fits = FORMS[name]
    texts = {text_of(server.post(path, BODIES[path] | form | {"temperature": t, "seed": 3})) for t in (0, 5)}
    assert all(map(fits, texts)), texts
    assert fits(streamed(server, path, BODIES[path] | form))


def test_a_form_and_tools_stand_together(server: Service):
    body = BODIES[CHAT] | {"guided_choice": ["yes", "no"], "tools": [ADD]}
    assert text_of(server.post(CHAT, body)) == OneOf("yes", "no")
    found = server.post(CHAT, body | {"tool_choice": "required", "parallel_tool_calls": False}).body["choices"][0]
    assert found["finish_reason"] == "tool_calls"


PATTERNS = ["a/b", r"a\/b", r"a\\/b", "^a$", r"a\$", r"a\\$", "[/]", "a\nb", "^a|b$", "(^a$)"]
ESCAPED = ["a\\\nb", "[\\\r]", "\\\\\n", r"\<a\>", "\\é"]  # characters that need no backslash and have one


@pytest.mark.parametrize("pattern", [*PATTERNS, *ESCAPED])
def test_an_expression_means_what_it_means_to_python(server: Service, pattern):
    assert "\n" not in as_regex(pattern)
    text = text_of(server.post("/v1/completions", BODIES["/v1/completions"] | {"guided_regex": pattern}))
    assert re.fullmatch(pattern, text), text


# Stop strings that are shown


@pytest.mark.parametrize("path", BODIES)
def test_a_stop_string_is_shown_if_asked_for(server: Service, path):
    body = BODIES[path] | {"max_tokens": 12}
    plain = server.post(path, body).body["choices"][0]
    whole = plain["text"] if "text" in plain else plain["message"]["content"]
    stop = whole[4:7]
    end = whole.index(stop)
    for shows, expected in ((False, whole[:end]), (True, whole[:end] + stop)):
        asked = body | {"stop": ["never", stop], "include_stop_str_in_output": shows}
        assert text_of(server.post(path, asked)) == expected == streamed(server, path, asked)


def test_what_comes_behind_a_stop_string_is_not_shown(server: Service):
    token = max(greedy((5, 6, 7), 40), key=lambda token: len(tokenizer().token_bytes[token].decode("utf-8", "replace")))
    body = {"prompt": [5, 6, 7], "temperature": 0, "max_tokens": 3, "logit_bias": {str(token): 100}}
    text = tokenizer().token_bytes[token].decode()
    assert len(text) > 2, "a token of several letters"
    found = server.post("/v1/completions", body | {"stop": text[1], "include_stop_str_in_output": True})
    assert text_of(found) == text[: text.index(text[1]) + 1]
