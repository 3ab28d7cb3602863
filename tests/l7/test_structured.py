"""Lesson 7. Structured output and tools: whatever the model would like to say, the answer has the form asked for."""

import asyncio
import json

import pytest

pytest.importorskip("llguidance", reason="needs the extra 'server'")

from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.grammars.schemas import closed
from mini_engine.server.tool_calls import CallReader
from tests.l7.service import Service, exchange, greedy, read_events, tokenizer

pytestmark = pytest.mark.reference  # no task is about this

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "Name a town."}], "temperature": 0, "max_tokens": 120}
TOWN = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["port", "mine"]},
    },
    "required": ["name", "size", "kind"],
}
AS_TOWN = {"response_format": {"type": "json_schema", "json_schema": {"name": "town", "schema": TOWN}}}
DIGIT = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": DIGIT}}
    for name in ("build", "visit")
]


def is_town(text: str) -> bool:
    """Whether the text is JSON that fits TOWN."""
    found = json.loads(text)
    fits = set(found) == {"name", "size", "kind"} and len(found["name"]) <= 8 and found["kind"] in ("port", "mine")
    return fits and isinstance(found["size"], int) and 0 <= found["size"] <= 999


def is_digit(text: str) -> bool:
    """Whether the text is JSON that fits DIGIT."""
    found = json.loads(text)
    return list(found) == ["n"] and 0 <= found["n"] <= 9


def choice_of(found):
    assert found.status == 200, found
    return found.body["choices"][0]


def streamed(service: Service, body) -> list[dict]:
    """The chunks of a streamed chat."""
    *events, last = read_events(service.post(CHAT, body | {"stream": True}).body)
    assert last == "[DONE]"
    return [json.loads(event) for event in events]


@pytest.mark.parametrize("temperature", [0, 1.0, 5.0])
def test_a_random_model_cannot_write_what_does_not_fit_the_schema(server: Service, temperature):
    for seed in range(4):
        found = choice_of(server.post(CHAT, ASK | AS_TOWN | {"temperature": temperature, "seed": seed}))
        assert is_town(found["message"]["content"]) and found["finish_reason"] == "stop", found


def test_any_object_is_an_object_unless_it_is_cut_off(server: Service):
    body = ASK | {"response_format": {"type": "json_object"}, "temperature": 2.0, "seed": 3, "max_tokens": 60}
    found = choice_of(server.post(CHAT, body))
    text = found["message"]["content"]
    assert text.startswith("{")
    assert found["finish_reason"] == "length" or isinstance(json.loads(text), dict)


def test_an_object_may_have_a_schema_as_older_clients_write_it(server: Service):
    found = choice_of(server.post(CHAT, ASK | {"response_format": {"type": "json_object", "schema": TOWN}}))
    assert is_town(found["message"]["content"])


def test_an_answer_that_is_cut_off_says_length(server: Service):
    found = choice_of(server.post(CHAT, ASK | AS_TOWN | {"max_tokens": 5}))
    assert found["finish_reason"] == "length", "the client must be able to tell that the JSON is not complete"


def test_text_is_no_constraint(server: Service):
    plain = server.post(CHAT, ASK | {"return_token_ids": True}).body["choices"][0]["token_ids"]
    asked = ASK | {"return_token_ids": True, "response_format": {"type": "text"}}
    assert server.post(CHAT, asked).body["choices"][0]["token_ids"] == plain


def test_each_of_n_answers_has_its_own_state(server: Service):
    found = server.post(CHAT, ASK | AS_TOWN | {"n": 4, "temperature": 3.0, "seed": 5}).body["choices"]
    texts = [choice["message"]["content"] for choice in found]
    assert all(map(is_town, texts)) and len(set(texts)) > 1, texts


def test_one_batch_holds_answers_with_and_without_a_form():
    plain = {"prompt": [5, 6, 7], "max_tokens": 40, "temperature": 0, "return_token_ids": True}

    async def all_of_them(service):
        free = [exchange(service, plain) for _ in range(3)]
        bound = [asyncio.to_thread(service.post, CHAT, ASK | AS_TOWN | {"seed": i, "temperature": 2}) for i in range(3)]
        return await asyncio.gather(*free, *bound)

    with Service() as service:
        *free, a, b, c = asyncio.run(all_of_them(service))
    assert all(is_town(choice_of(found)["message"]["content"]) for found in (a, b, c))
    for status, content in free:
        ids = json.loads(content)["choices"][0]["token_ids"]
        assert status == 200 and ids == greedy((5, 6, 7), 40), "a neighbour's mask must not touch this row"


def test_a_preemption_keeps_the_place_in_the_grammar():
    config = SchedulerConfig(watermark=0.0)
    with Service(num_blocks=22, scheduler_config=config) as service:
        bodies = [ASK | AS_TOWN | {"seed": seed, "temperature": 2.0, "max_tokens": 40} for seed in range(4)]

        async def together():
            return await asyncio.gather(*(asyncio.to_thread(service.post, CHAT, body) for body in bodies))

        crowded = [choice_of(found)["message"]["content"] for found in asyncio.run(together())]
        preemptions = service.engine.scheduler.num_preemptions
        alone = [choice_of(service.post(CHAT, body))["message"]["content"] for body in bodies]
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
    chunks = streamed(server, body)
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


