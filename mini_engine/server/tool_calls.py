"""Lesson 7. Reads tool calls from an answer's text as it arrives, in the form of `output_forms`."""

import json
import re
import secrets
from typing import Any

from mini_engine.server.output_forms import CALL_END, OPEN
from mini_engine.server.reply_formats import ChatFormat

JsonObject = dict[str, Any]
HEAD = f'{OPEN}\n{{"name": "'
BEGIN = re.compile(re.escape(OPEN) + r'\n\{"name": ("(?:[^"\\]|\\.)*"), "arguments": ')


class ToolChatFormat(ChatFormat):
    """`/v1/chat/completions` with tools: separates the model's calls from its text.

    Args:
        may_say: the answer may be text; otherwise any text is the beginning of a call that was cut off.
    """

    def __init__(self, may_say: bool = True) -> None:
        super().__init__()
        self.may_say = may_say

    def reader(self) -> "CallReader":
        """Return a reader for one choice."""
        return CallReader(self.may_say)


class CallReader:
    """Splits one answer into text and calls. Text that may be the beginning of a call is held back.

    Args:
        may_say: text is shown.

    Attributes:
        text: everything outside calls. calls: those begun so far; their arguments are JSON strings.
    """

    def __init__(self, may_say: bool = True) -> None:
        self.may_say, self.text = may_say, ""
        self.calls: list[JsonObject] = []
        self._rest = ""
        self._in_call = self._is_cut = False

    def push(self, text: str, ended: bool = False, cut: bool = False) -> JsonObject:
        """Take the answer's next text; return its addition to the assistant's turn.

        Args:
            ended: this is the last text. cut: max_tokens ended it, so a possible beginning of a call is not shown.
        """
        self._rest += text
        said, changes = "", []
        while True:
            if self._in_call:
                arguments, done = self._take_until(CALL_END)
                changes += self._tell(arguments)
                if not done:
                    break
                self._in_call = False
                continue
            shown, found = self._take_until(OPEN)
            said += shown if not self.calls else shown.lstrip()
            begin = BEGIN.match(OPEN + self._rest) if found else None
            if begin is None:
                self._rest = OPEN + self._rest if found else self._rest
                break
            self._rest = self._rest[begin.end() - len(OPEN) :]
            changes.append(self._begin(json.loads(begin.group(1))))
            self._in_call = True
        if ended and self._in_call and not self._is_whole():
            changes += self._tell(self._rest)  # held back in case it is the last brace of the arguments
            self._is_cut = not self._is_whole()
        elif ended and not self._in_call:
            self._is_cut = begins_a_call(self._rest)
            said, self._rest = said + ("" if cut else self._rest), ""
        said = said if self.may_say else ""
        self.text += said
        return {"delta": ({"content": said} if said else {}) | ({"tool_calls": changes} if changes else {})}

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
        call = {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }
        self.calls.append(call)
        return {"index": len(self.calls) - 1, **call, "function": dict(call["function"])}

    def _tell(self, arguments: str) -> list[JsonObject]:
        if not arguments:
            return []
        self.calls[-1]["function"]["arguments"] += arguments
        return [{"index": len(self.calls) - 1, "function": {"arguments": arguments}}]

    @property
    def message(self) -> JsonObject:
        """Return the whole turn."""
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
