"""Lesson 7. Over HTTP, too, the template sees what the client sent; its refusal is the client's mistake."""

import json
from pathlib import Path
from typing import Any

import pytest

from mini_engine.base.errors import UserError
from mini_engine.cli import serve
from mini_engine.pocket import POCKET_DIR
from mini_engine.text.tokenizer import Tokenizer
from tests.shared.service import Service

pytestmark = pytest.mark.reference  # no task is about this

CHAT = "/v1/chat/completions"
HI = {"role": "user", "content": "Hi"}
TEMPLATE = """{%- for m in messages %}{{ m | tojson }}{% endfor %}{{ tools | tojson if tools }}
{%- if enable_thinking is defined %}{{ enable_thinking }}{% endif %}
{%- if messages[0].content == "forbidden" %}{{ raise_exception("no") }}{% endif %}
{%- if messages[0].content == "broken" %}{{ messages.nothing.at.all }}{% endif %}"""
CALL = {"id": "c1", "type": "function", "function": {"arguments": '{"b": 2, "a": 1}', "name": "add"}, "index": 0}
MARK = {"cache_control": {"type": "ephemeral"}}


def with_template(folder: Path) -> Tokenizer:
    for name in ("tokenizer.json", "config.json", "tokenizer_config.json"):
        (folder / name).write_bytes((POCKET_DIR / name).read_bytes())
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return Tokenizer(folder)


def SERVER(folder: Path) -> dict[str, Any]:
    return {"tokens": with_template(folder), "chat_template_kwargs": {"enable_thinking": "perhaps"}}


@pytest.fixture
def prompt(server: Service, added):
    """Ask, and return the prompt's text as the engine gets it."""

    def ask(path=CHAT, **body):
        found = server.post(path, {"max_tokens": 1} | body)
        assert found.status == 200, found
        return server.worker.tokenizer.text_of(added.pop()[1])

    return ask


TURNS = {
    "name": HI | {"name": "Ann"},
    "keys of its own": {"mood": {"good": [1, None]}} | HI | {"more": 1, "and": "more"},
    "call": {"role": "assistant", "tool_calls": [CALL], "content": "", "refusal": None, "annotations": []},
    "result": {"role": "tool", "tool_call_id": "c1", "content": "3"},
    "thought": {"role": "assistant", "content": "Yes", "reasoning": "Hm."},
    "developer": {"role": "developer", "content": "Be brief."},
    "parts": {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
}


@pytest.mark.parametrize("name", TURNS)
def test_the_template_sees_the_turn_as_it_was_sent(prompt, name):
    """In its order; without what is null, calls parsed, a thought by all its names."""
    turn = {key: value for key, value in TURNS[name].items() if value is not None}
    if name == "call":
        turn["tool_calls"] = [CALL | {"function": CALL["function"] | {"arguments": {"b": 2, "a": 1}}}]
    if name == "thought":
        turn = {"thinking": "Hm."} | turn | {"reasoning_content": "Hm."}
    assert prompt(messages=[TURNS[name]]) == json.dumps(turn) + "perhaps"


@pytest.mark.parametrize("arguments", ["", "{broken", "5", {}])
def test_arguments_that_are_no_object_are_served(prompt, arguments):
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    shown = prompt(messages=[HI, {"role": "assistant", "tool_calls": [call]}])
    assert '"arguments": {}' in shown and '"content": ""' in shown


@pytest.mark.parametrize("turn", [{"content": None}, {}, {"tool_calls": []}, {"content": None, "tool_calls": None}])
def test_an_assistant_may_say_nothing(prompt, turn):
    silent = {"role": "assistant", "content": ""}
    assert prompt(messages=[HI, {"role": "assistant"} | turn]) == prompt(messages=[HI, silent])


def test_marks_of_the_cache_are_not_shown(prompt):
    marked = {"role": "user", "content": [{"type": "text", "text": "Hi"} | MARK]} | MARK
    plain = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
    assert prompt(messages=[marked]) == prompt(messages=[plain])
    tool = {"type": "function", "function": {"name": "f"}}
    assert prompt(messages=[HI], tools=[tool | MARK]) == prompt(messages=[HI], tools=[tool])


def test_a_tool_is_shown_as_it_was_sent(prompt):
    function = {"parameters": {"type": "object", "properties": {}}, "name": "f", "strict": True}
    tool = {"function": function, "type": "function"}
    with_null = {**tool, "function": {**function, "description": None}}
    assert json.dumps([tool]) in prompt(messages=[HI], tools=[with_null])


def test_a_request_may_tell_the_template_more(prompt):
    assert prompt(messages=[HI], chat_template_kwargs={"enable_thinking": False}).endswith("}False")
    assert prompt(messages=[HI], chat_template_kwargs={"other": 1}).endswith("}perhaps"), "the server's own stay"
    assert prompt("/v1/responses", input="Hi", max_tokens=None, max_output_tokens=1).endswith("}perhaps")


@pytest.mark.parametrize("name", ["--chat-template-kwargs", "--default-chat-template-kwargs"])
def test_the_command_tells_every_request_s_template(options, name):
    assert serve.server_config(options()).chat_template_kwargs == {}
    found = serve.server_config(options(name, '{"enable_thinking": false}'))
    assert found.chat_template_kwargs == {"enable_thinking": False}
    with pytest.raises(UserError):
        serve.server_config(options(name, '{"messages": 1}'))


@pytest.mark.parametrize("content", ["forbidden", "broken"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_template_s_refusal_is_400(server: Service, content, stream):
    found = server.post(CHAT, {"messages": [{"role": "user", "content": content}], "stream": stream})
    assert (found.status, found.body["error"]["param"]) == (400, "messages"), found


@pytest.mark.parametrize("where", ["mood", "chat_template_kwargs", "arguments"])
def test_what_is_nested_too_deeply_is_refused(server: Service, where):
    deep = '{"a": ' * 900 + "1" + "}" * 900
    call = {"type": "function", "function": {"name": "f", "arguments": deep}}
    body = {
        "mood": f'{{"messages": [{{"role": "user", "content": "x", "mood": {deep}}}]}}',
        "chat_template_kwargs": f'{{"messages": [{{"role": "user", "content": "x"}}], "chat_template_kwargs": {deep}}}',
        "arguments": json.dumps({"messages": [HI, {"role": "assistant", "tool_calls": [call]}]}),
    }[where]
    assert server.post(CHAT, body.encode()).status == 400
