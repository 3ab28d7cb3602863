"""Lesson 7. Turns prompts into token ids, off the event loop. A prompt that is far too long is not tokenized.

The tokenizer gives Python's lock back while it works (`Tokenizer.encode`), so the other threads go on.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from mini_engine.engine.worker import ModelLimits
from mini_engine.errors import TooLong, UserError
from mini_engine.server.protocol import Conversation, Prompt
from mini_engine.text.tokenizer import Tokenizer


class PromptEncoder:
    """Encodes prompts one after another: the tokenizer is not made for concurrent use.

    Args:
        variables: what chat templates are told, unless a request says otherwise.

    Attributes:
        max_bytes: what the longest tokens could hold in all of the model's positions. More can never fit.
    """

    def __init__(self, tokenizer: Tokenizer, limits: ModelLimits, variables: Mapping[str, Any]) -> None:
        self.tokenizer, self.limits, self.variables = tokenizer, limits, variables
        self.max_bytes = limits.max_model_len * max(map(len, tokenizer.token_bytes))
        self.thread = ThreadPoolExecutor(1, "tokenizer")

    async def encode(self, prompt: Prompt) -> Sequence[int]:
        """Token ids of a text or a conversation, or ids as given.

        Raises:
            UserError: the prompt is empty or far too long (TooLong), or the chat template refuses it.
        """
        if isinstance(prompt, Conversation):
            messages, tools, variables = prompt
            work = partial(self.tokenizer.encode_chat, messages, tools, {**self.variables, **variables})
            return await self._run(prompt, work)
        if isinstance(prompt, str):
            prompt = await self._run(prompt, partial(self.tokenizer.encode_prompt, prompt))
        if not prompt:
            raise UserError("the prompt is empty; give at least one token", param="prompt")
        return prompt

    async def _run(self, prompt: Prompt, work: Callable[[], list[int]]) -> list[int]:
        if (size := num_bytes(prompt)) > self.max_bytes:
            raise TooLong(
                f"the prompt has {size} bytes of text, too many for the model's "
                f"{self.limits.max_model_len} positions; shorten it"
            )
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)


def num_bytes(value: Any) -> int:
    """The bytes of all text in what JSON can hold, names included, as UTF-8."""
    size, left = 0, [value]
    while left:
        match left.pop():
            case str() as text:
                size += len(text.encode("utf-8", errors="surrogatepass"))
            case dict() as several:
                left += [*several, *several.values()]
            case list() | tuple() as several:
                left += several
    return size
