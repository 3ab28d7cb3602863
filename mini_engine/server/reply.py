"""Lesson 7. Answers in OpenAI's two reply formats, whole or in chunks, and their usage."""

import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, field

from mini_engine.engine.answer import TextDelta
from mini_engine.engine.jobs import Answers
from mini_engine.engine.request import FinishReason
from mini_engine.server.errors import ApiError
from mini_engine.server.json_text import JsonObject, written
from mini_engine.server.protocol import Sampling
from mini_engine.server.reply_formats import CompletionFormat, Scored
from mini_engine.server.sse import EventStream
from mini_engine.text.tokenizer import Tokenizer


@dataclass
class AnswerTokens:
    """The tokens of one answer, as far as its deltas have been read.

    num_cached_tokens: tokens of the prompt that were found in the prefix cache (lesson 8).
    """

    prompt_ids: Sequence[int]
    output_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0

    def add(self, delta: TextDelta) -> None:
        """Count the answer's next delta."""
        self.output_ids += delta.token_ids
        self.num_cached_tokens += delta.num_cached_tokens


def usage(answers: Sequence[AnswerTokens], n: int) -> JsonObject:
    """Return the token counts as OpenAI's `usage`. `answers`: n answers to the first prompt, then those to the next.

    A prompt counts once, however many answers it has, and so do its cached tokens: those of its first answer. Every
    token of an answer counts, including the last one, which is never fed back and so never gets KV.

    Returns:
        the four keys of "usage" on the lesson's page, under "Shapes".
    """
    prompts = answers[::n]
    prompt_tokens = sum(len(answer.prompt_ids) for answer in prompts)
    completion_tokens = sum(len(answer.output_ids) for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(answer.num_cached_tokens for answer in prompts)},
    }


def finish_reason(delta: TextDelta) -> str | None:
    """Return OpenAI's finish reason, "stop" or "length"; None while the answer goes on.

    Raises:
        ApiError: 500, the answer was aborted or failed, for which OpenAI has no finish reason. The message includes
            `delta.error`, if there is one.
    """
    if delta.finish_reason in (None, FinishReason.STOP, FinishReason.LENGTH):
        return delta.finish_reason
    raise ApiError(500, f"the engine could not finish this answer: {delta.error or delta.finish_reason}")


@dataclass
class Choice:
    """One of a reply's answers, as far as its deltas have been read.

    shape: takes its text and returns the parts to show.
    scored: tokens with logprobs that have not been sent yet; an echoed prompt's come first.
    num_sent: tokens of the answer that have been sent.
    """

    index: int
    tokens: AnswerTokens
    shape: CompletionFormat
    reason: str | None = None
    scored: list[Scored] = field(default_factory=list)
    num_sent: int = 0
    has_begun: bool = False

    def add(self, delta: TextDelta, wanted: Sampling, tokenizer: Tokenizer) -> str:
        """Take a delta and return its text, preceded by the prompt in the first one if the client wants an echo."""
        prompt_ids, opening = self.tokens.prompt_ids, ""
        if wanted.echo and not self.has_begun:
            opening = tokenizer.text_of(prompt_ids)
            if wanted.wanted_prompt_logprobs is not None:
                self.scored += zip(prompt_ids, [None, *delta.prompt_logprobs], strict=True)
        self.has_begun = True
        self.tokens.add(delta)
        if wanted.wanted_logprobs is not None:
            self.scored += zip(delta.token_ids, delta.logprobs, strict=True)
        return opening + delta.text

    def take_tokens(self, wanted: Sampling, tokenizer: Tokenizer) -> JsonObject:
        """Return the unsent tokens: their ids and logprobs, if the client asked for them."""
        token_ids = self.tokens.output_ids[self.num_sent :]
        self.num_sent += len(token_ids)
        found: JsonObject = {"logprobs": None}
        if wanted.wanted_logprobs is not None:
            found["logprobs"] = self.shape.logprobs(self.scored, tokenizer)
            self.scored = []
        return found | ({"token_ids": token_ids} if wanted.return_token_ids else {})


