"""Course machinery. Chats in the Qwen3 style: turns between <|im_start|> and <|im_end|>, some with a system prompt."""

import random
from collections.abc import Callable

from scripts.pocket.stories import HEROES, favourite_first, tell_story

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a friendly teacher. Answer in one sentence.",
    "You are the pocket model. You know a few things and you say them plainly.",
    "Answer every question shortly and truly.",
    "You help students who learn about the KV cache.",
)
SYSTEM_SHARE = 0.4
Turn = tuple[str, str]


def render(messages: list[dict[str, str]], add_generation_prompt: bool = False) -> str:
    """Render the messages as CHAT_TEMPLATE does, without the template engine."""
    turns = [f"{TURN_START}{m['role']}\n{m['content']}{TURN_END}\n" for m in messages]
    return "".join(turns) + (f"{TURN_START}assistant\n" if add_generation_prompt else "")


def ask(question: str, system: str | None = None) -> str:
    """Return the text of a chat with one question, up to the assistant's answer."""
    head = [{"role": "system", "content": system}] if system else []
    return render([*head, {"role": "user", "content": question}], add_generation_prompt=True)


def chat_document(turns: list[Turn], chooser: random.Random) -> str:
    messages = []
    if chooser.random() < SYSTEM_SHARE:
        messages.append({"role": "system", "content": favourite_first(chooser, SYSTEM_PROMPTS)})
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return render(messages)


def story_turn(chooser: random.Random) -> Turn:
    hero = chooser.choice(list(HEROES))
    request = favourite_first(chooser, ["Tell me a story about {}.", "I would like a story about {}."])
    return request.format("an owl" if hero == "owl" else f"a {hero}"), tell_story(chooser, hero)


def group_into_chats(turns: list[Turn], chooser: random.Random, length: Callable[[random.Random], int]) -> list[str]:
    """Group shuffled turns into chats of `length(chooser)` turns each; every turn is used once."""
    turns = chooser.sample(turns, len(turns))
    chats = []
    while turns:
        count = length(chooser)
        chats.append(chat_document(turns[:count], chooser))
        turns = turns[count:]
    return chats
