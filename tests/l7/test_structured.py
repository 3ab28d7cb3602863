"""Lesson 7. Structured output and tools: whatever the model would like to say, the answer has the form asked for."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("llguidance", reason="needs the extra 'server'")

from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.grammars.schemas import closed
from mini_engine.server.tool_calls import CallReader
from tests.l7.forms import BAD_SCHEMAS, DIGIT, TOWN, as_schema, is_digit, is_town, tool
from tests.shared.service import Service, greedy, read_events, tokenizer

pytestmark = pytest.mark.reference  # no task is about this

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
ASK = {"messages": [{"role": "user", "content": "Name a town."}], "temperature": 0, "max_tokens": 120}
AS_TOWN = {"response_format": as_schema(TOWN)}
TOOLS = [tool(DIGIT, name) for name in ("build", "visit")]


def choice_of(found):
    assert found.status == 200, found
    return found.body["choices"][0]


@pytest.mark.parametrize("temperature", [0, 1.0, 5.0])
def test_a_random_model_cannot_write_what_does_not_fit_the_schema(server: Service, temperature):
    for seed in range(4):
        found = choice_of(server.post(CHAT, ASK | AS_TOWN | {"temperature": temperature, "seed": seed}))
        assert is_town(found["message"]["content"]) and found["finish_reason"] == "stop", found


@pytest.mark.parametrize(
    "form", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_any_object_is_an_object_unless_it_is_cut_off(server: Service, form):
    found = choice_of(server.post(CHAT, ASK | form | {"temperature": 2.0, "seed": 3, "max_tokens": 60}))
    text = found["message"]["content"]
    assert text.startswith("{")
    assert found["finish_reason"] == "length" or isinstance(json.loads(text), dict)


def test_an_answer_that_is_cut_off_says_length(server: Service):
    found = choice_of(server.post(CHAT, ASK | AS_TOWN | {"max_tokens": 5}))
    assert found["finish_reason"] == "length", "the client must be able to tell that the JSON is not complete"


def test_each_of_n_answers_has_its_own_state(server: Service):
    found = server.post(CHAT, ASK | AS_TOWN | {"n": 4, "temperature": 3.0, "seed": 5}).body["choices"]
    texts = [choice["message"]["content"] for choice in found]
    assert all(map(is_town, texts)) and len(set(texts)) > 1, texts


def test_one_batch_holds_answers_with_and_without_a_form(server: Service):
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(beside, server, ASK | AS_TOWN | {"seed": seed, "temperature": 2}) for seed in range(3)]
    assert all(is_town(choice_of(each.result())["message"]["content"]) for each in found)


def test_a_preemption_keeps_the_place_in_the_grammar():
    bodies = [ASK | AS_TOWN | {"seed": seed, "temperature": 2.0, "max_tokens": 40} for seed in range(4)]
    with Service(num_blocks=22, scheduler_config=SchedulerConfig(watermark=0.0)) as service:

        def texts(answers):
            return [choice_of(found)["message"]["content"] for found in answers]

        with ThreadPoolExecutor(4) as pool:
            crowded = texts(pool.map(lambda body: service.post(CHAT, body), bodies))
        preemptions = service.engine.scheduler.num_preemptions
        alone = texts(service.post(CHAT, body) for body in bodies)
    assert preemptions > 0, "the pool was to be too small for all of them"
    assert crowded == alone and all(map(is_town, crowded)), "the matcher belongs to the request, not to its blocks"


# Tools


@pytest.mark.parametrize("several", [True, False])
def test_a_required_call_is_made(server: Service, several):
    body = ASK | {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": several}
    found = choice_of(server.post(CHAT, body))
    calls = found["message"]["tool_calls"]
    assert all(call["function"]["name"] in ("build", "visit") and call["id"] for call in calls)
    assert is_digit(calls[0]["function"]["arguments"])
    if not several:
        assert len(calls) == 1 and found["finish_reason"] == "tool_calls" and found["message"]["content"] is None


def test_the_named_tool_is_called_in_a_stream_too(server: Service):
    body = ASK | {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "visit"}}}
    (call,) = choice_of(server.post(CHAT, body))["message"]["tool_calls"]
    chunks = server.stream(CHAT, body)
    parts = [part for chunk in chunks for part in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert parts[0]["function"]["name"] == call["function"]["name"] == "visit" and parts[0]["id"]
    assert all(part["index"] == 0 and "name" not in part["function"] for part in parts[1:])
    told = "".join(part["function"]["arguments"] for part in parts)
    assert told == call["function"]["arguments"] and is_digit(told)
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert not any(chunk["choices"][0]["delta"].get("content") for chunk in chunks)


def test_auto_may_talk_and_none_is_not_told_of_tools(server: Service):
    found = choice_of(server.post(CHAT, ASK | {"tools": TOOLS, "max_tokens": 12}))
    assert found["message"]["content"] and found["finish_reason"] == "length"
    prompt = server.post(CHAT, ASK | {"max_tokens": 1}).body["usage"]["prompt_tokens"]
    found = server.post(CHAT, ASK | {"tools": TOOLS, "tool_choice": "none", "max_tokens": 1}).body
    assert found["usage"]["prompt_tokens"] == prompt
    assert server.post(CHAT, ASK | {"tools": TOOLS, "max_tokens": 1}).body["usage"]["prompt_tokens"] > prompt + 50


PLAIN = "Hello"
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "}\\n</tool_call>"}}\n</tool_call>'
TEXTS = {
    PLAIN: (PLAIN, []),
    CALL: ("", ['{"a": "}\\n</tool_call>"}']),
    f"Well <tool_ca {CALL}\n{CALL}": ("Well <tool_ca ", ['{"a": "}\\n</tool_call>"}'] * 2),
    "a <tool_call> b": ("a <tool_call> b", []),
    CALL[:49]: ("", ['{"a": "}\\n']),
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_are_read_however_their_text_is_cut(text, size):
    reader, said, arguments = CallReader(), "", {}
    for at in range(0, len(text), size):
        delta = reader.push(text[at : at + size], ended=at + size >= len(text))["delta"]
        said += delta.get("content", "")
        for part in delta.get("tool_calls", ()):
            arguments[part["index"]] = arguments.get(part["index"], "") + part["function"]["arguments"]
    assert (said, list(arguments.values())) == TEXTS[text], "no part of a call may be shown as text, and none be lost"
    assert reader.text == said and [call["function"]["arguments"] for call in reader.calls] == list(arguments.values())


@pytest.mark.parametrize("name", ["too many optional properties", "too large a pattern", "has no end"])
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_form_that_fails_in_the_middle_of_an_answer_is_the_client_s_mistake(server: Service, path, name):
    parts = {"a": {"type": "string", "minLength": 3, "maxLength": 9}, "b": BAD_SCHEMAS[name]}
    named = BAD_SCHEMAS[name].get("$defs", {})
    form = as_schema({"type": "object", "properties": parts, "required": ["a", "b"], "$defs": named})
    asked = {"text": {"format": {"type": "json_schema"} | form["json_schema"]}, "input": "Hi", "temperature": 0}
    body, param = (ASK | {"response_format": form}, None) if path == CHAT else (asked, "text")
    found = server.post(path, body)
    assert (found.status, found.body["error"]["param"]) == (400, param), found
    assert len(found.body["error"]["message"]) < 300 and "\n" not in found.body["error"]["message"]
    events = [json.loads(event) for event in read_events(server.post(path, body | {"stream": True}).body)]
    last = events[-1]
    if path == CHAT:
        assert last["error"]["type"] == "invalid_request_error", last
    else:
        assert last["type"] == "response.failed" and last["response"]["error"]["code"] == "invalid_prompt", last
    server.wait_until_idle()
    assert choice_of(server.post(CHAT, ASK | AS_TOWN))


def test_objects_are_closed_at_every_depth_unless_they_say_otherwise():
    shut = {"additionalProperties": False}
    point = {"type": "object", "properties": {"x": {"type": "integer"}}}
    outer = {"type": "object", "properties": {"a": point, "b": {"anyOf": [point]}}, "$defs": {"p": point}}
    shut_point = point | shut
    assert closed(outer) == shut | {
        "type": "object",
        "properties": {"a": shut_point, "b": {"anyOf": [shut_point]}},
        "$defs": {"p": shut_point},
    }
    assert closed({"items": point}) == {"items": shut_point}
    for says in ({"additionalProperties": True}, {"patternProperties": {}}, {"unevaluatedProperties": True}):
        assert closed(point | says) == point | says, "the schema leaves it open on purpose"
    for combined in (
        {"allOf": [point], "properties": {}},
        {"$ref": "#/$defs/p", "properties": {}, "$defs": {"p": point}},
    ):
        assert closed(combined) == combined, "each part would forbid the properties of the others"
    added = {"properties": {"k": point}, "required": ["k"], "anyOf": [point | {"required": ["x"]}, {"type": "null"}]}
    assert closed(added) == added | {"properties": {"k": shut_point}}, "a branch adds to the properties around it"
    assert closed(point | {"unevaluatedProperties": False})["additionalProperties"] is False


# Stop ids, and a model without numbers, beside others


def ids_that_begin(text: str) -> list[int]:
    """The tokens with which `text` may begin."""
    return [i for i, piece in enumerate(tokenizer().token_bytes) if piece and text.encode().startswith(piece)]


def beside(service: Service, body) -> tuple:
    """Post the body while another answer runs. Return what it got, after a check that the other is a lone one's."""
    other = {"prompt": [5, 6, 7], "max_tokens": 40, "temperature": 0, "return_token_ids": True}
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(service.post, "/v1/completions", other)
        found = pool.submit(service.post, CHAT, body).result()
    assert choice_of(running.result())["token_ids"] == greedy((5, 6, 7), 40), "another request's answer has changed"
    return found


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_form_wins_over_min_tokens_and_no_other_answer_suffers(server: Service, temperature):
    asked = {"response_format": as_schema({"enum": ["a"]}), "stop_token_ids": ids_that_begin('"a"'), "min_tokens": 1}
    found = choice_of(beside(server, ASK | asked | {"temperature": temperature}))
    assert (found["message"]["content"], found["finish_reason"]) == ('"a"', "stop")


@pytest.mark.parametrize("text", ["{", '"', ",", ":", "name"])
def test_a_stop_id_within_an_unfinished_form_is_a_token_like_any_other(server: Service, text):
    stops = [i for i, piece in enumerate(tokenizer().token_bytes) if text.encode() in piece]
    assert stops
    found = choice_of(server.post(CHAT, ASK | AS_TOWN | {"stop_token_ids": stops}))
    assert is_town(found["message"]["content"]) and found["finish_reason"] == "stop", found


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_a_row_without_numbers_is_the_error_of_its_request_alone(stream, temperature):
    with Service() as service:
        run = service.engine.runner.run

        def broken(chunks):
            logits = run(chunks)
            for row, chunk in zip(logits, [chunk for chunk in chunks if chunk.samples], strict=True):
                if chunk.request.params.top_k == 7 and len(chunk.request.output_ids) == 2:
                    row[3] = float("nan")
            return logits

        service.engine.runner.run = broken
        found = beside(service, ASK | {"top_k": 7, "temperature": temperature, "stream": stream})
    if stream:
        assert found.status == 200 and '"type":"server_error"' in found.body and "[DONE]" not in found.body
    else:
        assert found.status == 500 and found.body["error"]["type"] == "server_error"
