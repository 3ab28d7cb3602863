"""Lesson 6. Tools for chat templates that do not support them: they are described in the system message.

If the template takes no system message either, the user's first message describes them.

The form is Hermes', which Qwen's own templates use: tools as JSON inside <tools>, a call inside <tool_call>, and its
result inside <tool_response>, in a user's turn.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mini_engine.text.chat_messages import text_of

Message = Mapping[str, Any]

CALL_MARKS = ("<tool_call>", "</tool_call>")
ABOUT_TOOLS = """You may call these functions:
<tools>
{tools}
</tools>
To call one, write its name and arguments as JSON:
<tool_call>
{{"name": "…", "arguments": {{…}}}}
</tool_call>"""


def tools_as_text(messages: Sequence[Message], tools: Sequence[Message], takes_system: bool) -> list[Message]:
    """Return the messages with the tools described in the system message, or else in the user's first.

    Args:
        takes_system: the template takes a system message.
    """
    about = ABOUT_TOOLS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages and messages[0].get("role") == "system":
        first = messages[0]
        return [{**first, "content": f"{text_of(first['content'])}\n\n{about}"}, *messages[1:]]
    at = next((index for index, message in enumerate(messages) if message.get("role") == "user"), None)
    if at is None or takes_system:
        return [{"role": "system", "content": about}, *messages]
    asked = messages[at]
    told = {**asked, "content": f"{about}\n\n{text_of(asked['content'])}"}
    return [*messages[:at], told, *messages[at + 1 :]]


def calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with calls and their results written into the text."""
    return [_with_calls_as_text(message) for message in messages]


def call_as_text(call: Mapping[str, Any]) -> str:
    """Return a call in the form in which the assistant wrote it."""
    function = call.get("function", call)
    name, arguments = (json.dumps(function[key], ensure_ascii=False) for key in ("name", "arguments"))
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def _with_calls_as_text(message: Message) -> Message:
    if message.get("role") == "tool":
        return {
            **message,
            "role": "user",
            "content": f"<tool_response>\n{text_of(message['content'])}\n</tool_response>",
        }
    if not (calls := message.get("tool_calls")):
        return message
    parts = [text_of(message["content"]), *map(call_as_text, calls)]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return rest | {"content": "\n".join(part for part in parts if part)}
