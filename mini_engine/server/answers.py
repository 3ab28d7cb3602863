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

    A prompt counts once, however many answers it has, and so do its cached tokens: those that its first answer found.
    Every token of an answer counts, including the last one, which is never fed back and so never gets KV.

    Returns:
        the four keys of "usage" on the lesson's page, under "Shapes".
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
        ApiError: 500, the answer was aborted or failed, for which there is no such word. Its message has `delta.error`,
            where there is one.
    """
    if delta.finish_reason in (None, FinishReason.STOP, FinishReason.LENGTH):
        return delta.finish_reason
    raise ApiError(500, f"the engine could not finish this answer: {delta.error or delta.finish_reason}")


@dataclass
class Choice:
    """One of a reply's answers. `told` tokens and `offset` characters of it have been sent.

    reader: takes its text and returns what to show.
    opened: the first text has been shown; an echoed prompt goes before it. prompt_told: so have the prompt's logprobs.
    """

    index: int
    request: Request
    reader: Any
    reason: str | None = None
    told: int = 0
    offset: int = 0
    opened: bool = False
    prompt_told: bool = False

    def text_of(self, delta: TextDelta, wanted: Sampling, tokenizer: Tokenizer) -> str:
        """What a delta adds to the text: its own, after the prompt if the client wants that echoed."""
        opening = tokenizer.text_of(self.request.prompt_ids) if wanted.wants_echo and not self.opened else ""
        self.opened = True
        return opening + ("" if wanted.only_echo else delta.text)

    def tokens(
        self, token_ids: Sequence[int], wanted: Sampling, response_format: ResponseFormat, tokenizer: Tokenizer
    ) -> JsonObject:
        """The answer's next tokens: their ids and logprobs, if the client asked for them."""
        start, self.told = self.told, self.told + len(token_ids)
        found: JsonObject = {"logprobs": None}
        if wanted.wanted_logprobs is not None:
            pairs: list[tuple[int, TokenLogprobs | None]]
            pairs = [*zip(token_ids, self.request.logprobs[start : self.told], strict=True)]
            if wanted.wanted_prompt_logprobs is not None and not self.prompt_told:
                scores: list[TokenLogprobs | None] = [None, *self.request.prompt_logprobs]
                pairs = [*zip(self.request.prompt_ids, scores, strict=True), *pairs]
                self.prompt_told = True
            found["logprobs"] = response_format.logprobs([self._next(*pair, tokenizer) for pair in pairs], tokenizer)
        return found | ({"token_ids": list(token_ids)} if wanted.return_token_ids else {})

    def _next(self, token_id: int, logprobs: TokenLogprobs | None, tokenizer: Tokenizer) -> TokenLogprob:
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
        self.choices = [
            Choice(index, request, response_format.reader()) for index, request in enumerate(answers.requests)
        ]
        self.head = {
            "id": f"{response_format.id_prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    async def whole(self) -> JsonObject:
        """The complete response body."""
        with closing(self.answers):
            async for index, delta in self.answers:
                self._read(self.choices[index], delta)
        choices = [
            self._choice(choice, choice.reader.message, choice.reason, choice.request.output_ids)
            for choice in self.choices
        ]
        return self._body(self.response_format.kind, choices) | {"usage": self._usage()}

    async def chunks(self) -> AsyncGenerator[str, None]:
        """The response in chunks of JSON. A failure becomes the last chunk, since the status has already been sent."""
        with closing(self.answers):
            try:
                async with aclosing(self._chunks()) as chunks:
                    async for chunk in chunks:
                        yield chunk
            except ApiError as error:
                yield to_json(error.body)

    async def _chunks(self) -> AsyncGenerator[str, None]:
        if (opening := self.response_format.opening) is not None:
            for choice in self.choices:
                yield self._chunk([self._choice(choice, opening, None, ())])
        async with aclosing(self.answers.__aiter__()) as deltas:
            async for index, delta in deltas:
                choice = self.choices[index]
                said = self._read(choice, delta)
                if any(said.values()) or choice.reason or self.tells_tokens:
                    yield self._chunk([self._choice(choice, said, choice.reason, delta.token_ids)])
        if self.wanted.include_usage:
            yield self._chunk([], self._usage())

    def _read(self, choice: Choice, delta: TextDelta) -> JsonObject:
        """Read a delta; return what it adds to the choice. ApiError if the answer failed."""
        reason = finish_reason(delta)
        said = choice.reader.push(choice.text_of(delta, self.wanted, self.tokenizer), reason is not None)
        choice.reason = choice.reader.reason(reason)
        return said

    def _usage(self) -> JsonObject:
        """What all answers cost. A token that was generated only to score a prompt is not counted."""
        found = usage(self.answers.requests, self.wanted.n)
        if self.wanted.only_echo:
            found |= {"completion_tokens": 0, "total_tokens": found["prompt_tokens"]}
        return found

    def _usage_so_far(self) -> JsonObject:
        """The same, as far as it has been sent."""
        found, told = self._usage(), sum(choice.told for choice in self.choices)
        return found | {"completion_tokens": told, "total_tokens": found["prompt_tokens"] + told}

    @property
    def tells_tokens(self) -> bool:
        """Every token gets a chunk, even one that completes no character."""
        wanted = self.wanted
        return wanted.return_token_ids or wanted.continuous_usage or wanted.wanted_logprobs is not None

    def _choice(self, choice: Choice, said: JsonObject, reason: str | None, token_ids: Sequence[int]) -> JsonObject:
        shown = () if self.wanted.only_echo else token_ids
        tokens = choice.tokens(shown, self.wanted, self.response_format, self.tokenizer)
        return {"index": choice.index, **said, **tokens, "finish_reason": reason}

    def _chunk(self, choices: list[JsonObject], used: JsonObject | None = None) -> str:
        if self.wanted.continuous_usage:
            used = used or self._usage_so_far()
        asked = {"usage": used} if self.wanted.include_usage or self.wanted.continuous_usage else {}
        return to_json(self._body(self.response_format.chunk_kind, choices) | asked)

    def _body(self, kind: str, choices: list[JsonObject]) -> JsonObject:
        return self.head | {"object": kind, "choices": choices}


def to_json(data: JsonObject) -> str:
    """Compact JSON with non-ASCII letters as they are. Line breaks inside a text become \\n.

    Raises:
        ApiError: 500, a number is NaN or infinite, which JSON cannot say.
    """
    try:
        return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        raise ApiError(500, "the model's log probabilities are not finite numbers; are its weights broken?") from None
