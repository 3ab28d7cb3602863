"""Course machinery. Chats in the Qwen3 style: turns between <|im_start|> and <|im_end|>, some with a system prompt."""

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"


def render(messages: list[dict[str, str]], add_generation_prompt: bool = False) -> str:
    """Render the messages as the model's chat template does, without the template engine."""
    turns = [f"{TURN_START}{m['role']}\n{m['content']}{TURN_END}\n" for m in messages]
    return "".join(turns) + (f"{TURN_START}assistant\n" if add_generation_prompt else "")


def ask(question: str, system: str | None = None) -> str:
    """Return the text of a chat with one question, up to the assistant's answer."""
    head = [{"role": "system", "content": system}] if system else []
    return render([*head, {"role": "user", "content": question}], add_generation_prompt=True)
