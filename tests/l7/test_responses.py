"""Lesson 7. The Responses API in its plain form, through OpenAI's own client: the answers of a chat by other names."""

import json

import pytest

from mini_engine.engine.answer import TextDelta
from mini_engine.engine.request import FinishReason
from tests.l7.service import Service, greedy, read_events, tokenizer
from tests.l7.test_structured import BAD_SCHEMAS

pytestmark = pytest.mark.reference  # no task is about this

PATH = "/v1/responses"
HI = {"role": "user", "content": "Hi"}
BRIEF = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="module")
def client(server):
    openai = pytest.importorskip("openai", reason="needs the openai client")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def text_of(messages, count: int = 12) -> str:
    """What the model answers to a chat."""
    return tokenizer().decode(greedy(tuple(tokenizer().encode_chat(messages)), count))


ASKED = dict(model="tiny", max_output_tokens=12, temperature=0)


def test_a_text_is_answered_as_a_chat_of_one_turn(client):
    found = client.responses.create(**ASKED, input="Hi", store=False)
    assert found.output_text == text_of([HI])
    assert found.status == "incomplete" and found.incomplete_details.reason == "max_output_tokens"
    assert (found.usage.output_tokens, found.usage.total_tokens) == (12, found.usage.input_tokens + 12)
    assert found.usage.input_tokens == len(tokenizer().encode_chat([HI]))


def test_instructions_are_the_system_message(client):
    found = client.responses.create(**ASKED, input=[HI], instructions="Be brief.")
    assert found.output_text == text_of([BRIEF, HI]) and found.instructions == "Be brief."


def test_an_answer_can_be_sent_back_as_a_turn(client):
    first = client.responses.create(**ASKED, input="Hi")
    parts = [{"type": "input_text", "text": "And "}, {"type": "input_text", "text": "now?"}]
    turns = [HI, *[item.model_dump() for item in first.output], {"role": "user", "content": parts}]
    found = client.responses.create(**ASKED, input=turns)
    chat = [HI, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "And now?"}]
    assert found.output_text == text_of(chat)


