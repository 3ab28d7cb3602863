"""Lesson 20. Loads for the replay: calls of agents and of a crowd, generated from a seed or read from a file.

An id stands for a block of `TRACE_BLOCK` tokens and for all text before it: equal ids mean an equal prefix. A call may
wait for the end of another one, as an agent's turn waits for the previous turn and then for its tool. So a slow server
gets its calls later, and never more calls than there are agents.
"""

import json
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mini_engine.base.errors import UserError

TRACE_BLOCK = 512  # tokens
SYSTEM_BLOCKS = 1  # Mooncake's requests share the first block, a system prompt: no conversation is told by that


@dataclass(eq=False)
class Call:
    """A request of a trace.

    id: its index, as the manager's request id. prompt, answer: ids of their blocks. output_tokens: of the answer.
    seconds: it does not arrive earlier. after: the index of the call that must have ended `wait` seconds before.
    session, namespace: as a client gives them. closes: the client then closes the session.
    group: whose call it is, for the tables.
    """

    id: str
    prompt: Sequence[int]
    answer: Sequence[int] = ()
    output_tokens: int = 0
    seconds: float = 0.0
    after: int | None = None
    wait: float = 0.0
    session: Hashable = None
    namespace: Hashable = None
    closes: bool = False
    group: str = "agents"

    @property
    def index(self) -> int:
        """Its position in the trace."""
        return int(self.id)

    @property
    def text(self) -> list[int]:
        """The blocks of prompt and answer."""
        return [*self.prompt, *self.answer]


Trace = Sequence[Call]


def read_mooncake(path: Path) -> list[Call]:
    """Return the requests of a file in Mooncake's format, by time, with the sessions that their texts suggest.

    Each line is an object with `hash_ids`, and maybe `timestamp` (ms) and `output_length` (tokens). Its last id is of
    a block that is only partly filled. A request whose ids begin with the whole blocks of an earlier one is the next
    turn of that one's session; if there are two, the first one is, and the other begins a session of its own. Answers
    are not in the file, so no request finds one. Sessions are never closed.

    Raises:
        UserError: the file cannot be read, or is not such a trace.
    """
    calls: list[Call] = []
    ends: dict[int, int] = {}  # the last whole block of a session's latest turn -> the session
    for line in sorted(read_lines(path), key=lambda line: line["timestamp"]):
        ids = line["hash_ids"]
        at = next((one for one in reversed(ids[SYSTEM_BLOCKS:]) if one in ends), None)
        session = len(calls) if at is None else ends.pop(at)
        if len(ids) > SYSTEM_BLOCKS + 1:
            ends[ids[-2]] = session
        output = line["output_length"]
        calls.append(Call(str(len(calls)), ids, (), output, line["timestamp"] / 1000, session=session))
    return calls


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield a file's objects with hash_ids, timestamp and output_length. Raises UserError as `read_mooncake` does."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise UserError(f"the trace {path} cannot be read: {why}") from error
    if not lines:
        raise UserError(f"the trace {path} is empty; give a file with one JSON object a line")
    for number, line in enumerate(lines, 1):
        try:
            found = {"timestamp": 0, "output_length": 0} | json.loads(line)
            is_good = found["hash_ids"] and all(type(one) is int and 0 <= one < 2**32 for one in found["hash_ids"])
            is_good = is_good and all(float(found[name]) >= 0 for name in ("timestamp", "output_length"))
        except (ValueError, KeyError, TypeError):
            is_good = False
        if not is_good:
            raise UserError(
                f"line {number} of {path} is not a request; give an object with hash_ids, a list of at least one "
                "whole number, and with timestamp and output_length, numbers of 0 or more"
            )
        yield found
