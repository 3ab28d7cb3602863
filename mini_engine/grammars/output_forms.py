"""Lesson 7. The output form of an answer, its text and its tool calls, as a grammar for llguidance.

A call is written as Qwen's models write it, so calls of any of them can be read back:

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

JSON has one space after a comma and a colon and none elsewhere: otherwise a weak model could keep writing spaces until
it runs out of tokens.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mini_engine.base.errors import UserError
from mini_engine.grammars.schemas import JsonObject, check_schema, closed, named
from mini_engine.grammars.tool_schemas import ANY_OBJECT, bounded, of_object
from mini_engine.text.tool_messages import CALL_MARKS

OPEN, CLOSE = CALL_MARKS
MAX_TOGETHER = 2**16  # characters of all schemas of a request
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
LENIENT = {"lenient": True, "coerce_one_of": True}  # ignore keywords that llguidance does not support
TEXT = r"TEXT: /(.|\n)*/"


def call_prefix(name: str) -> str:
    """Return the beginning of a call, up to its arguments."""
    return f'{OPEN}\n{{"name": {json.dumps(name)}, "arguments": '


CALL_END = f"}}\n{CLOSE}"


@dataclass(frozen=True)
class OutputForm:
    """The output form of an answer.

    schema, regex, choices: the JSON schema or regular expression that the text must match, or the texts to choose from;
        without these, any text.
    functions: the JSON schema of each function's arguments, by name. Enforced as far as llguidance supports it.
    may_say: the answer may be text without a call.
    several: the answer may have more than one call.
    param: the request's parameter that asks for the text's form.
    """

    schema: JsonObject | None = None
    functions: dict[str, JsonObject] = field(default_factory=dict)
    may_say: bool = True
    several: bool = False
    regex: str | None = None
    choices: Sequence[str] = ()
    param: str = "response_format"

    def check(self) -> None:
        """Raise UserError if a schema is too large to be compiled quickly."""
        if self.schema is not None:
            check_schema(self.schema, self.param)
        schemas = [self.schema, self.regex, self.choices, [*self.functions.values()]]
        if (size := len(json.dumps(schemas))) > MAX_TOGETHER:
            raise UserError(f"the schemas have {size} characters together, more than {MAX_TOGETHER}", param=self.param)

    def bounded(self) -> "OutputForm":
        """Return the same form, but functions whose schemas are too large take any object as arguments.

        Raises:
            UserError: the text's own schema is too large.
        """
        least = replace(self, functions=dict.fromkeys(self.functions, ANY_OBJECT))
        least.check()
        room = MAX_TOGETHER - len(json.dumps([self.schema, self.regex, self.choices, [*least.functions.values()]]))
        return replace(self, functions=bounded(self.functions, room))

    @property
    def text_rule(self) -> str:
        """The rule for the text; "" for any text."""
        if self.regex is not None:
            return as_regex(self.regex)
        return as_json(self.schema) if self.schema is not None else " | ".join(map(quoted, self.choices))

    @property
    def openings(self) -> list[str]:
        """Texts that an answer may begin with, one for each schema: "" for that of the text itself."""
        calls = [call_prefix(name) for name in self.functions]
        return [*calls, ""] if self.may_say else calls

    def grammar(self, marks: Mapping[str, int]) -> str:
        """Return the grammar in llguidance's dialect of Lark.

        Args:
            marks: the ids of OPEN and CLOSE, if they are control tokens of the tokenizer.
        """
        end = f"{quoted(CALL_END.removesuffix(CLOSE))} {spelled(CLOSE, marks)}"
        calls = [
            f"call_{index}: {quoted(call_prefix(name).removeprefix(OPEN))} {as_arguments(schema)} {end}"
            for index, (name, schema) in enumerate(self.functions.items())
        ]
        call = " | ".join(f"call_{index}" for index in range(len(calls)))
        return "\n".join(["%llguidance {}", *self._start(marks), f"call: {call}" if call else "", *calls])

    def _start(self, marks: Mapping[str, int]) -> list[str]:
        if not self.functions:
            return [f"start: {self.text_rule}"]
        begin = spelled(OPEN, marks)
        calls = f"{begin} call" + (rf' ("\n" {begin} call)*' if self.several else "")
        if not self.may_say:
            return [f"start: {calls}"]
        if self.text_rule:
            return [f"start: {self.text_rule} | {calls}"]
        more = "*" if self.several else "?"
        marked = f" | TEXT {begin}" if OPEN in marks else ""
        return [f"start: (begin call){more} TEXT", f"begin: said{marked}", f"said[lazy]: TEXT {quoted(OPEN)}", TEXT]


def as_json(schema: JsonObject, **more: bool) -> str:
    """Return the rule for JSON that fits the schema and has only the properties it names."""
    return "%json " + json.dumps(closed(named(schema)) | {"x-guidance": SPACING | more})


def as_regex(pattern: str) -> str:
    """Return the rule for a text that a regular expression matches as a whole."""
    return "/" + re.sub(r"\\.|[/\n\r]", _in_a_rule, pattern, flags=re.DOTALL) + "/"


def _in_a_rule(found: re.Match[str]) -> str:
    """Return a character's spelling inside a one-line rule, without backslashes that Python gives no meaning."""
    last = found[0][-1]
    plain = last in "<>" or not last.isascii()
    return {"/": r"\/", "\n": r"\n", "\r": r"\r"}.get(last, last if plain else found[0])


def as_arguments(schema: JsonObject) -> str:
    """Return the rule for a call's arguments: an object that fits the supported part of the schema."""
    return as_json(of_object(schema), **LENIENT)


def quoted(text: str) -> str:
    """Return a text as a constant of the grammar."""
    return json.dumps(text, ensure_ascii=False)


def spelled(text: str, marks: Mapping[str, int]) -> str:
    """Return a text as a constant of the grammar, or as its control token if it is one."""
    return f"<[{marks[text]}]>" if text in marks else quoted(text)
