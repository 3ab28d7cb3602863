"""Lesson 7. Answers in OpenAI's Responses API: one object with a list of outputs, or a stream of typed events.

Here the list has one message, and the message one text. A stream opens the three, adds to the text, and closes them in
reverse order; each event that opens or closes an object contains all of it.
"""

import itertools
import json
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing, closing
from typing import Any

from starlette.types import Send

from mini_engine.engine.jobs import Answers
from mini_engine.server.errors import ApiError
from mini_engine.server.json_text import JsonObject, to_json
from mini_engine.server.protocol import Sampling
from mini_engine.server.reply import Reply
from mini_engine.server.reply_formats import ChatFormat
from mini_engine.server.responses_protocol import ResponsesRequest, TextOptions
from mini_engine.server.sse import EventStream, event

ECHOED = ("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "temperature", "tool_choice", "tools")
PLACE = {"output_index": 0, "content_index": 0}


class TypedEvents(EventStream):
    """Sends each event under its type's name. No `[DONE]` follows: the last event says how the response ended."""

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self.chunks) as chunks:
            async for chunk in chunks:
                name = f"event: {json.loads(chunk)['type']}\n".encode()
                await send({"type": "http.response.body", "body": name + event(chunk), "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class ResponsesReply(Reply):
    """One HTTP response being written: `whole`, or in `chunks`.

    Args:
        asked: the client's request. wanted: the same as a chat.
        model: the model's name.
        answers: the one answer.
    """

    events, form_param = TypedEvents, "text"

    def __init__(self, asked: ResponsesRequest, wanted: Sampling, model: str, answers: Answers) -> None:
        super().__init__(ChatFormat, wanted, model, answers)
        (self.choice,) = self.choices
        self.error: JsonObject | None = None
        self.item_id = f"msg_{secrets.token_hex(12)}"
        self.head = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": self.head["created"],
            "model": model,
            **asked.model_dump(include={*ECHOED, "top_p", "truncation"}),
            "text": {"format": (asked.text or TextOptions()).format.shown},
            "previous_response_id": None,
            "store": False,
        }
        used = answers.jobs[0].params
        self.head |= {"temperature": used.temperature, "top_p": used.top_p}

    @property
    def status(self) -> str:
        """The state of the response: "in_progress", then "completed", "incomplete" or "failed"."""
        if self.error is not None:
            return "failed"
        return {None: "in_progress", "length": "incomplete"}.get(self.choice.reason, "completed")

    async def chunks(self) -> AsyncGenerator[str, None]:
        """Yield the response as JSON events. A failure becomes the last one, since the status has already been sent."""
        numbers = itertools.count()
        with closing(self.answers):
            async with aclosing(self._events()) as events:
                async for kind, content in events:
                    yield to_json({"type": kind, "sequence_number": next(numbers), **content})

    async def _events(self) -> AsyncGenerator[tuple[str, JsonObject], None]:
        yield "response.created", {"response": self._whole()}
        yield "response.in_progress", {"response": self._whole()}
        yield "response.output_item.added", {"output_index": 0, "item": self._item() | {"content": []}}
        yield "response.content_part.added", self._place(part=self._part())
        try:
            async with aclosing(self.answers.__aiter__()) as deltas:
                async for _, delta in deltas:
                    self._read(self.choice, delta)
                    if delta.text:
                        yield "response.output_text.delta", self._place(delta=delta.text, logprobs=[])
        except ApiError as error:
            code = "server_error" if error.status_code >= 500 else "invalid_prompt"
            self.error = {"code": code, "message": error.detail}
        else:
            yield "response.output_text.done", self._place(text=self.choice.shape.text, logprobs=[])
            yield "response.content_part.done", self._place(part=self._part())
            yield "response.output_item.done", {"output_index": 0, "item": self._item()}
        yield f"response.{self.status}", {"response": self._whole()}

    def _whole(self) -> JsonObject:
        """Return the response in its current state."""
        begun = self.status != "in_progress"
        return self.head | {
            "status": self.status,
            "error": self.error,
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
            "output": [self._item()] if begun else [],
            "usage": self._usage() if begun else None,
        }

    def _item(self) -> JsonObject:
        status = "incomplete" if self.status == "failed" else self.status
        return {"id": self.item_id, "type": "message", "status": status, "role": "assistant", "content": [self._part()]}

    def _part(self) -> JsonObject:
        return {"type": "output_text", "text": self.choice.shape.text, "annotations": [], "logprobs": []}

    def _place(self, **content: Any) -> JsonObject:
        return {"item_id": self.item_id, **PLACE, **content}

    def _usage(self) -> JsonObject:
        """Return the usage, with this API's names."""
        found = super()._usage()
        return {
            "input_tokens": found["prompt_tokens"],
            "input_tokens_details": found["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": found["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": found["total_tokens"],
        }
