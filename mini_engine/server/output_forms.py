"""Lesson 7. The form that an answer must have, as a grammar for llguidance: JSON that fits a schema, and tool calls.

A call is written as Qwen's models write it, so the same text can be read back from any of them:

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

JSON has one space after a comma and a colon and none elsewhere: a model that knows no better could otherwise go on
writing spaces until its tokens run out.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from mini_engine.errors import UserError
from mini_engine.server.schemas import check_schema, closed

JsonObject = dict[str, Any]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_TOGETHER = 2**16  # characters of all schemas of a request
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
TEXT = r"TEXT: /(.|\n)*/"


def call_prefix(name: str) -> str:
    """What a call begins with, up to its arguments."""
    return f'{OPEN}\n{{"name": {json.dumps(name)}, "arguments": '


CALL_END = f"}}\n{CLOSE}"


@dataclass(frozen=True)
class OutputForm:
    """What an answer must look like.

    schema: the JSON schema that the text fits; None for any text.
    functions: the JSON schema of each function's arguments, by its name.
    may_say: the answer may be text without a call.
    several: the answer may have more than one call.
    """

    schema: JsonObject | None = None
    functions: dict[str, JsonObject] = field(default_factory=dict)
    may_say: bool = True
    several: bool = False

    def check(self) -> None:
        """Raise UserError if a schema is too large to be compiled in a moment."""
        schemas = {"tools": list(self.functions.values()), "response_format": [self.schema] if self.schema else []}
        for param, several in schemas.items():
            for schema in several:
                check_schema(schema, param)
        size = len(json.dumps(list(schemas.values())))
        if size > MAX_TOGETHER:
            raise UserError(f"the schemas have {size} characters together, more than {MAX_TOGETHER}")

    @property
    def openings(self) -> list[str]:
        """Texts that an answer may begin with, one before each schema: "" before that of the text itself."""
        calls = [call_prefix(name) for name in self.functions]
        return [*calls, ""] if self.may_say else calls

    def grammar(self) -> str:
        """The grammar in llguidance's dialect of Lark."""
        calls = [
            f"call_{index}: {quoted(call_prefix(name).removeprefix(OPEN))} {as_json(schema)} {quoted(CALL_END)}"
            for index, (name, schema) in enumerate(self.functions.items())
        ]
        call = " | ".join(f"call_{index}" for index in range(len(calls)))
        return "\n".join(["%llguidance {}", *self._start(), f"call: {call}" if call else "", *calls])

    def _start(self) -> list[str]:
        begin = quoted(OPEN)
        if not self.functions:
            return [f"start: {as_json(self.schema or {})}"]
        calls = f"{begin} call" + (rf' ("\n" {begin} call)*' if self.several else "")
        if not self.may_say:
            return [f"start: {calls}"]
        if self.schema is not None:
            return [f"start: {as_json(self.schema)} | {calls}"]
        more = "*" if self.several else "?"
        return [f"start: (said call){more} TEXT", f"said[lazy]: TEXT {begin}", TEXT]


def as_json(schema: JsonObject) -> str:
    """The rule for JSON that fits the schema and has no properties but those it names."""
    return "%json " + json.dumps(closed(schema) | {"x-guidance": SPACING})


def quoted(text: str) -> str:
    """A text as a grammar's constant."""
    return json.dumps(text, ensure_ascii=False)
