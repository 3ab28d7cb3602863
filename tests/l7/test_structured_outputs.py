"""Lesson 7. Forms of the text by vLLM's names, for completions and chats, and stop strings that are shown."""

import json
import re

import pytest

pytest.importorskip("llguidance", reason="needs the extra 'server'")

from mini_engine.grammars.output_forms import as_regex
from tests.l7.service import Service, greedy, read_events, tokenizer
from tests.l7.test_tool_schemas import ADD, INTEGER
from tests.support import OneOf

pytestmark = [pytest.mark.reference, pytest.mark.ci]  # no task is about this

BODIES = {
    "/v1/completions": {"prompt": [5, 6, 7], "temperature": 0, "max_tokens": 60},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 60},
}
CHAT = "/v1/chat/completions"
DIGIT = {"type": "object", "properties": {"n": INTEGER}, "required": ["n"]}


def text_of(found) -> str:
    assert found.status == 200, found
    (choice,) = found.body["choices"]
    assert choice["finish_reason"] == "stop", choice
    return choice["text"] if "text" in choice else choice["message"]["content"]


def streamed(service: Service, path, body) -> str:
    *events, _ = read_events(service.post(path, body | {"stream": True}).body)
    choices = [json.loads(event)["choices"][0] for event in events]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def fits_digit(text: str) -> bool:
    found = json.loads(text)
    return [*found] == ["n"] and 0 <= found["n"] <= 99


FORMS = {
    "json": ({"structured_outputs": {"json": DIGIT}}, fits_digit),
    "json as a text": ({"structured_outputs": {"json": json.dumps(DIGIT)}}, fits_digit),
    "regex": ({"structured_outputs": {"regex": r"\d{3}/[ab]"}}, re.compile(r"\d{3}/[ab]").fullmatch),
    "anchored": ({"structured_outputs": {"regex": r"^\d{3}\$$"}}, re.compile(r"\d{3}\$").fullmatch),
    "choice": ({"structured_outputs": {"choice": ["<|im_end|>", "no\n"]}}, ["<|im_end|>", "no\n"].__contains__),
    "guided_json": ({"guided_json": DIGIT}, fits_digit),
    "guided_json as a text": ({"guided_json": json.dumps(DIGIT)}, fits_digit),
    "guided_regex": ({"guided_regex": "a|bc"}, ["a", "bc"].__contains__),
    "guided_choice": ({"guided_choice": ["yes", "no"]}, ["yes", "no"].__contains__),
    "no whitespace": ({"structured_outputs": {"json": DIGIT, "disable_any_whitespace": True}}, fits_digit),
    "of other backends": (
        {
            "structured_outputs": {"json": DIGIT, "whitespace_pattern": " ?", "disable_fallback": False},
            "guided_decoding_backend": "outlines",
            "guided_whitespace_pattern": " ?",
        },
        fits_digit,
    ),
    "response_format": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": DIGIT}}},
        fits_digit,
    ),
    "null": ({"structured_outputs": {"json": DIGIT, "regex": None, "grammar": None}, "guided_json": None}, fits_digit),
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", FORMS)
def test_an_answer_has_the_form(server: Service, path, name):
    form, fits = FORMS[name]
    texts = {text_of(server.post(path, BODIES[path] | form | {"temperature": t, "seed": 3})) for t in (0, 5)}
    assert all(map(fits, texts)), texts
    assert fits(streamed(server, path, BODIES[path] | form))


def test_any_object(server: Service):
    body = BODIES[CHAT] | {"structured_outputs": {"json_object": True}, "max_tokens": 3}
    assert server.post(CHAT, body).body["choices"][0]["message"]["content"].startswith("{")


def test_a_form_and_tools_stand_together(server: Service):
    body = BODIES[CHAT] | {"guided_choice": ["yes", "no"], "tools": [ADD]}
    assert text_of(server.post(CHAT, body)) == OneOf("yes", "no")
    found = server.post(CHAT, body | {"tool_choice": "required", "parallel_tool_calls": False}).body["choices"][0]
    assert found["finish_reason"] == "tool_calls"


WRONG = {
    "two": ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    "none": ({"structured_outputs": {}}, "structured_outputs"),
    "no object": ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
    "grammar": ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs"),
    "unknown": ({"structured_outputs": {"xml": "a"}}, "structured_outputs"),
    "bad regex": ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    "look-ahead": ({"guided_regex": "(?!a)b"}, "guided_regex"),
    "too large a regex": ({"guided_regex": "((a{100}){100}){100}"}, "guided_regex"),
    "too long a regex": ({"guided_regex": "a" * 70_000}, "guided_regex"),
    "no choice": ({"guided_choice": []}, "guided_choice"),
    "choices of another kind": ({"guided_choice": [1]}, "guided_choice"),
    "too many choices": ({"guided_choice": ["a"] * 1025}, "guided_choice"),
    "no JSON": ({"guided_json": "{"}, "guided_json"),
    "a long text": ({"guided_json": '{"const": "' + "x" * 200_000 + '"}'}, "guided_json"),
    "no schema": ({"structured_outputs": {"json": "5"}}, "structured_outputs"),
    "strict": ({"guided_json": {"not": {}}}, "guided_json"),
    "too deep": ({"guided_json": json.loads('{"items": ' * 40 + "{}" + "}" * 40)}, "guided_json"),
    "several": ({"guided_json": DIGIT, "structured_outputs": {"regex": "a"}}, "guided_json"),
    "older ones": ({"guided_json": DIGIT, "guided_regex": "a"}, "guided_regex"),
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_had_is_refused_by_name(server: Service, path, name):
    form, param = WRONG[name]
    found = server.post(path, BODIES[path] | form)
    assert (found.status, found.body["error"]["param"]) == (400, param), found
    server.wait_until_idle()


def test_two_names_for_a_chat_s_form_are_refused(server: Service):
    body = BODIES[CHAT] | {"response_format": {"type": "json_object"}, "guided_regex": "a"}
    assert server.post(CHAT, body).body["error"]["param"] == "guided_regex"
    assert server.post(CHAT, body | {"response_format": {"type": "text"}}).status == 200


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
