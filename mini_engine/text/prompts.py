"""Lesson 6. The forms of a prompt: text, token ids, a conversation, or lists of these."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from mini_engine.base.errors import UserError
from mini_engine.base.values import shown, whole

Message = Mapping[str, Any]
Prompt = str | Sequence[int]

NOT_VARIABLES = ("messages", "tools", "conversation", "chat_template", "tokenize", "continue_final_message")
SILENT = ("assistant", "tool")  # roles whose turns may lack content
WHAT_PROMPTS_ARE = "give text or a list of token ids, or a list of these"


def plain(value: object) -> object:
    """Return a NumPy array or a tensor as nested lists, everything else unchanged."""
    listed = getattr(value, "tolist", None)
    return listed() if callable(listed) else value


def is_sequence(value: object) -> TypeGuard[Sequence]:
    """Return True if `value` is a list, a tuple or the like, but not text or bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def is_conversation(prompt: object) -> bool:
    """Return True if a prompt is a list of messages rather than of token ids."""
    return is_sequence(prompt) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def listed(prompts: object) -> list:
    """Return one prompt as a list of one, several as a list. UserError if it is neither."""
    prompts = plain(prompts)
    if isinstance(prompts, str) or (is_sequence(prompts) and len(prompts) > 0 and whole(prompts[0]) is not None):
        return [prompts]
    if not is_sequence(prompts):
        raise UserError(f"prompts is of type {type(prompts).__name__}; {WHAT_PROMPTS_ARE}", param="prompt")
    return list(prompts)


def checked_ids(prompt: object) -> list[int]:
    """Return a prompt of token ids as a list. UserError if it is anything else."""
    prompt = plain(prompt)
    if not is_sequence(prompt):
        raise UserError(f"a prompt is of type {type(prompt).__name__}; {WHAT_PROMPTS_ARE}", param="prompt")
    ids = [number for part in prompt if (number := whole(part)) is not None]
    if len(ids) < len(prompt):
        stray = next(part for part in prompt if whole(part) is None)
        hint = "use chat for messages" if isinstance(stray, Mapping) else WHAT_PROMPTS_ARE
        raise UserError(f"a prompt holds {shown(stray)}, of type {type(stray).__name__}; {hint}", param="prompt")
    return ids


def checked_messages(conversation: object) -> list[dict[str, Any]]:
    """Return a conversation as a list of dicts. UserError unless each has `role` and `content`, and calls are calls.

    The content is a string or a list of text parts; an assistant's or a tool's may be missing.
    """
    if not is_sequence(conversation) or not conversation or not all(map(_is_message, conversation)):
        raise UserError(
            f"a conversation is {shown(conversation)}; give a list of dicts with role and content, text or text parts",
            param="messages",
        )
    return [dict(message) for message in conversation]


def _is_message(part: object) -> bool:
    if not isinstance(part, Mapping) or not isinstance(part.get("role"), str):
        return False
    content, calls = part.get("content"), part.get("tool_calls")
    is_said = part["role"] in SILENT if content is None else isinstance(content, str) or all_of(content, _is_text)
    return is_said and (calls is None or all_of(calls, _is_call))


def all_of(value: object, holds: Callable[[object], bool]) -> bool:
    """Return True if `value` is a sequence and `holds` is true of every item."""
    return is_sequence(value) and all(map(holds, value))


def _is_text(part: object) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def _is_call(call: object) -> bool:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def checked_tools(tools: object) -> list[Mapping[str, Any]]:
    """Return tools as a list. UserError unless each is a dict in OpenAI's form."""
    if tools is not None and not all_of(tools, lambda tool: isinstance(tool, Mapping)):
        raise UserError(
            f'tools is {shown(tools)}; give a list of dicts such as {{"type": "function", "function": {{…}}}}',
            param="tools",
        )
    return list(tools) if is_sequence(tools) else []


def checked_variables(variables: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a template's variables as a dict. UserError if that is impossible, or one has the name of an argument."""
    if not isinstance(variables, Mapping | None):
        raise UserError(
            f'chat_template_kwargs is {shown(variables)}; give names and values, as in {{"enable_thinking": false}}',
            param="chat_template_kwargs",
        )
    taken = next((name for name in variables or () if name in NOT_VARIABLES), None)
    if taken is not None:
        raise UserError(
            f"chat_template_kwargs sets {taken!r}, which is not a template variable; leave it out",
            param="chat_template_kwargs",
        )
    return dict(variables or {})
