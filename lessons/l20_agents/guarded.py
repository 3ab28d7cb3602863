"""Lesson 20. Loads a student's evictor from a file, and keeps its mistakes from the tree.

After its first mistake an evictor is not asked again: LRU takes over, and `mistake` has a sentence that names the line.
So a wrong evictor can lose hits, but never blocks.
"""

import inspect
import linecache
import traceback
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import islice
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from mini_engine.base.errors import UserError
from mini_engine.kv.eviction import LRU, EvictionPolicy
from mini_engine.kv.prefixes import SharedPrefix
from mini_engine.kv.radix import RadixTree
from mini_engine.kv.radix_node import Node

CLASS = "Evictor"
MOST_RANKS = 50_000  # between two evictions
CHECKED, EVERY = 16, 50  # entries of the queue that are checked, at each so many evictions
EXAMPLE = '''"""An evictor for `python -m lessons play evictor`: LRU, but a session whose turn waits goes last."""

from mini_engine.kv.eviction import EvictionPolicy


class Evictor(EvictionPolicy):
    """Change `rank` first: the leaf with the smallest rank is evicted first."""

    def __init__(self, num_blocks, clock):
        self.num_blocks, self.clock = num_blocks, clock  # of the pool; clock() returns seconds
        self.ends = {}  # session -> the node where its text ends
        self.waiting = {}  # the nodes that waiting turns will use
        self.changed = []  # leaves whose rank may have fallen

    def rank(self, leaf):
        return (int(leaf in self.waiting), leaf.last_used)

    def fallen(self):
        changed, self.changed = self.changed, []
        return changed

    def waits(self, session, namespace):
        if session in self.ends:
            self.waiting[self.ends[session]] = session

    def began(self, prefix):
        node = self.ends.get(prefix.session)
        if self.waiting.pop(node, None) is not None:
            self.changed.append(node)

    def ended(self, prefix):
        if prefix.session is not None:
            self.ends[prefix.session] = prefix.node

    def lost(self, leaf, blocks):
        if len(blocks) == len(leaf.blocks):
            self.waiting.pop(leaf, None)
'''


def load_evictor(path: Path) -> type[EvictionPolicy]:
    """Return the class Evictor of a file.

    Raises:
        UserError: the file cannot be read or run, or has no such class.
    """
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise UserError(f"{path} cannot be read: {why}; --example FILE writes an evictor to begin with") from error
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    linecache.checkcache(str(path))
    try:
        exec(compile(source, str(path), "exec"), vars(module))
    except SyntaxError as error:
        raise UserError(f"{path}, line {error.lineno}: {error.msg}; Python cannot read the file") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{place(error, path)}: {shown(error)}, when the file is run") from error
    found = vars(module).get(CLASS)
    if not (isinstance(found, type) and issubclass(found, EvictionPolicy)):
        what = "has no class named Evictor" if found is None else "has an Evictor that is no EvictionPolicy"
        raise UserError(f"{path} {what}; write `class Evictor(EvictionPolicy)`, as --example FILE does")
    return found


