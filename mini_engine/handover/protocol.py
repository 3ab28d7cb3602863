"""Lesson 19. The messages between the two processes, through a pipe each way.

    sender (prefill)                                   receiver (decode)
           ── Layout ─────────────────────────────────────>   compares it with its own; refuses or accepts
           <───────────────────────── Ask(id, tokens, buffers) ──   lends it buffers
           ── Filled(id, 4) ──────────────────────────────>   the first four of them
           ── Filled(id, 9) ──────────────────────────────>
           <──────────────────────────────────── Cancel(id) ──   the client has gone
           ── Ended(id) ──────────────────────────────────>   writes into none of its buffers any more

No byte of K and V is in a message: those are in the buffers (`stage.py`). Messages are pickled, which is safe between
processes of one program.
"""

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

VERSION = 1


@dataclass(frozen=True)
class Layout:
    """Everything that determines the bytes of a buffer. Two processes that differ in any of it must not exchange KV.

    version: of this protocol. weights, config: digests of the model. kv_dtype, block_size: of the pool.
    block_bytes: of a block in all layers. num_extra_bytes: of the extras: a state, or a block's windows.
    """

    weights: str
    config: str
    kv_dtype: str
    block_size: int
    block_bytes: int
    num_extra_bytes: int = 0
    version: int = VERSION

    def differs(self, other: "Layout") -> str:
        """Describe the fields in which another process's layout differs; "" if there are none."""
        ours, theirs = asdict(self), asdict(other)
        unlike = [name for name in ours if ours[name] != theirs[name]]
        return ", ".join(
            f"{name.replace('_', ' ')} {short(theirs[name])} instead of {short(ours[name])}" for name in unlike
        )


def short(value: object) -> str:
    """Return a value for a message; a digest is shortened."""
    return f"{str(value)[:12]}…" if len(str(value)) > 16 else str(value)


class Ask(NamedTuple):
    """Compute a prompt and fill these buffers: with blocks start … stop - 1 in order, then with the extras.

    tokens: of the prompt, one more than `stop` blocks hold, as an int32 array. namespace: prefixes are shared only
        within it.
    """

    id: int
    tokens: array
    namespace: Hashable
    start: int
    stop: int
    buffers: Sequence[int]


class Cancel(NamedTuple):
    """The transfer is no longer needed. Its buffers remain the sender's until it sends `Ended`."""

    id: int


class Close(NamedTuple):
    """Exit once all transfers have ended."""


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
    """The sender exits. why: a sentence for the user."""

    why: str


Message = Layout | Ask | Cancel | Close | Filled | Ended | Failed
