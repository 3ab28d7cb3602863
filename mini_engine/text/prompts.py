"""Lesson 6. The forms of a prompt: text, token ids, a conversation, or lists of these."""

from collections.abc import Mapping, Sequence
from typing import TypeGuard

from mini_engine.errors import UserError
from mini_engine.values import shown, whole

Message = Mapping[str, str]
Prompt = str | Sequence[int]

WHAT_PROMPTS_ARE = "give text or a list of token ids, or a list of these"


def plain(value: object) -> object:
    """Return a NumPy array or a tensor as nested lists, everything else as it is."""
    listed = getattr(value, "tolist", None)
    return listed() if callable(listed) else value


def is_sequence(value: object) -> TypeGuard[Sequence]:
    """Whether `value` is a list, a tuple or the like, but not text or bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def is_conversation(prompt: object) -> bool:
    """Whether a prompt is a list of messages rather than of token ids."""
    return is_sequence(prompt) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def listed(prompts: object) -> list:
    """Return one prompt as a list of one, many as a list. UserError if it is neither."""
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


def checked_messages(conversation: object) -> list[dict[str, str]]:
    """Return a conversation as a list of dicts. UserError unless each has `role` and `content`, both strings."""
    if not is_sequence(conversation) or not conversation or not all(map(_is_message, conversation)):
        raise UserError(
            f"a conversation is {shown(conversation)}; give a list of dicts with role and content, both strings",
            param="messages",
        )
    return [dict(message) for message in conversation]


def _is_message(part: object) -> bool:
    return isinstance(part, Mapping) and all(isinstance(part.get(key), str) for key in ("role", "content"))
