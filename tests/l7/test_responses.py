"""Lesson 7. The Responses API in its plain form, through OpenAI's own client: the answers of a chat by other names."""

import json

import pytest

from mini_engine.engine.answer import TextDelta
from mini_engine.engine.request import FinishReason
from tests.l7.forms import DIGIT, is_digit
from tests.shared.service import Service, fail_once, greedy, read_events, tokenizer

pytestmark = pytest.mark.reference  # no task is about this

PATH = "/v1/responses"
HI = {"role": "user", "content": "Hi"}
BRIEF = {"role": "system", "content": "Be brief."}


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


def test_an_answer_that_ends_by_itself_is_completed(server: Service, monkeypatch):
    from mini_engine.engine.answer import AnswerReader

    monkeypatch.setattr(AnswerReader, "next_delta", lambda self: TextDelta("Yes.", [1], FinishReason.STOP))
    found = server.post(PATH, {"input": "Hi"}).body
    assert (found["status"], found["incomplete_details"]) == ("completed", None)
    assert found["output"][0]["content"][0]["text"] == "Yes." and found["output"][0]["status"] == "completed"


def test_an_answer_has_the_form_that_text_asks_for(client):
    form = {"type": "json_schema", "name": "digit", "schema": DIGIT | {"additionalProperties": False}, "strict": True}
    asked = ASKED | {"max_output_tokens": 60, "input": "Hi", "text": {"format": form}}
    found = client.responses.create(**asked)
    assert is_digit(found.output_text) and found.status == "completed"
    assert found.text.format.model_dump(by_alias=True, exclude_none=True)["schema"] == form["schema"]
    with client.responses.stream(**asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == found.output_text
    found = client.responses.create(**asked | {"text": {"format": {"type": "json_object"}}, "max_output_tokens": 5})
    assert found.output_text.startswith("{") and found.text.format.type == "json_object"


def test_a_failure_in_a_stream_is_its_last_event(server: Service):
    fail_once(server.engine.runner, "run", RuntimeError("the roof"))
    text = server.post(PATH, {"input": "Hi", "stream": True}).body
    names = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
    events = [json.loads(data) for data in read_events(text)]
    assert names == [event["type"] for event in events] and "[DONE]" not in text, "each event is named"
    last = events[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error" and "the roof" in last["response"]["error"]["message"]
    fail_once(server.engine.runner, "run", RuntimeError("the roof"))
    assert server.post(PATH, {"input": "Hi"}).status == 500


NEUTRAL = {
    "store": True, "background": False, "include": [], "metadata": {"a": "b"}, "tools": [], "tool_choice": "auto",
    "parallel_tool_calls": True, "previous_response_id": None, "truncation": "disabled", "top_logprobs": 0,
    "text": {"format": {"type": "text"}, "verbosity": "low"}, "service_tier": "auto", "user": "me",
    "stream_options": {"include_obfuscation": True}, "reasoning_effort": "minimal", "verbosity": "low",
    "reasoning": {"effort": "low", "summary": "auto", "generate_summary": None}, "request_id": "r7",
}  # fmt: skip


def test_what_changes_nothing_is_accepted(server: Service):
    asked = {"input": "Hi", "max_output_tokens": 4, "temperature": 0}
    plain, found = (server.post(PATH, body) for body in (asked, asked | NEUTRAL))
    assert found.status == 200, found
    assert found.body["output"][0]["content"] == plain.body["output"][0]["content"]


def test_a_salt_keeps_prefixes_apart(server: Service, added):
    for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b" * 10**5}):
        server.post(PATH, {"model": "tiny", "input": "Hi", "max_output_tokens": 2} | salt)
    seen = [given[4] for given in added]
    assert len(set(seen)) == 3, "the salt reaches the engine"
    assert all(name is None or len(name) == 64 for name in seen), "cached blocks keep a digest, not what a client sent"