def test_a_stream_is_the_same_answer_in_typed_events(client):
    events = list(client.responses.create(**ASKED, input="Hi", stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert [event.sequence_number for event in events] == [*range(len(events))]
    text = text_of([HI])
    assert "".join(event.delta for event in events[4:-4]) == text == events[-4].text
    assert events[-1].response.output_text == text and events[-1].response.usage.output_tokens == 12
    assert events[0].response.usage is None and events[0].response.output == []
    with client.responses.stream(**ASKED, input="Hi") as stream:
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == text


def test_each_event_is_named_and_none_is_done(server: Service):
    body = {"input": "Hi", "max_output_tokens": 2, "temperature": 0, "stream": True}
    text = server.post(PATH, body).body
    names = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
    assert names == [json.loads(data)["type"] for data in read_events(text)] and "[DONE]" not in text


def test_an_answer_that_ends_by_itself_is_completed(server: Service, monkeypatch):
    from mini_engine.engine.answer import AnswerReader

    monkeypatch.setattr(AnswerReader, "next_delta", lambda self: TextDelta("Yes.", [1], FinishReason.STOP))
    found = server.post(PATH, {"input": "Hi"}).body
    assert (found["status"], found["incomplete_details"]) == ("completed", None)
    assert found["output"][0]["content"][0]["text"] == "Yes." and found["output"][0]["status"] == "completed"


DIGIT = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "name": "digit", "schema": DIGIT, "strict": True}


def test_an_answer_has_the_form_that_text_asks_for(client):
    asked = ASKED | {"max_output_tokens": 60, "input": "Hi", "text": {"format": FORM}}
    found = client.responses.create(**asked)
    assert [*json.loads(found.output_text)] == ["n"] and found.status == "completed"
    assert found.text.format.model_dump(by_alias=True, exclude_none=True)["schema"] == DIGIT
    with client.responses.stream(**asked) as stream:
        assert (
            "".join(event.delta for event in stream if event.type == "response.output_text.delta") == found.output_text
        )
    found = client.responses.create(**asked | {"text": {"format": {"type": "json_object"}}, "max_output_tokens": 5})
    assert found.output_text.startswith("{") and found.text.format.type == "json_object"


def test_an_answer_can_be_parsed_into_a_model(client):
    from pydantic import BaseModel

    class Digit(BaseModel):
        n: bool

    found = client.responses.parse(**ASKED | {"max_output_tokens": 60}, input="Hi", text_format=Digit)
    assert isinstance(found.output_parsed, Digit)


@pytest.mark.parametrize("stream", [False, True])
def test_a_form_that_cannot_be_had_is_refused(server: Service, stream):
    for schema in ({"not": {}}, {"type": "string", "pattern": "("}, 5):
        form = {"type": "json_schema", "name": "x", "schema": schema}
        found = server.post(PATH, {"input": "Hi", "text": {"format": form}, "stream": stream})
        assert (found.status, found.body["error"]["param"]) == (400, "text"), found


def test_a_form_that_fails_in_the_middle_of_an_answer_is_the_client_s_mistake(server: Service):
    parts = {"a": {"type": "string", "minLength": 3, "maxLength": 9}, "b": BAD_SCHEMAS["too large a pattern"]}
    form = {
        "type": "json_schema",
        "name": "x",
        "schema": {"type": "object", "properties": parts, "required": ["a", "b"]},
    }
    body = {"input": "Hi", "text": {"format": form}, "temperature": 0}
    found = server.post(PATH, body)
    assert (found.status, found.body["error"]["param"]) == (400, "text"), found
    last = json.loads(read_events(server.post(PATH, body | {"stream": True}).body)[-1])
    assert last["type"] == "response.failed" and last["response"]["error"]["code"] == "invalid_prompt"


def test_a_failure_in_a_stream_is_its_last_event(server: Service, monkeypatch):
    from mini_engine.engine.answer import AnswerReader

    def fails(self):
        raise RuntimeError("the roof")

    monkeypatch.setattr(AnswerReader, "next_delta", fails)
    last = json.loads(read_events(server.post(PATH, {"input": "Hi", "stream": True}).body)[-1])
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error" and "the roof" in last["response"]["error"]["message"]
    assert server.post(PATH, {"input": "Hi"}).status == 500


NEUTRAL = {
    "store": True,
    "background": False,
    "include": [],
    "metadata": {"a": "b"},
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "truncation": "disabled",
    "top_logprobs": 0,
    "service_tier": "auto",
    "stream_options": {"include_obfuscation": True},
    "user": "me",
    "reasoning": {"effort": "low", "summary": "auto", "generate_summary": None},
    "reasoning_effort": "minimal",
    "verbosity": "low",
    "request_id": "r7",
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_what_changes_nothing_is_accepted(server: Service, name):
    assert server.post(PATH, {"input": "Hi", "max_output_tokens": 1, name: NEUTRAL[name]}).status == 200


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"previous_response_id": "resp_1"}, "does not store responses"),
        ({"conversation": {"id": "conv_1"}}, "does not store responses"),
        ({"tools": [{"type": "web_search"}]}, "/v1/chat/completions"),
        ({"reasoning": {"speed": "high"}}, "reasoning.speed"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "schema"),
        ({"background": True}, "only False"),
        ({"input": []}, "give a text"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "1"}]}, "give a text"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"max_output_tokens": 10**6}, "positions"),
    ],
)
def test_what_is_not_there_is_refused_by_name(server: Service, more, words):
    found = server.post(PATH, {"input": "Hi"} | more)
    assert found.status == 400 and words in found.body["error"]["message"], found


def test_afterwards_no_block_is_held(server: Service):
    server.wait_until_idle()


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a": float("inf")}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"input": [HI] * 4096, "instructions": "Be brief."}, "input"),
    ],
    ids=["number", "infinite", "long", "many", "one turn too many"],
)
def test_what_would_break_an_answer_is_refused(server: Service, more, param):
    found = server.post(PATH, {"model": "tiny", "input": "Hi", "max_output_tokens": 2} | more)
    assert (found.status, found.body["error"]["param"]) == (400, param), found.body


def test_a_salt_keeps_prefixes_apart(server: Service, monkeypatch):
    seen, add = [], server.engine.add_request

    def note(*given):
        seen.append(given[-1])
        return add(*given)

    monkeypatch.setattr(server.engine, "add_request", note)
    for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b" * 10**5}):
        server.post(PATH, {"model": "tiny", "input": "Hi", "max_output_tokens": 2} | salt)
    assert len(set(seen)) == 3, "the salt reaches the engine"
    assert all(name is None or len(name) == 64 for name in seen), "cached blocks keep a digest, not what a client sent"