def test_a_conversation_with_calls_and_their_results_is_taken(server: Service):
    call = {"id": "call_1", "type": "function", "function": {"name": "visit", "arguments": '{"name": "Rome"}'}}
    turns = [
        {"role": "developer", "content": "Be brief."},
        *ASK["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "It is closed."},
    ]
    assert server.post(CHAT, ASK | {"messages": turns, "tools": TOOLS, "max_tokens": 3}).status == 200


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


# Refusals


def nested(depth):
    return {} if depth == 0 else {"type": "object", "properties": {"a": nested(depth - 1)}}


def optional(count):
    return {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(count)}}


ITSELF = {"$ref": "#/$defs/a"}
BAD_SCHEMAS = {
    "unknown type": {"type": "objekt"},
    "unknown keyword": {"type": "string", "not": {"const": "x"}},
    "unknown format": {"type": "string", "format": "zip code"},
    "bad pattern": {"type": "string", "pattern": "("},
    "far away": {"$ref": "https://example.com/schema"},
    "too deep": nested(40),
    "too wide": {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(3000)}},
    "too long": {"type": "string", "description": "x" * 40_000},
    "nothing fits": {"allOf": [{"type": "string"}, {"type": "integer"}]},
    "refers to itself": ITSELF | {"$defs": {"a": ITSELF}},
    "has no end": ITSELF | {"$defs": {"a": {"type": "object", "properties": {"x": ITSELF}, "required": ["x"]}}},
    "too many optional properties": optional(550),
    "too large a pattern": {"type": "string", "pattern": "^((a{100}){100}){100}$"},
}


@pytest.mark.parametrize("name", BAD_SCHEMAS)
def test_a_schema_that_cannot_be_used_is_refused_before_anything_runs(server: Service, name):
    steps = server.metrics.steps._value.get()
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": BAD_SCHEMAS[name]}}
    found = server.post(CHAT, ASK | {"response_format": form})
    assert found.status == 400 and found.body["error"]["param"] == "response_format", found
    assert server.metrics.steps._value.get() == steps and server.worker.num_open == 0, "the engine must not find out"


@pytest.mark.parametrize("name", ["too many optional properties", "too large a pattern", "has no end"])
def test_a_form_that_fails_in_the_middle_of_an_answer_is_the_client_s_mistake(server: Service, name):
    parts = {"a": {"type": "string", "minLength": 3, "maxLength": 9}, "b": BAD_SCHEMAS[name]}
    named = BAD_SCHEMAS[name].get("$defs", {})
    schema = {"type": "object", "properties": parts, "required": ["a", "b"], "$defs": named}
    body = ASK | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    found = server.post(CHAT, body)
    assert found.status == 400, found
    assert len(found.body["error"]["message"]) < 300 and "\n" not in found.body["error"]["message"]
    events = read_events(server.post(CHAT, body | {"stream": True}).body)
    (error,) = [json.loads(event)["error"] for event in events if '"error"' in event]
    assert error["type"] == "invalid_request_error", error
    server.wait_until_idle()
    assert choice_of(server.post(CHAT, ASK | AS_TOWN))


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "perhaps"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
    ],
)
def test_what_is_wrong_with_a_form_is_said_by_name(server: Service, more, param):
    found = server.post(CHAT, ASK | more)
    assert found.status == 400 and found.body["error"]["param"] == param, found


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


def test_prompts_are_the_same_for_honest_messages_with_the_tools_in_the_system_message():
    text = tokenizer().decode(tokenizer().encode_chat(ASK["messages"], TOOLS), skip_special=False)
    assert text.startswith("<|im_start|>system\nYou may call these functions:") and '"name": "build"' in text


# ---------------------------------------------------------------- stop ids, and a model without numbers, beside others


def ids_that_begin(text: str) -> list[int]:
    """The tokens with which `text` may begin."""
    return [i for i, piece in enumerate(tokenizer().token_bytes) if piece and text.encode().startswith(piece)]


def beside(service: Service, body) -> tuple:
    """Post the body while another answer runs. Return what it got, after a check that the other is a lone one's."""
    prompt = [5, 6, 7]
    other = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "return_token_ids": True}

    async def both():
        return await asyncio.gather(
            asyncio.to_thread(service.post, "/v1/completions", other), asyncio.to_thread(service.post, CHAT, body)
        )

    running, found = asyncio.run(both())
    assert running.status == 200, running
    assert running.body["choices"][0]["token_ids"] == greedy(tuple(prompt), 40), "another request's answer has changed"
    return found


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_form_wins_over_min_tokens_and_no_other_answer_suffers(server: Service, temperature):
    schema = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["a"]}}}}
    stops = ids_that_begin('"a"')
    found = choice_of(
        beside(server, ASK | schema | {"temperature": temperature, "min_tokens": 1, "stop_token_ids": stops})
    )
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
