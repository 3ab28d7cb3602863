"""Lesson 6. A conversation's messages as chat templates expect them.

A template sees every key of a message, as with transformers' `apply_chat_template`: also `name`, `tool_call_id` and
keys that only this template knows. Differences between clients are normalized first: arguments of calls come as a JSON
string or as an object, a content may be missing or in parts, and reasoning has three names.
"""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # Jinja is imported with the first conversation
    from mini_engine.text.chat_template import ChatTemplate

Message = Mapping[str, Any]

THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # templates read the first; gpt-oss' read the second


def as_expected(messages: Sequence[Message], template: "ChatTemplate") -> list[dict[str, Any]]:
    """Return the messages as `template` expects them. Keys keep their order; keys with the value None are left out."""
    return [one_as_expected(message, template) for message in messages]


def one_as_expected(message: Message, template: "ChatTemplate") -> dict[str, Any]:
    """Return one message as `template` expects it."""
    content, role = message.get("content") or "", message.get("role")
    changed = {
        "content": content if template.takes_parts else text_of(content),
        "role": "system" if role == "developer" and not template.takes_developer else role,
        "tool_calls": [with_arguments(call, template.takes_text) for call in message.get("tool_calls") or ()] or None,
    }
    found = {key: changed.get(key, value) for key, value in message.items()} | {"content": changed["content"]}
    found = {key: value for key, value in found.items() if value is not None}
    thought = next((found[name] for name in THOUGHTS if name in found), None)
    return found if thought is None else {"thinking": thought, **found, "reasoning_content": thought}


def text_of(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Return a content as one text: a string, or a list of parts."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def with_arguments(call: Mapping[str, Any], as_text: bool) -> dict[str, Any]:
    """Return a call with its arguments as an object, or as a JSON string."""
    if "function" in call:
        return {**call, "function": with_arguments(call["function"], as_text)}
    found = parsed(call.get("arguments"))
    return {**call, "arguments": json.dumps(found, ensure_ascii=False) if as_text else found}


def parsed(arguments: Any) -> Mapping[str, Any]:
    """Return arguments as an object: {} if the model wrote none, or no JSON object."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {}
    return arguments if isinstance(arguments, Mapping) else {}
