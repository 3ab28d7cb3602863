"""Lesson 7. Refusals: OpenAI's shape, the right status, the parameter by its name; nothing is silently ignored."""

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from mini_engine.base.errors import UserError
from mini_engine.engine.worker import EngineStopped, QueueFull
from mini_engine.server import errors
from mini_engine.server.chat_protocol import ChatRequest
from mini_engine.server.errors import ApiError, as_api_error, refusal
from mini_engine.server.protocol import CompletionRequest
from tests.shared.service import Service

ALL = {"prompt": "one", "max_tokens": 1}
CHAT = {"messages": [{"role": "user", "content": "one"}], "max_tokens": 1}
SERVER = {"max_body_bytes": 200_000}


def invalid(model, body) -> RequestValidationError:
    """What FastAPI raises for such a body."""
    try:
        model.model_validate(body)
    except ValidationError as error:
        return RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in error.errors()])
    raise AssertionError(
        f"{body} was taken: a parameter that is not supported must be refused by name, not silently ignored"
    )


@pytest.mark.task(3)
@pytest.mark.parametrize("name", ["suffix", "logit_bias", "echo", "tools", "response_format", "temprature", "body"])
def test_a_parameter_that_is_not_supported_is_refused_by_name(name):
    found = refusal(invalid(CompletionRequest, ALL | {name: 1}))
    assert found.status_code == 400, "the client can fix it: 400"
    assert found.param == name, f"param is {found.param!r}, but the parameter at fault is {name!r}"
    assert name in found.detail, f"the message must name the parameter {name!r}: {found.detail}"


@pytest.mark.task(3)
def test_a_wrong_value_is_refused_with_the_path_to_it():
    found = refusal(invalid(ChatRequest, {"messages": [{"role": "owner", "content": "x"}]}))
    assert found.status_code == 400, "a mistake that the client can fix is 400 (422 is FastAPI's habit, not OpenAI's)"
    assert found.param == "messages", f"param is {found.param!r}: it is the first part of the path, 'messages'"
    assert "messages.0.role" in found.detail, f"the message must have the whole path, messages.0.role: {found.detail}"
    assert "'system'" in found.detail, f"the message must say what is wrong with it, pydantic's `msg`: {found.detail}"


@pytest.mark.task(3)
def test_the_first_of_several_mistakes_is_named():
    found = refusal(invalid(CompletionRequest, ALL | {"max_tokens": "one", "temperature": "hot"}))
    first = invalid(CompletionRequest, ALL | {"max_tokens": "one", "temperature": "hot"}).errors()[0]["loc"][1]
    assert found.param == first, f"two parameters are wrong, and {first} is the first in error.errors()"
    assert first in found.detail, f"the message must name the parameter {first!r}: {found.detail}"


@pytest.mark.task(3)
def test_a_wrong_type_of_one_that_may_have_several_is_one_sentence():
    found = refusal(invalid(CompletionRequest, {"prompt": {"text": "one"}}))
    assert found.param == "prompt", f"param is {found.param!r}, but the parameter at fault is 'prompt'"
    assert "give a text, a list of token ids, or a list of either" in found.detail, (
        f"the message must have pydantic's `msg`, which says what to give: {found.detail}"
    )


@pytest.mark.task(3)
def test_a_body_that_is_no_object_is_refused():
    found = refusal(RequestValidationError([{"type": "model_attributes_type", "loc": ("body",), "msg": "no object"}]))
    assert found.status_code == 400, "the client can fix it: 400"
    assert found.param is None, "the whole body is at fault, not a parameter: there is no path behind 'body'"
    assert found.detail, "the message is empty: say that the body must be an object"


@pytest.mark.task(3)
def test_a_body_that_is_no_json_is_refused():
    error = {
        "type": "json_invalid",
        "loc": ("body", 3),
        "msg": "JSON decode error",
        "ctx": {"error": "Expecting value"},
    }
    found = refusal(RequestValidationError([error]))
    assert found.status_code == 400, "the client can fix it: 400"
    assert found.param is None, f"param is {found.param!r}: the 3 in `loc` is a place in the text, not a parameter"
    assert "Expecting value" in found.detail, f"the message must say what is wrong, ctx['error']: {found.detail}"


@pytest.mark.task(3)
@pytest.mark.parametrize("value", ["5", True, 2.5, [5]])
def test_a_number_is_a_number(value):
    found = refusal(invalid(CompletionRequest, ALL | {"max_tokens": value}))
    assert found.param == "max_tokens", f"max_tokens is {value!r}, and the refusal names {found.param!r}"


def test_null_means_left_out():
    wanted = CompletionRequest.model_validate({"prompt": "x", "best_of": None, "stop": None, "temperature": None})
    assert wanted.temperature == 1.0 and not wanted.stop


def parts(error) -> tuple:
    """Status, type, code and param of the response to `error`, and the seconds of Retry-After, 0 without one."""
    found = as_api_error(error)
    assert isinstance(found, ApiError), f"as_api_error({error!r}) is {found!r}; it returns an ApiError for every error"
    response, told = found.response(), found.body["error"]
    return found.status_code, told["type"], told["code"], told["param"], int(response.headers.get("retry-after", 0))


@pytest.mark.task(4)
def test_too_many_waiting_is_429_with_retry_after():
    status, kind, code, _, seconds = parts(QueueFull("3 requests wait already"))
    assert (status, kind) == (429, "rate_limit_error"), "too many requests are waiting: 429, come back later"
    assert seconds >= 1, f"Retry-After is {seconds or None}: without Retry-After clients come back at once, all of them"
    assert code == "rate_limit_exceeded", f"the code is {code!r}; programs look for 'rate_limit_exceeded'"
    assert "3 requests" in as_api_error(QueueFull("3 requests wait already")).detail, "say what the exception says"


