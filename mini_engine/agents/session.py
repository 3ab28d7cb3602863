"""Lesson 20. A session: a conversation of which the client says that it goes on, and what such hints may take."""

from collections.abc import Hashable
from dataclasses import dataclass

from mini_engine.base.errors import UserError
from mini_engine.kv.radix_node import Node


@dataclass(frozen=True)
class Limits:
    """What the sessions of clients may take.

    blocks: that all sessions together may hold while no turn of theirs waits; those of one namespace at most `each`.
    sessions: how many are remembered. seconds: a session without a turn for so long is forgotten.
    patience: what has been idle for so many seconds gives way first, if there are too many blocks.
    """

    blocks: int
    each: int
    sessions: int = 4096
    seconds: float = 600.0
    patience: float = 30.0

    def __post_init__(self) -> None:
        if min(self.blocks, self.each, self.sessions - 1, self.seconds, self.patience) < 0:
            raise UserError(f"{self}: give 1 or more sessions, and nothing below 0 for the rest")

    @classmethod
    def of_pool(cls, num_blocks: int) -> "Limits":
        """Return the limits for a pool: sessions may hold three quarters of it, the rest follows the other policy."""
        most = num_blocks * 3 // 4
        return cls(most, most)


@dataclass(eq=False)
class Session:
    """A conversation, as far as the cache knows it.

    key: its namespace and the client's name for it. num_shared: blocks that its first turn found: they are not its own.
    seen: when a turn last began or ended. num_running: turns that run now. num_turns: that have ended.
    num_waiting: turns in the scheduler's queue. waits_since: the tick at which the first of them came.
    end: the node where its text ends, as long as the tree has some of it. num_blocks: of its text, up to there.
    is_held: the session counts as one that goes on, within the limits.
    text: the hash and size of its text as a key, so that a turn that does not continue it is noticed.
    num_stored: how many blocks of the text were stored when its latest turn ended.
    """

    key: tuple[Hashable, Hashable]
    num_shared: int
    seen: float = 0.0
    num_running: int = 0
    num_turns: int = 0
    num_waiting: int = 0
    waits_since: int = 0
    end: Node | None = None
    is_held: bool = False
    num_blocks: int = 0
    text: tuple[int, int] = (hash(b""), 0)
    num_stored: int = 0

    @property
    def namespace(self) -> Hashable:
        """Only requests of the same namespace share blocks."""
        return self.key[0]

    @property
    def num_own(self) -> int:
        """The blocks of its text that it did not find in its first turn."""
        return max(0, self.num_blocks - self.num_shared)

    def is_continued_by(self, key: bytes) -> bool:
        """Return True if this text, 4 bytes a token, begins with the session's."""
        digest, size = self.text
        return len(key) >= size and hash(key[:size]) == digest

    def set_text(self, key: bytes, num_stored: int) -> None:
        """Set the session's text, whole blocks only, of which the first `num_stored` are in the tree now."""
        self.text, self.num_stored = (hash(key), len(key)), num_stored


@dataclass
class SessionStats:
    """Counts, in blocks, of what sessions found again.

    asked: of the texts of earlier turns, without what a session's first turn had found: a prompt that all share is no
    hit of a session. found: those of them that were still cached. evicted: blocks evicted although a session held them
    or had a turn that waited. num_left: texts that a session left, because a turn did not continue them.
    """

    asked: int = 0
    found: int = 0
    evicted: int = 0
    num_left: int = 0

    @property
    def hit_rate(self) -> float:
        """Found blocks / asked blocks; 0 before the first second turn."""
        return self.found / self.asked if self.asked else 0.0
