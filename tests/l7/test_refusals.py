"""Lesson 7. Whatever is wrong with a request, its refusal names the parameter, and the engine does not find out."""

import json
import math

import pytest

pytest.importorskip("llguidance", reason="needs the extra 'server'")

from tests.l7.forms import ADD, BAD_SCHEMAS, DIGIT, as_schema
from tests.shared.service import Service

pytestmark = pytest.mark.reference  # no task is about this

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
HI = {"role": "user", "content": "Hi"}
LEAST = {COMPLETIONS: {"prompt": "x"}, CHAT: {"messages": [HI]}, RESPONSES: {"input": "Hi"}}
PART = {"type": "text", "text": "a"}
PIECES = [{"role": "user", "content": [PART] * 200}] * 20
MANY = {str(i): "" for i in range(17)}
ANY_OBJECT = {"type": "json_object"}


def calling(arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "assistant", "tool_calls": [call]}]


CALLS = {"role": "assistant", "tool_calls": calling("{}")[0]["tool_calls"] * 100}


FORMS = [
    *({"structured_outputs": form} for form in ({}, {"json_object": False}, {"grammar": "root ::= x"}, {"xml": "a"})),
    *({"structured_outputs": form} for form in ({"regex": "a", "choice": ["a"]}, {"regex": "("}, {"json": "5"})),
    *({"guided_regex": regex} for regex in ("(?!a)b", "((a{100}){100}){100}", "a" * 70_000)),
    *({"guided_choice": choices} for choices in ([], [1], ["a"] * 1025)),
    *({"guided_json": schema} for schema in ("{", '{"const": "' + "x" * 200_000 + '"}', {"not": {}})),
    {"guided_json": json.loads('{"items": ' * 40 + "{}" + "}" * 40)},
    {"guided_json": DIGIT, "structured_outputs": {"regex": "a"}},
    {"guided_regex": "a", "guided_json": DIGIT},
]
WRONG = {  # what is added to the least that a request needs; the parameter at fault is the first one
    COMPLETIONS: [
        *({"tools": []}, {"temprature": 1}, {"functions": []}, {"n": "two"}, {"n": 99}, {"temperature": 1e9}),
        *({"top_p": math.nan}, {"seed": 2**70}, {"prompt": ""}, {"stream_options": {"include_usage": True}}),
        *({"stop_token_ids": [10**9]}, {"best_of": 3}, {"best_of": True}, {"suffix": "x"}, {"service_tier": "flex"}),
        *({"store": True}, {"store": 0}, {"skip_special_tokens": 1.0}, {"stop": "x" * 1025}, {"stop": ["x" * 1025]}),
        *({"logit_bias": bias} for bias in ({"x": 1}, {"-1": 1}, {"99999": 1}, {"5": 101}, {"5": "1"}, [5])),
        *FORMS,
    ],
    CHAT: [
        *({"modalities": ["audio"]}, {"audio": {}}, {"store": True}, {"best_of": 2}, {"echo": True}),
        *({"skip_special_tokens": False}, {"functions": []}, {"top_logprobs": 2}),
        {"max_tokens": 3, "max_completion_tokens": 3},
        *({"chat_template_kwargs": given} for given in ([], "x", {"tools": []}, {"messages": []}, 5)),
        *({"messages": []}, {"messages": [{"role": "owner", "content": "x"}]}, {"messages": [{"role": "user"}]}),
        *({"messages": [HI | {"content": content}]} for content in (None, 3, [{"type": "image_url"}], [PART] * 300)),
        *({"messages": [HI] * 5000}, {"messages": [*PIECES, PIECES[0]]}, {"messages": [*PIECES, CALLS]}),
        *({"messages": [HI, *calling(given)]} for given in ([1], 7, True)),
        *({"tool_choice": "required"}, {"tool_choice": "perhaps", "tools": [ADD]}, {"tools": [{"type": "web_search"}]}),
        {"tool_choice": {"type": "function", "function": {"name": "fly"}}, "tools": [ADD]},
        *({"tools": [ADD, ADD]}, {"tools": [{"type": "function", "function": {"name": "two words"}}]}),
        {"response_format": as_schema({"not": {}}), "tools": [ADD]},
        *({"response_format": form} for form in ({"type": "xml"}, {"type": "json_schema"})),
        *({"response_format": as_schema(schema)} for schema in BAD_SCHEMAS.values()),
        {"guided_regex": "a", "response_format": ANY_OBJECT},
        *FORMS,
    ],
    RESPONSES: [
        *({"previous_response_id": "resp_1"}, {"conversation": {"id": "conv_1"}}, {"tools": [ADD]}),
        *({"reasoning": {"speed": "high"}}, {"background": True}, {"max_output_tokens": 0}, {"temperature": -1.0}),
        *({"input": []}, {"input": [{"type": "function_call_output", "call_id": "x", "output": "1"}]}),
        {"input": [HI] * 4096, "instructions": "Be brief."},
        *({"metadata": given} for given in ({"a": 1}, {"a": math.inf}, {"a": "x" * 513}, MANY)),
        *({"text": {"format": form}} for form in ({"type": "xml"}, {"type": "json_schema", "name": "x"})),
        *({"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}} for schema in ({"not": {}}, 5)),
    ],
}  # fmt: skip


def check_refused(server: Service, path: str, body, param: str | None, code: str | None = None) -> str:
    """Post what has to be refused, and return the refusal's message."""
    steps = server.metrics.steps._value.get()
    found = server.post(path, body)
    assert found.status == 400, found
    message, error = found.body["error"]["message"], found.body["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code), error
    assert message and len(message) <= 1000 and "\n" not in message
    assert server.metrics.steps._value.get() == steps and server.worker.num_open == 0 and server.worker.is_alive
    return message


@pytest.mark.parametrize(
    ("path", "more"),
    [pytest.param(path, more, id=f"{path}-{str(more)[:60]}") for path, cases in WRONG.items() for more in cases],
)
def test_what_is_wrong_is_refused_by_name_before_anything_runs(server: Service, path, more):
    check_refused(server, path, LEAST[path] | more, param=next(iter(more)))


@pytest.mark.parametrize(
    "body",
    [{"prompt": [1, 99999]}, {"prompt": [[1, 2], [3, 99999]]}, {"prompt": "\ud800"}, {"prompt": ["x"] * 20, "n": 16}],
)
def test_what_no_single_parameter_is_to_blame_for_is_refused_too(server: Service, body):
    check_refused(server, COMPLETIONS, body, param=None)


LONG_TEXT, LONG_IDS = "x " * 50000, [5] * 9000
TOO_LONG = [
    (COMPLETIONS, {"prompt": LONG_IDS, "max_tokens": 1}),
    (COMPLETIONS, {"prompt": [[1], LONG_IDS]}),
    (COMPLETIONS, {"prompt": LONG_TEXT}),
    (COMPLETIONS, {"max_tokens": 32000}),
    (COMPLETIONS, {"prompt": [5] * 512, "echo": True, "max_tokens": 0}),
    (CHAT, {"messages": [HI | {"content": "one two three " * 1000}]}),
    (CHAT, {"messages": [HI | {"content": LONG_TEXT}], "stream": True}),
    (CHAT, {"max_tokens": 32000}),
    (RESPONSES, {"input": "one two three " * 1000}),
    (RESPONSES, {"input": LONG_TEXT}),
    (RESPONSES, {"max_output_tokens": 32000, "stream": True}),
]


@pytest.mark.parametrize(("path", "more"), TOO_LONG, ids=lambda given: str(given)[:40])
def test_what_does_not_fit_the_context_has_openai_s_code(server: Service, path, more):
    check_refused(server, path, LEAST[path] | more, param=None, code="context_length_exceeded")


@pytest.mark.parametrize("data", [b"", b"{", b"nonsense", b"[1]", b"3", b"\xff\xfe", b'{"prompt": ' + b"[" * 5000])
@pytest.mark.parametrize("path", LEAST)
def test_garbage_is_400(server: Service, path, data):
    check_refused(server, path, data, param=None)


@pytest.mark.parametrize("path", LEAST)
def test_a_body_in_another_encoding_is_refused(server: Service, path):
    """The count of values reads UTF-8."""
    check_refused(server, path, json.dumps(LEAST[path]).encode("utf-16"), param=None)


@pytest.mark.parametrize("path", LEAST)
def test_what_is_needed_is_asked_for(server: Service, path):
    check_refused(server, path, b'{"stream": false}', param=next(iter(LEAST[path])))


@pytest.mark.parametrize("arguments", [[1], 7, True])
def test_the_path_to_a_value_is_as_the_client_knows_it(server: Service, arguments):
    message = check_refused(server, CHAT, {"messages": calling(arguments)}, "messages")
    path = "messages.0.tool_calls.0.function.arguments"
    assert path in message and f"{path}." not in message, f"the path of a union's parts is pydantic's own: {message}"
