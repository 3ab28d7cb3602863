"""Lesson 7. Answers in OpenAI's two forms, whole or in chunks, and their usage."""

import json
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, closing
from typing import Any

from mini_engine.engine.answer import TextDelta
from mini_engine.engine.request import FinishReason, Request
from mini_engine.engine.worker import Answers
from mini_engine.server.errors import ApiError
from mini_engine.server.forms import Form
from mini_engine.server.protocol import Sampling

JsonObject = dict[str, Any]


def usage(requests: Sequence[Request], n: int) -> JsonObject:
    """What the answers cost. `requests` holds the n answers of the first prompt, then those of the second, and so on.

    A prompt counts once however many answers it has. Every token of an answer counts, the last one too, though it is never
    fed back and so its KV is never computed.
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
    """OpenAI's word for why an answer ended: "stop" or "length"; None while it goes on.

    Raises:
        ApiError: it did not end well, and there is no such word.
    """
    if delta.finish_reason in (None, FinishReason.STOP, FinishReason.LENGTH):
        return delta.finish_reason
    raise ApiError(500, f"the engine could not finish this answer: {delta.error or delta.finish_reason}")


class Reply:
    """One HTTP answer on its way.

    Args:
        form: how completions, or chats, are written.
        wanted: the client's request.
        model: the model's name.
    """

    def __init__(self, form: Form, wanted: Sampling, model: str, answers: Answers) -> None:
        self.form, self.wanted, self.answers = form, wanted, answers
        self.head = {"id": f"{form.id_prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self.told = [0] * len(answers.requests)  # tokens of each answer whose ids and logprobs have been told

    async def whole(self) -> JsonObject:
        """All of it at once, when it is complete."""
        texts = [""] * len(self.answers.requests)
        reasons: list[str | None] = [None] * len(texts)
        with closing(self.answers):
            async for index, delta in self.answers:
                texts[index] += delta.text
                reasons[index] = finish_reason(delta)
        choices = [
            {"index": index, **self.form.message(text), "finish_reason": reason, **self._tokens(index)}
            for index, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        return self._body(self.form.kind, choices) | {"usage": usage(self.answers.requests, self.wanted.n)}

    async def chunks(self) -> AsyncGenerator[str, None]:
        """Piece by piece, each as JSON. A failure becomes the last piece: the status has long been sent."""
        with closing(self.answers):
            for index in range(len(self.told)) if self.form.opening else ():
                yield self._chunk(index, self.form.opening, None)
            async with aclosing(self.answers.__aiter__()) as deltas:
                async for index, delta in deltas:
                    try:
                        reason = finish_reason(delta)
                    except ApiError as error:
                        yield to_json(error.body)
                        return
                    if delta.text or reason or self.wanted.return_token_ids or self.form.logprobs_wanted(self.wanted):
                        yield self._chunk(index, self.form.piece(delta.text), reason, self._tokens(index, delta))
            if self.wanted.include_usage:
                tail = {"usage": usage(self.answers.requests, self.wanted.n)}
                yield to_json(self._body(self.form.chunk_kind, []) | tail)

    def _body(self, kind: str, choices: list[JsonObject]) -> JsonObject:
        return self.head | {"object": kind, "choices": choices}

    def _chunk(self, index: int, piece: JsonObject, reason: str | None, tokens: JsonObject | None = None) -> str:
        choice = {"index": index, **piece, "finish_reason": reason, **(tokens or {})}
        return to_json(self._body(self.form.chunk_kind, [choice]) | ({"usage": None} if self.wanted.include_usage else {}))

    def _tokens(self, index: int) -> JsonObject:
        """Ids and logprobs of the answer's tokens that have not been told yet, as far as the client asked for them."""
        request, start = self.answers.requests[index], self.told[index]
        self.told[index] = stop = start + self.fetched[index]
        self.fetched[index] = 0
        found = {"logprobs": None}
        if self.wanted.wanted_logprobs is not None:
            told = zip(request.output_ids[start:stop], request.logprobs[start:stop], strict=True)
            found["logprobs"] = self.form.logprobs([self._told(index, *token) for token in told], self.tokenizer)
        if self.wanted.return_token_ids:
            found["token_ids"] = request.output_ids[start:stop]
        return found

    def _told(self, index: int, token_id: int, logprobs: TokenLogprobs) -> ToldToken:
        offset = self.offsets[index]
        self.offsets[index] += len(token_text(token_id, self.tokenizer))
        return ToldToken(token_id, logprobs, offset)


def to_json(data: JsonObject) -> str:
    """Compact, with letters as they are. JSON writes line breaks inside texts as \\n."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))