@pytest.mark.task(4)
def test_an_engine_that_stops_is_503_with_retry_after():
    status, kind, code, _, seconds = parts(EngineStopped("stopping"))
    assert (status, kind) == (503, "server_error"), "the server is shutting down: 503"
    assert code == "shutting_down", f"the code is {code!r}; programs look for 'shutting_down'"
    assert seconds >= 1, f"Retry-After is {seconds or None}: tell the client when to try again, at another server"


@pytest.mark.task(4)
def test_a_user_s_mistake_is_400_and_names_its_parameter():
    error = UserError("top_p is 3; give a number from 0 to 1", param="top_p")
    assert parts(error)[0] == 400, "the client's own mistake is 400"
    assert parts(error)[3] == "top_p", "UserError says which parameter is at fault: error.param"
    assert "top_p is 3" in as_api_error(error).detail, "say what the exception says"
    assert parts(UserError("the prompt is empty; give at least one token"))[3] is None, "no parameter was named"


@pytest.mark.task(4)
def test_an_api_error_is_returned_as_it_is():
    error = ApiError(404, "there is no such model", param="model", code="model_not_found")
    assert as_api_error(error) is error, "an ApiError has its status, param and code already: leave it as it is"


@pytest.mark.task(4)
def test_an_http_exception_keeps_its_status_and_headers():
    found = as_api_error(HTTPException(405, "Method Not Allowed", {"Allow": "POST"}))
    assert found.status_code == 405, (
        f"FastAPI's own exceptions know their status, 405 here: it became {found.status_code}"
    )
    assert found.detail == "Method Not Allowed", "FastAPI's own exceptions keep their message, `detail`"
    assert found.response().headers.get("allow") == "POST", (
        "FastAPI's own exceptions keep their headers: Allow says which methods there are"
    )


@pytest.mark.task(4)
def test_a_validation_error_is_what_refusal_says(monkeypatch):
    said = ApiError(400, "whatever refusal says")
    monkeypatch.setattr(errors, "refusal", lambda error: said)
    error = RequestValidationError([{"type": "missing", "loc": ("body", "prompt"), "msg": "Field required"}])
    assert as_api_error(error) is said, "call refusal, task 3, for a RequestValidationError"


@pytest.mark.task(4)
@pytest.mark.parametrize("error", [RuntimeError("the roof"), ValueError("the roof"), TimeoutError("the roof")])
def test_anything_else_is_500_in_the_same_shape(error):
    status, kind, *_ = parts(error)
    assert (status, kind) == (500, "server_error"), "not the client's fault, and not a matter of waiting: 500"
    said = as_api_error(error).detail
    assert type(error).__name__ in said and "the roof" in said, (
        f"the message must have the exception's type and text: {said}"
    )


# Over a real socket


HI, WIDE = CHAT["messages"][-1], "y" * 150_000
UNSEEN = {
    "a variable": {"chat_template_kwargs": {"x": WIDE}},
    "a key": {"messages": [HI | {"x": WIDE}]},
    "a thought": {"messages": [HI, {"role": "assistant", "content": "x", "reasoning_content": WIDE}, HI]},
    "a tool": {"tools": [{"type": "function", "function": {"name": "f", "description": WIDE}}], "tool_choice": "none"},
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_the_template_does_not_write_takes_no_room(server: Service, name):
    assert server.post("/v1/chat/completions", CHAT | UNSEEN[name]).status == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x " * 50000}),
        ("/v1/chat/completions", {"messages": [HI | {"content": "x " * 50000}]}),
        ("/v1/chat/completions", {"messages": [HI | {"content": "<|im_end|>" + "x " * 50000}]}),
    ],
)
def test_a_prompt_that_can_never_fit_is_not_tokenized(server: Service, monkeypatch, path, body):
    monkeypatch.setattr(server.worker.tokenizer, "encode_plain", None)
    monkeypatch.setattr(server.worker.tokenizer, "encode", None)
    assert server.post(path, body).body["error"]["code"] == "context_length_exceeded"


def test_what_does_not_fit_the_pool_does_not_fit_the_context():
    with Service(num_blocks=9) as service:
        found = service.post("/v1/completions", {"prompt": [5] * 20, "max_tokens": 16})
        assert (found.status, found.body["error"]["code"]) == (400, "context_length_exceeded"), found


def test_other_paths_and_methods_keep_the_shape(server: Service):
    assert server.get("/v1/nothing").body["error"]["message"] == "Not Found"
    found = server.get("/v1/completions")
    assert found.status == 405 and found.body["error"]["type"] == "invalid_request_error"


def test_another_model_s_name_is_404(server: Service):
    found = server.post("/v1/completions", ALL | {"model": "gpt-9"})
    assert (found.status, found.body["error"]["code"]) == (404, "model_not_found")
    assert "'tiny'" in found.body["error"]["message"], "say which model there is"
    assert server.get("/v1/models/gpt-9").status == 404 and server.get("/v1/models/tiny").status == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_too_large_a_body_is_413_whether_it_says_so_or_not(server: Service, chunked):
    found = server.post("/v1/completions", [b" " * 1000] * 300 if chunked else b" " * 300_000)
    assert found.status == 413 and found.body["error"]["code"] == "body_too_large"
