"""Lesson 19. What the two processes say to each other, through a pipe each way.

    sender (prefill)                                   receiver (decode)
           ── Layout ─────────────────────────────────────>   compares it with its own; refuses, or goes on
           <───────────────────────── Ask(id, tokens, buffers) ──   lends it buffers
           ── Filled(id, 4) ──────────────────────────────>   the first four of them
           ── Filled(id, 9) ──────────────────────────────>
           <──────────────────────────────────── Cancel(id) ──   the client has gone
           ── Ended(id) ──────────────────────────────────>   writes into none of its buffers any more

No byte of K and V is in a message: those are in the buffers (`stage.py`).
"""

import pickle
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

VERSION = 1


@dataclass(frozen=True)
class Layout:
    """What decides the bytes of a buffer. Two processes that differ in any of it must not exchange any.

    version: of this protocol. weights, config: digests of the model. kv_dtype, block_size: of the pool.
    block_bytes: of a block of all layers. num_extra_bytes: of what comes with blocks: a state, or a block's windows.
    """

    weights: str
    config: str
    kv_dtype: str
    block_size: int
    block_bytes: int
    num_extra_bytes: int = 0
    version: int = VERSION

    def differs(self, other: "Layout") -> str:
        """Return in which fields, and how, another process's layout differs; "" if in none."""
        ours, theirs = asdict(self), asdict(other)
        unlike = [name for name in ours if ours[name] != theirs[name]]
        return ", ".join(
            f"{name.replace('_', ' ')} {short(theirs[name])} instead of {short(ours[name])}" for name in unlike
        )


def short(value: object) -> str:
    """Return a value for a sentence: of a digest, its beginning."""
    return f"{str(value)[:12]}…" if len(str(value)) > 16 else str(value)


class Ask(NamedTuple):
    """Compute a prompt and fill these buffers: with blocks start … stop - 1 in order, then with their extras.

    tokens: of the prompt, one more than `stop` blocks hold, as an int32 array. namespace: only prompts of the same one
        share prefixes.
    """

    id: int
    tokens: array
    namespace: Hashable
    start: int
    stop: int
    buffers: Sequence[int]


class Cancel(NamedTuple):
    """What was asked for is not needed any more. The buffers are the sender's until it says `Ended`."""

    id: int


class Close(NamedTuple):
    """End, once all that was asked for has ended."""


class Filled(NamedTuple):
    """The first `num_buffers` buffers of a transfer are complete."""

    id: int
    num_buffers: int


class Ended(NamedTuple):
    """No buffer of a transfer is written any more. error: why some are not filled. num_held: blocks in use there."""

    id: int
    error: str = ""
    num_held: int = 0


class Failed(NamedTuple):
    """The sender ends, for a reason that a user can read."""

    why: str


Message = Layout | Ask | Cancel | Close | Filled | Ended | Failed


def packed(message: Message) -> bytes:
    """Return a message as bytes. Both ends are processes of one program, so pickle is safe here."""
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def unpacked(sent: bytes) -> Message:
    """Return the message that was sent."""
    return pickle.loads(sent)
