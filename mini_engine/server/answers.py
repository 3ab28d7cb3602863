"""Lesson 7. Answers in OpenAI's two response formats, whole or in chunks, and their usage."""

import json
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import Any

from mini_engine.engine.answer import TextDelta
from mini_engine.engine.answers import Answers
from mini_engine.engine.request import FinishReason, Request
from mini_engine.engine.sampled import TokenLogprobs
from mini_engine.server.errors import ApiError
from mini_engine.server.protocol import Sampling
from mini_engine.server.response_formats import ResponseFormat, TokenLogprob, token_text
from mini_engine.tokenizer import Tokenizer

JsonObject = dict[str, Any]


def usage(requests: Sequence[Request], n: int) -> JsonObject:
    """What the answers cost, as OpenAI's `usage`. `requests`: n answers to the first prompt, then those to the next.

    A prompt counts once, however many answers it has. Every token of an answer counts, including the last one, which is
    never fed back and so never gets KV.
    """
    prompts = requests[::n]
    prompt_tokens = sum(len(request.prompt_ids) for request in prompts)
    completion_tokens = sum(len(request.output_ids) for request in requests)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(request.num_cached_tokens for request in prompts)},
    }


def finish_reason(delta: TextDelta) -> str | None:
    """OpenAI's word for why an answer ended, "stop" or "length"; None while it goes on.

    Raises:
        ApiError: 500, the answer was aborted or failed, for which there is no such word.
    """
    if delta.finish_reason in (None, FinishReason.STOP, FinishReason.LENGTH):
        return delta.finish_reason
    raise ApiError(500, f"the engine could not finish this answer: {delta.error or delta.finish_reason}")


@dataclass
class Choice:
    """One of a reply's answers. `told` tokens and `offset` characters of it have been sent."""

    index: int
    request: Request
    text: str = ""
    reason: str | None = None
    told: int = 0
    offset: int = 0

    def tokens(
        self, token_ids: Sequence[int], wanted: Sampling, response_format: ResponseFormat, tokenizer: Tokenizer
    ) -> JsonObject:
        """The answer's next tokens: their ids and logprobs, if the client asked for them."""
        start, self.told = self.told, self.told + len(token_ids)
        found: JsonObject = {"logprobs": None}
        if wanted.wanted_logprobs is not None:
            pairs = zip(token_ids, self.request.logprobs[start : self.told], strict=True)
            found["logprobs"] = response_format.logprobs([self._next(*pair, tokenizer) for pair in pairs], tokenizer)
        return found | ({"token_ids": list(token_ids)} if wanted.return_token_ids else {})

    def _next(self, token_id: int, logprobs: TokenLogprobs, tokenizer: Tokenizer) -> TokenLogprob:
        offset, self.offset = self.offset, self.offset + len(token_text(token_id, tokenizer))
        return TokenLogprob(token_id, logprobs, offset)


class Reply:
    """One HTTP response being written: `whole`, or in `chunks`.

    Args:
        response_format: the shape of completions or of chats.
        wanted: the client's request.
        model: the model's name.
        answers: `wanted.n` for each prompt.
    """

    def __init__(self, response_format: ResponseFormat, wanted: Sampling, model: str, answers: Answers) -> None:
        self.response_format, self.wanted, self.answers = response_format, wanted, answers
        self.tokenizer = answers.tokenizer
        self.choices = [Choice(index, request) for index, request in enumerate(answers.requests)]
        self.head = {
            "id": f"{response_format.id_prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    async def whole(self) -> JsonObject:
        """The complete response body."""
        with closing(self.answers):
            async for index, delta in self.answers:
                choice = self.choices[index]
                choice.text += delta.text
                choice.reason = finish_reason(delta)
        choices = [
            self._choice(choice, self.response_format.message(choice.text), choice.reason, choice.request.output_ids)
            for choice in self.choices
        ]
        return self._body(self.response_format.kind, choices) | {"usage": usage(self.answers.requests, self.wanted.n)}

    async def chunks(self) -> AsyncGenerator[str, None]:
        """The response in chunks of JSON. A failure becomes the last chunk, since the status has already been sent."""
        with closing(self.answers):
            if (opening := self.response_format.opening) is not None:
                for choice in self.choices:
                    yield self._chunk([self._choice(choice, opening, None, ())])
            async with aclosing(self.answers.__aiter__()) as deltas:
                async for index, delta in deltas:
                    try:
                        reason = finish_reason(delta)
                    except ApiError as error:
                        yield to_json(error.body)
                        return
                    if delta.text or reason or self.tells_tokens:
                        piece = self.response_format.piece(delta.text)
                        yield self._chunk([self._choice(self.choices[index], piece, reason, delta.token_ids)])
            if self.wanted.include_usage:
                yield self._chunk([], usage(self.answers.requests, self.wanted.n))

    @property
    def tells_tokens(self) -> bool:
        """Every token gets a chunk, even one that completes no character."""
        return self.wanted.return_token_ids or self.wanted.wanted_logprobs is not None

    def _choice(self, choice: Choice, said: JsonObject, reason: str | None, token_ids: Sequence[int]) -> JsonObject:
        tokens = choice.tokens(token_ids, self.wanted, self.response_format, self.tokenizer)
        return {"index": choice.index, **said, **tokens, "finish_reason": reason}

    def _chunk(self, choices: list[JsonObject], used: JsonObject | None = None) -> str:
        asked = {"usage": used} if self.wanted.include_usage else {}
        return to_json(self._body(self.response_format.chunk_kind, choices) | asked)

    def _body(self, kind: str, choices: list[JsonObject]) -> JsonObject:
        return self.head | {"object": kind, "choices": choices}


def to_json(data: JsonObject) -> str:
    """Compact JSON with non-ASCII letters as they are. Line breaks inside a text become \\n."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))
