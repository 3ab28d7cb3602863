"""Lesson 7. Turns prompts into token ids, off the event loop. A prompt that is far too long is not tokenized.

The tokenizer releases Python's lock while it works (`Tokenizer.encode`), so other threads keep running.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mini_engine.base.errors import TooLong, UserError
from mini_engine.engine.worker import ModelLimits
from mini_engine.server.protocol import Conversation, Prompt
from mini_engine.text.tokenizer import Tokenizer


class PromptEncoder:
    """Encodes prompts one after another: the tokenizer is not thread-safe.

    Args:
        variables: the default variables of chat templates; a request's own take precedence.

    Attributes:
        max_bytes: the bytes of text that fit if every position held the longest token. More can never fit.
    """

    def __init__(self, tokenizer: Tokenizer, limits: ModelLimits, variables: Mapping[str, Any]) -> None:
        self.tokenizer, self.limits, self.variables = tokenizer, limits, variables
        self.max_bytes = limits.max_model_len * max(map(len, tokenizer.token_bytes))
        self.thread = ThreadPoolExecutor(1, "tokenizer")

    async def encode(self, prompt: Prompt) -> Sequence[int]:
        """Return the token ids of a text or a conversation; ids are returned as given.

        Raises:
            UserError: the prompt is empty or far too long (TooLong), or the chat template refuses it.
        """
        if isinstance(prompt, Conversation):
            messages, tools, variables = prompt
            given = messages, tools, {**self.variables, **variables}
            return await self._run(self.tokenizer.encode_chat, *given, self.check)
        if isinstance(prompt, str):
            self.check(prompt)
            prompt = await self._run(self.tokenizer.encode_prompt, prompt)
        if not prompt:
            raise UserError("the prompt is empty; give at least one token", param="prompt")
        return prompt

    def check(self, text: str) -> None:
        """Raise TooLong if this text can never fit, however long its tokens are."""
        if (size := len(text.encode("utf-8", errors="surrogatepass"))) > self.max_bytes:
            raise TooLong(
                f"the prompt has {size} bytes of text, too many for the model's "
                f"{self.limits.max_model_len} positions; shorten it"
            )

    async def _run(self, work: Callable[..., list[int]], *given: Any) -> list[int]:
        return await asyncio.get_running_loop().run_in_executor(self.thread, work, *given)
