"""Lesson 7. Reads tool calls from an answer's text as it arrives, in the form of `output_forms`."""

import json
import re
import secrets

from mini_engine.grammars.output_forms import CALL_END, OPEN
from mini_engine.server.json_text import JsonObject
from mini_engine.server.reply_formats import ChatFormat

HEAD = f'{OPEN}\n{{"name": "'
BEGIN = re.compile(re.escape(OPEN) + r'\n\{"name": ("(?:[^"\\]|\\.)*"), "arguments": ')


class CallReader(ChatFormat):
    """`/v1/chat/completions` with tools: splits one answer into text and calls.

    Text that may be the beginning of a call is held back.

    Args:
        may_say: the answer may be text; otherwise any text is the beginning of a call that was cut off.

    Attributes:
        text: everything outside calls. calls: those begun so far; their arguments are JSON strings.
    """

    def __init__(self, may_say: bool = True) -> None:
        super().__init__()
        self.may_say = may_say
        self.calls: list[JsonObject] = []
        self._rest = ""
        self._in_call = self._is_cut = False

    def push(self, text: str, ended: bool = False, cut: bool = False) -> JsonObject:
        """Take the next text; return the addition to the assistant's turn. A cut beginning of a call is not shown."""
        self._rest += text
        said, changes = self._read()
        if ended and self._in_call and not self._is_whole():
            changes += self._tell(self._rest)  # held back in case it is the last brace of the arguments
            self._is_cut = not self._is_whole()
        elif ended and not self._in_call:
            self._is_cut = begins_a_call(self._rest)
            said, self._rest = said + ("" if cut else self._rest), ""
        if not self.may_say:
            said = ""
        delta = super().push(said)["delta"]
        return {"delta": delta | ({"tool_calls": changes} if changes else {})}

    def _read(self) -> tuple[str, list[JsonObject]]:
        """Take as much of the rest as is clear; return the text outside calls, and the additions to calls."""
        said, changes = "", []
        while True:
            if self._in_call:
                arguments, done = self._take_until(CALL_END)
                changes += self._tell(arguments)
                if not done:
                    return said, changes
                self._in_call = False
                continue
            shown, found = self._take_until(OPEN)
            said += shown if not self.calls else shown.lstrip()
            begin = BEGIN.match(OPEN + self._rest) if found else None
            if begin is None:
                self._rest = OPEN + self._rest if found else self._rest
                return said, changes
            self._rest = self._rest[begin.end() - len(OPEN) :]
            changes.append(self._begin(json.loads(begin.group(1))))
            self._in_call = True

    def _take_until(self, mark: str) -> tuple[str, bool]:
        """Take the text before `mark`, and the mark. If there is none, hold back its possible beginning."""
        before, found, after = self._rest.partition(mark)
        if found:
            self._rest = after
            return before, True
        kept = next((size for size in range(len(mark) - 1, 0, -1) if before.endswith(mark[:size])), 0)
        self._rest = before[len(before) - kept :]
        return before[: len(before) - kept], False

    def _begin(self, name: str) -> JsonObject:
        call = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": {"name": name, "arguments": ""}}
        self.calls.append(call)
        return {"index": len(self.calls) - 1, **call, "function": dict(call["function"])}

    def _tell(self, arguments: str) -> list[JsonObject]:
        if not arguments:
            return []
        self.calls[-1]["function"]["arguments"] += arguments
        return [{"index": len(self.calls) - 1, "function": {"arguments": arguments}}]

    @property
    def message(self) -> JsonObject:
        """The assistant's turn, with its calls."""
        turn: JsonObject = {"role": "assistant", "content": self.text}
        if self.calls:
            turn |= {"content": self.text or None, "tool_calls": self.calls}
        return {"message": turn}

    def reason(self, reason: str | None) -> str | None:
        """Return the finish reason, "tool_calls" if all calls are complete."""
        return "tool_calls" if reason == "stop" and self.calls and not self._is_cut else reason

    def _is_whole(self) -> bool:
        """Return True if the last call has all of its arguments."""
        try:
            json.loads(self.calls[-1]["function"]["arguments"])
        except (ValueError, RecursionError):
            return False
        return True


def begins_a_call(text: str) -> bool:
    """Return True if a text is the first part of a call, with its whole opening mark."""
    return text.startswith(OPEN) and (text.startswith(HEAD) or HEAD.startswith(text))
