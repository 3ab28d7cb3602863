"""Lesson 6. What a caller may pass as a prompt: text, token ids, a conversation, or lists of these."""

from collections.abc import Mapping, Sequence
from typing import TypeGuard

from mini_engine.errors import UserError

Message = Mapping[str, str]
Prompt = str | Sequence[int]

WHAT_PROMPTS_ARE = "give text or a list of token ids, or a list of these"


def is_sequence(value: object) -> TypeGuard[Sequence]:
    """Whether `value` is a list, a tuple or the like, but not text or bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def is_conversation(prompt: object) -> bool:
    """Whether a prompt is a list of messages rather than of token ids."""
    return is_sequence(prompt) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def listed(prompts: object) -> list:
    """Return one prompt as a list of one, many as a list. UserError if it is neither."""
    if isinstance(prompts, str) or (is_sequence(prompts) and len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]
    if not is_sequence(prompts):
        raise UserError(f"prompts is of type {type(prompts).__name__}; {WHAT_PROMPTS_ARE}", param="prompt")
    return list(prompts)


def checked_ids(prompt: object) -> list[int]:
    """Return a prompt of token ids as a list. UserError if it is anything else."""
    if not is_sequence(prompt):
        raise UserError(f"a prompt is of type {type(prompt).__name__}; {WHAT_PROMPTS_ARE}", param="prompt")
    strays = [part for part in prompt if not isinstance(part, int) or isinstance(part, bool)]
    if strays:
        hint = "use chat for messages" if isinstance(strays[0], Mapping) else WHAT_PROMPTS_ARE
        raise UserError(f"a prompt holds {strays[0]!r}, of type {type(strays[0]).__name__}; {hint}", param="prompt")
    return list(prompt)


def checked_messages(conversation: object) -> list[dict[str, str]]:
    """Return a conversation as a list of dicts. UserError unless each has `role` and `content`, both strings."""
    if not is_sequence(conversation) or not conversation or not all(map(_is_message, conversation)):
        raise UserError(
            f"a conversation is {conversation!r}; give a list of dicts with role and content, both strings",
            param="messages",
        )
    return [dict(message) for message in conversation]


def _is_message(part: object) -> bool:
    return isinstance(part, Mapping) and all(isinstance(part.get(key), str) for key in ("role", "content"))