class Reply:
    """One HTTP response being written: `whole`, or in `chunks`.

    Args:
        shape: makes the shape of one answer, of completions or of chats.
        wanted: the client's request.
        model: the model's name.
        answers: `wanted.n` for each prompt.

    Attributes:
        counts: every chunk has the usage so far.
        events: the stream that sends the chunks.
        form_param: the parameter to name if the answer cannot go on in the requested output format.
    """

    events = EventStream
    form_param: str | None = None

    def __init__(self, shape: Callable[[], CompletionFormat], wanted: Sampling, model: str, answers: Answers) -> None:
        self.wanted, self.answers = wanted, answers
        self.tokenizer = answers.tokenizer
        self.counts = wanted.stream_options.continuous_usage_stats
        self.choices = [Choice(i, AnswerTokens(job.prompt_ids), shape()) for i, job in enumerate(answers.jobs)]
        self.shape = self.choices[0].shape
        self.head = {
            "id": f"{self.shape.id_prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    async def whole(self) -> str:
        """The complete response body, as JSON. ApiError if an answer fails."""
        with closing(self.answers):
            async for index, delta in self.answers:
                self._read(self.choices[index], delta)
        return await written(sum(map(self._num_logprobs, self.choices)), self._whole)

    def _whole(self) -> JsonObject:
        choices = [self._choice(choice, choice.shape.message, choice.reason) for choice in self.choices]
        return self.head | {"object": self.shape.kind, "choices": choices, "usage": self._usage()}

    async def chunks(self) -> AsyncGenerator[str, None]:
        """The response in chunks of JSON. ApiError if an answer fails."""
        with closing(self.answers):
            if (opening := self.shape.opening) is not None:
                for choice in self.choices:
                    yield await self._chunk(choice, opening)
            async with aclosing(self.answers.__aiter__()) as deltas:
                async for index, delta in deltas:
                    choice = self.choices[index]
                    said = self._read(choice, delta)
                    if any(said.values()) or choice.reason or self.tells_tokens:
                        yield await self._chunk(choice, said, choice.reason)
            if self.wanted.stream_options.include_usage:
                yield await written(0, lambda: self._chunk_of([], self._usage()))

    def _read(self, choice: Choice, delta: TextDelta) -> JsonObject:
        """Read a delta; return its addition to the choice. ApiError if the answer failed."""
        if delta.finish_reason == FinishReason.GRAMMAR:
            raise ApiError(400, str(delta.error), param=self.form_param)
        reason = finish_reason(delta)
        if self.wanted.only_echo:  # the token was generated only to score the prompt: neither shown nor counted
            delta = delta._replace(text="", token_ids=[], logprobs=())
        text = choice.add(delta, self.wanted, self.tokenizer)
        said = choice.shape.push(text, reason is not None, reason == FinishReason.LENGTH)
        choice.reason = choice.shape.reason(reason)
        return said

    def _usage(self) -> JsonObject:
        """Return the usage of all answers, as far as they have been read."""
        return usage([choice.tokens for choice in self.choices], self.wanted.n)

    @property
    def tells_tokens(self) -> bool:
        """True if every token gets a chunk, even one that completes no character."""
        wanted = self.wanted
        return wanted.return_token_ids or self.counts or wanted.wanted_logprobs is not None

    def _choice(self, choice: Choice, said: JsonObject, reason: str | None) -> JsonObject:
        tokens = choice.take_tokens(self.wanted, self.tokenizer)
        return {"index": choice.index, **said, **tokens, "finish_reason": reason}

    async def _chunk(self, choice: Choice, said: JsonObject, reason: str | None = None) -> str:
        return await written(self._num_logprobs(choice), lambda: self._chunk_of([self._choice(choice, said, reason)]))

    def _chunk_of(self, choices: list[JsonObject], used: JsonObject | None = None) -> JsonObject:
        used = used or (self._usage() if self.counts else None)
        told = self.counts or self.wanted.stream_options.include_usage
        return self.head | {"object": self.shape.chunk_kind, "choices": choices} | ({"usage": used} if told else {})

    def _num_logprobs(self, choice: Choice) -> int:
        """Return the number of unsent log probabilities of a choice."""
        return len(choice.scored) * (1 + (self.wanted.wanted_logprobs or 0))