def place(error: BaseException, path: Path) -> str:
    """Return the file, with the last of its lines that the error came through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}, line {lines[-1]}" if lines else str(path)


def shown(error: BaseException) -> str:
    """Return an error in one line."""
    said = str(error).splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__


class Guarded(EvictionPolicy):
    """Asks an evictor, and checks its answers.

    Args:
        make: the class. path: its file, for `mistake`. num_blocks, clock: what its `__init__` gets, if it takes two.

    Attributes:
        mistake: a sentence about the first mistake; empty as long as there is none.
        tree: whose queue is checked; set it before the first call.
    """

    tree: RadixTree | None = None

    def __init__(self, make: type[EvictionPolicy], path: Path, num_blocks: int, clock: Callable[[], float]) -> None:
        self.path, self.mistake, self.num_evictions, self.num_ranks = path, "", 0, 0
        self.policy: EvictionPolicy = LRU()
        takes_none = not inspect.signature(make).parameters
        arguments: Any = () if takes_none else (num_blocks, clock)
        self.policy = self.ask("__init__", lambda: make(*arguments)) or LRU()

    def ask(self, name: str, call: Callable[[], Any]) -> Any:
        """Return what a call returns; None if the evictor made a mistake, now or before."""
        if self.mistake:
            return None
        try:
            return call()
        except Exception as error:
            self.blame(f"{place(error, self.path)}: {name} raised {shown(error)}")
            return None

    def blame(self, what: str) -> None:
        """Note the first mistake."""
        self.mistake = self.mistake or what

    def rank(self, leaf: Node) -> tuple[int, ...]:
        """See `EvictionPolicy.rank`. After a mistake, LRU."""
        found = self.ask("rank", lambda: self.policy.rank(leaf))
        self.num_ranks += 1
        if self.num_ranks > MOST_RANKS:
            self.blame(
                f"{self.path}: rank gives other ranks at each call, so no leaf is ever first; return the same until "
                "something has happened"
            )
        if not self.mistake and not is_rank(found):
            self.blame(
                f"{self.path}: rank returned {found!r:.60}; return a tuple of numbers, such as (leaf.last_used,)"
            )
        return (leaf.last_used,) if self.mistake else found

    def num_ready(self, leaf: Node) -> int:
        """See `EvictionPolicy.num_ready`."""
        found = self.ask("num_ready", lambda: self.policy.num_ready(leaf))
        if not self.mistake and (type(found) is not int or found < 1):
            self.blame(f"{self.path}: num_ready returned {found!r:.60}; return a whole number of blocks, 1 or more")
        return len(leaf.blocks) if self.mistake else min(found, len(leaf.blocks))

    def fallen(self) -> Iterable[Node]:
        """See `EvictionPolicy.fallen`. Now and then, ranks that fell without a report are looked for."""
        found = self.ask("fallen", lambda: list(self.policy.fallen()))
        if not self.mistake and not all(isinstance(leaf, Node) for leaf in found):
            self.blame(f"{self.path}: fallen returned {found!r:.60}; return the leaves whose ranks have decreased")
        self.num_evictions, self.num_ranks = self.num_evictions + 1, 0
        if not self.mistake and self.num_evictions % EVERY == 0:
            self.check_queue(set(found))
        return [] if self.mistake else found

    def check_queue(self, reported: set[Node]) -> None:
        """Blame the evictor if a leaf is evicted later than it says, because its rank fell without a report."""
        queue = self.tree.queue.heap if self.tree else []
        counting = ((rank, leaf) for rank, _, leaf in queue if leaf.is_evictable and leaf.queued == rank)
        for rank, leaf in islice(counting, CHECKED):
            now = self.rank(leaf)
            if not self.mistake and now < rank and leaf not in reported:
                self.blame(
                    f"{self.path}: a leaf's rank fell from {rank} to {now} and fallen did not report it, so the queue "
                    "has it in the wrong place; return such leaves from fallen"
                )

    def waits(self, session: Hashable, namespace: Hashable) -> None:
        """See `EvictionPolicy.waits`."""
        self.ask("waits", lambda: self.policy.waits(session, namespace))

    def gave_up(self, session: Hashable, namespace: Hashable) -> None:
        """See `EvictionPolicy.gave_up`."""
        self.ask("gave_up", lambda: self.policy.gave_up(session, namespace))

    def began(self, prefix: SharedPrefix) -> None:
        """See `EvictionPolicy.began`."""
        self.ask("began", lambda: self.policy.began(prefix))

    def ended(self, prefix: SharedPrefix) -> None:
        """See `EvictionPolicy.ended`."""
        self.ask("ended", lambda: self.policy.ended(prefix))

    def lost(self, leaf: Node, blocks: Sequence[int]) -> None:
        """See `EvictionPolicy.lost`."""
        self.ask("lost", lambda: self.policy.lost(leaf, list(blocks)))

    def close(self, session: Hashable, namespace: Hashable) -> bool:
        """See `EvictionPolicy.close`."""
        return bool(self.ask("close", lambda: self.policy.close(session, namespace)))


def is_rank(found: Any) -> bool:
    """Return True if this can be compared with other ranks: a tuple of real numbers."""
    return isinstance(found, tuple) and bool(found) and all(isinstance(one, Real) and one == one for one in found)


def is_whole(tree: RadixTree) -> bool:
    """Return True if the tree still has the blocks that it counts: an evictor only ranks nodes, and changes none."""
    nodes, num_blocks = list(tree.root.children.values()), 0
    while nodes:
        node = nodes.pop()
        num_blocks += len(node.blocks)
        nodes += node.children.values()
        if len(node.key) != len(node.blocks) * tree.width:
            return False
    return num_blocks == tree.num_blocks
