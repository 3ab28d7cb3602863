"""Lesson 20. Sessions: which cached prefixes have a next turn, because clients say which conversation a request is of.

    root ── [system prompt] ─┬─ [turns of A] ◄ A       A's next turn waits in the queue: goes last
                             ├─ [turns of C] ◄ C       C waits for its tool: goes before that
                             ├─ [a question]           no session's: goes before that
                             └─ [B] ─┬─ [old turns] ✕  B has rewritten its history: goes first
                                     └─ [new turn] ◄ B

A session ends at the node where the text of its latest turn ends. Only leaves are evicted, so that is enough for all of
its text. Such a reference is soft: it decides what goes first, and never keeps a block that a running request needs.
What waits in the queue is certain to come back, in a known order. Everything else is a hint from a client. So a session
must have come back once before it is held, and what is held is bounded: in blocks for each namespace, in blocks in all,
in number and in time.

Soft references, and closing: SGLang's session-aware radix cache.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from mini_engine.agents.session import Limits, Session, SessionStats
from mini_engine.kv.eviction import LRU, EvictionPolicy
from mini_engine.kv.prefixes import SharedPrefix
from mini_engine.kv.radix_node import Node

LEFT, UNCLAIMED, REFERENCED, WAITING = range(4)  # the order of eviction
PROVED = 2  # turns after which a session is held: a client that opens any number of them holds nothing


class Sessions(EvictionPolicy):
    """Evicts what sessions have left behind first, then what none holds, then what some hold, and last what waits.

    Args:
        limits: what the sessions of clients may take.
        policy: ranks leaves that do not differ in this; LRU if None.
        clock: returns the time in seconds; it should not go back.

    Attributes:
        sessions: by namespace and name, the one that has been idle for longest first.
        ends: the nodes where sessions end, each with its sessions.
        held: by namespace, the sessions that are held, the one whose turn ended first in front.
        left: the nodes where texts end that a session has left, with `last_used` at that time.
        num_sessions: sessions of each namespace. num_blocks: blocks of their own that its held sessions have.
    """

    def __init__(
        self, limits: Limits, policy: EvictionPolicy | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limits, self.policy, self.clock = limits, policy or LRU(), clock
        self.sessions: OrderedDict[tuple[Hashable, Hashable], Session] = OrderedDict()
        self.ends: dict[Node, set[Session]] = {}
        self.held: dict[Hashable, OrderedDict[Session, None]] = {}
        self.left: dict[Node, int] = {}
        self.num_sessions: Counter[Hashable] = Counter()
        self.num_blocks: Counter[Hashable] = Counter()
        self.stats = SessionStats()
        self.tick = 0
        self._fallen: dict[Node, None] = {}  # each once: there may be many turns between two evictions

    @property
    def counts(self) -> Mapping[str, int]:
        """See `EvictionPolicy.counts`."""
        stats = self.stats
        return {
            **self.policy.counts,
            "sessions": len(self.sessions),
            "session_blocks": self.num_blocks.total(),
            "session_blocks_asked": stats.asked,
            "session_blocks_found": stats.found,
            "session_blocks_evicted": stats.evicted,
            "session_texts_left": stats.num_left,
        }

    # ---------------------------------------------------------------- the order

    def rank(self, leaf: Node) -> tuple[int, ...]:
        """See `EvictionPolicy.rank`. What a session has left is unclaimed once another request has used it.

        Of the leaves for which turns wait, the one whose turn came last goes first.
        """
        sessions = self.ends.get(leaf, ())
        if since := [session.waits_since for session in sessions if session.num_waiting]:
            return (WAITING, -min(since))
        is_held = any(session.is_held for session in sessions)
        place = REFERENCED if is_held else LEFT if self.left.get(leaf) == leaf.last_used else UNCLAIMED
        return (place, *self.policy.rank(leaf))

    def num_ready(self, leaf: Node) -> int:
        """See `EvictionPolicy.num_ready`."""
        return self.policy.num_ready(leaf)

    def fallen(self) -> Iterable[Node]:
        """Return the leaves that go earlier now, as `EvictionPolicy.fallen` says; each of them once.

        Sessions that have been idle for too long are forgotten first. Then: the leaves that sessions have ceased to
        hold, to wait for or to end in since the last call (`_fallen`), and those that the other policy reports.
        """
        self._expire()
        fallen, self._fallen = self._fallen, {}
        return [*fallen, *self.policy.fallen()]

    def waiting(self) -> Sequence[Node]:
        """See `EvictionPolicy.waiting`: the ends of held sessions, and then of those that have a turn in the queue.

        The newest gives way first: agents come back in turn, so the oldest would lose what it needs just before.
        """
        idle = [one for one in reversed(self.sessions.values()) if not one.num_running]
        queued = sorted((one for one in idle if one.num_waiting), key=lambda one: -one.waits_since)
        held = [one for one in idle if one.is_held and not one.num_waiting]
        return [one.end for one in (*held, *queued) if one.end is not None]

    # ---------------------------------------------------------------- a turn

    def waits(self, session: Hashable, namespace: Hashable) -> None:
        """See `EvictionPolicy.waits`. The first turn of a session has no text yet to wait for."""
        self.policy.waits(session, namespace)
        known = self.sessions.get((namespace, session))
        if known is not None:
            self.tick += 1
            known.waits_since = known.waits_since if known.num_waiting else self.tick
            known.num_waiting += 1

    def gave_up(self, session: Hashable, namespace: Hashable) -> None:
        """See `EvictionPolicy.gave_up`."""
        self.policy.gave_up(session, namespace)
        known = self.sessions.get((namespace, session))
        if known is not None:
            self._waits_no_more(known)

    def began(self, prefix: SharedPrefix) -> None:
        """Note that a turn begins, as `EvictionPolicy.began` says. The other policy is told of every request.

        If the request names a session, that one (`_known`) has one turn less in the queue (`_waits_no_more`) and one
        more that runs. If the prompt continues its text, what it finds is counted (`_count`). Otherwise the session has
        left its text: its reference, if it has one, is given up, the node where it ended goes into `left` with its
        `last_used`, and `num_left` counts that.
        """
        self.policy.began(prefix)
        if prefix.session is None:
            return
        session = self._known(prefix)
        self._waits_no_more(session)
        session.num_running += 1
        if session.is_continued_by(prefix.key):
            self._count(session, prefix)
        elif (end := session.end) is not None:
            self._release(session)
            self.left[end] = end.last_used
            self.stats.num_left += 1

    def ended(self, prefix: SharedPrefix) -> None:
        """See `EvictionPolicy.ended`. A session that was closed while this turn ran stays closed."""
        self.policy.ended(prefix)
        session = self.sessions.get((prefix.namespace, prefix.session))
        if session is None:
            return
        session.num_running = max(0, session.num_running - 1)  # it may have begun before a closing
        self._touch(session)
        was_cut_short = session.end is not None and prefix.num_stored < session.num_blocks
        if prefix.num_stored and not was_cut_short:
            self._release(session)
            session.set_text(prefix.key, prefix.num_stored)
            self._refer(session, prefix.node, prefix.num_stored)
            session.num_turns += 1
            if session.num_turns >= PROVED:
                self._hold(session)
                self._keep_limits(session.namespace)

    def close(self, session: Hashable, namespace: Hashable) -> bool:
        """Forget a session, and give up its reference. Return False if the namespace has none of this name.

        Nothing is evicted: its blocks return to the other policy's order.
        """
        known = self.sessions.get((namespace, session))
        if known is not None:
            self._forget(known)
        return known is not None

    def lost(self, leaf: Node, blocks: Sequence[int]) -> None:
        """Let references follow what remains of their texts. Called before the leaf loses these blocks from its end.

        See `EvictionPolicy.lost`; the other policy is told, too. Each session that ends in this leaf refers to fewer
        blocks from now on (`_move`): in the same leaf, at the node above if the leaf goes, or nowhere if no block
        remains. In the same way, what is `left` goes on at the node above, with the same tick, unless that is the root.
        None of `ends`, `left` and `_fallen` has a leaf that goes. `stats.evicted` counts blocks that a session holds,
        or for which a turn waits.
        """
        self.policy.lost(leaf, blocks)
        is_gone, above = len(blocks) == len(leaf.blocks), leaf.parent
        sessions = list(self.ends.get(leaf, ()))
        if any(session.is_held or session.num_waiting for session in sessions):
            self.stats.evicted += len(blocks)
        for session in sessions:
            if remaining := session.num_blocks - len(blocks):
                self._move(session, above if is_gone and above else leaf, remaining)
            else:
                self._release(session)
        if not is_gone:
            return
        self._fallen.pop(leaf, None)
        tick = self.left.pop(leaf, None)
        if tick is not None and above is not None and above.parent is not None:
            self.left[above] = tick

    # ---------------------------------------------------------------- references and their limits

    def _known(self, prefix: SharedPrefix) -> Session:
        """Return the session that a request is a turn of, seen now; a new one if it is unknown."""
        self._expire()
        key = prefix.namespace, prefix.session
        if key not in self.sessions:
            if len(self.sessions) >= self.limits.sessions:
                self._forget(self._crowded_out())
            self.sessions[key] = Session(key, prefix.num_stored)
            add(self.num_sessions, prefix.namespace, 1)
        self._touch(self.sessions[key])
        return self.sessions[key]

    def _crowded_out(self) -> Session:
        """Return the session that goes for a new one: of the namespace that has the most, the one idle for longest.

        So a client that opens any number of sessions costs the others none of theirs.
        """
        crowd = max(self.num_sessions, key=self.num_sessions.__getitem__)
        return next(one for one in self.sessions.values() if one.namespace == crowd)

    def _touch(self, session: Session) -> None:
        session.seen = self.clock()
        self.sessions.move_to_end(session.key)

    def _count(self, session: Session, prefix: SharedPrefix) -> None:
        """Count what a later turn finds of the session's own text."""
        self.stats.asked += max(0, session.num_stored - session.num_shared)
        self.stats.found += max(0, min(session.num_stored, prefix.num_stored) - session.num_shared)

    def _refer(self, session: Session, node: Node, num_blocks: int) -> None:
        session.end, session.num_blocks = node, num_blocks
        self.ends.setdefault(node, set()).add(session)

    def _hold(self, session: Session) -> None:
        """Let a session that has an end hold its blocks, as the newest of its namespace."""
        session.is_held = True
        self.held.setdefault(session.namespace, OrderedDict())[session] = None
        add(self.num_blocks, session.namespace, session.num_own)

    def _let_go(self, session: Session) -> None:
        """Let a session hold nothing from now on. Its leaf goes earlier, but stays known."""
        if session.end is None or not session.is_held:
            return
        session.is_held = False
        self._fallen[session.end] = None
        del self.held[session.namespace][session]
        add(self.num_blocks, session.namespace, -session.num_own)
        if not self.held[session.namespace]:
            del self.held[session.namespace]

    def _move(self, session: Session, node: Node, num_blocks: int) -> None:
        """Let a session end earlier in its text. If it is held, it stays in its place among those that are."""
        before = session.num_own
        self._leave(session)
        self._refer(session, node, num_blocks)
        if session.is_held:
            add(self.num_blocks, session.namespace, session.num_own - before)

    def _release(self, session: Session) -> None:
        """Give up the session's reference, if it has one. Its leaf goes earlier now."""
        self._let_go(session)
        self._leave(session)

    def _leave(self, session: Session) -> None:
        """Take a session from the node where it ends, if it has one."""
        if session.end is None:
            return
        sessions = self.ends[session.end]
        sessions.remove(session)
        if not sessions:
            del self.ends[session.end]
        self._fallen[session.end] = None
        session.end = None

    def _waits_no_more(self, session: Session) -> None:
        session.num_waiting = max(0, session.num_waiting - 1)
        if session.end is not None:
            self._fallen[session.end] = None

    def _forget(self, session: Session) -> None:
        self._release(session)
        del self.sessions[session.key]
        add(self.num_sessions, session.namespace, -1)

    def _expire(self) -> None:
        """Forget the sessions that have been idle for too long."""
        now = self.clock()
        while self.sessions and (oldest := next(iter(self.sessions.values()))).seen + self.limits.seconds < now:
            if oldest.num_running or oldest.num_waiting:
                self._touch(oldest)
            else:
                self._forget(oldest)

    def _keep_limits(self, namespace: Hashable) -> None:
        """Let sessions go until no namespace, and not all together, hold more blocks than they may.

        Of the namespace that has too many, or of the one that has the most of all, the session that has been idle for
        longest gives way, if that is longer than `patience`: a tool that has taken long takes longer. Otherwise the
        newest does. Agents come back in turn, so giving up the oldest would give up each just before it comes back.
        """
        while self.num_blocks[namespace] > self.limits.each or self.num_blocks.total() > self.limits.blocks:
            crowd = namespace
            if self.num_blocks[crowd] <= self.limits.each:
                crowd = max(self.num_blocks, key=self.num_blocks.__getitem__)
            oldest, newest = next(iter(self.held[crowd])), next(reversed(self.held[crowd]))
            self._let_go(oldest if self.clock() - oldest.seen >= self.limits.patience else newest)


def add(counts: Counter[Hashable], namespace: Hashable, number: int) -> None:
    """Add to a count, and drop it at 0: clients choose namespaces, so there may be any number of them."""
    counts[namespace] += number
    if not counts[namespace]:
        del counts[namespace]
