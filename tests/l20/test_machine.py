"""Lesson 20. Policies in the tree and the manager of lesson 8, through thousands of turns, closings, pauses and crowds.

Protects the order of eviction, the books of the policies, and that a hint never keeps a block for good.
"""

import random
from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mini_engine.agents.policies import SLRU, TLRU
from mini_engine.agents.session import Limits
from mini_engine.agents.sessions import Sessions
from mini_engine.base.errors import OutOfBlocks
from mini_engine.kv.cache_coordinator import caching_manager
from mini_engine.kv.eviction import LRU, EvictionQueue
from tests.shared.trees import check_tree, nodes, played

SIZE, USABLE, AGENTS, NAMESPACES = 4, 40, 8, 2
LIMITS = Limits(blocks=20, each=14, sessions=5, seconds=50)
POLICIES = {"lru": LRU, "slru": SLRU, "tlru": lambda: TLRU(3, 1)}


class WatchedQueue(EvictionQueue):
    """Compares each leaf that is about to be evicted with all that could go."""

    def __init__(self, world):
        super().__init__(world.policy)
        self.world = world

    def pop(self):
        leaf = super().pop()
        self.world.on_chosen(leaf)
        return leaf


class Turn:
    """A request: a turn of `agent`, or of nobody's session. `computed` of its tokens have KV."""

    def __init__(self, name, agent, namespace, token_ids):
        self.id, self.session, self.namespace, self.token_ids = name, agent, namespace, token_ids
        self.computed = 0


class World:
    """A manager with a policy, and agents whose texts grow. Time is `now`, and passes only when a rule says so."""

    def __init__(self, base="lru", has_sessions=True):
        self.now = self.latest = 0.0
        self.base = POLICIES[base]()
        self.policy = Sessions(LIMITS, self.base, lambda: self.now) if has_sessions else self.base
        self.manager = caching_manager(USABLE + 1, SIZE, policy=self.policy)
        self.tree = self.manager.coordinator.prefixes.tree
        self.tree.queue = WatchedQueue(self)
        self.texts = {agent: [] for agent in range(AGENTS)}
        self.running, self.num_turns, self.num_chosen, self.num_referenced = [], 0, 0, 0

    @property
    def ends(self):
        return self.policy.ends if isinstance(self.policy, Sessions) else {}

    def on_chosen(self, leaf):
        could = [node for node in nodes(self.tree) if node.is_evictable]
        if leaf is None:
            assert not could, "the queue says that nothing can be evicted, and there is an unlocked leaf"
            return
        ranks = {node: self.policy.rank(node) for node in could}
        assert ranks.get(leaf) == min(ranks.values()), "the leaf with the smallest rank goes first"
        needed = {node for node, some in self.ends.items() if any(one.is_held or one.num_waiting for one in some)}
        if leaf in needed:
            assert needed.issuperset(could), "a leaf went that a session holds or waits for, and another was not needed"
            self.num_referenced += 1
        self.num_chosen += 1

    # What may happen

    def begin(self, agent, keep, tokens, is_named=True):
        """Begin a turn behind the first `keep` tokens of the agent's text: not all of them if it is compacted."""
        text = self.texts[agent] = (self.texts[agent][:keep] + tokens)[-15 * SIZE :]
        self.num_turns += 1
        turn = Turn(f"turn {self.num_turns}", f"agent {agent}" if is_named else None, agent % NAMESPACES, text)
        self.manager.coordinator.request_added(turn)
        turn.computed = self.manager.allocate(turn.id, text, turn.namespace)
        self.running.append(turn)
        return turn

    def compute(self, turn, num_tokens):
        """Compute so many tokens; if there are no blocks for them, end the turn."""
        stop = min(len(turn.token_ids), turn.computed + num_tokens)
        try:
            self.manager.grow(turn.id, stop)
        except OutOfBlocks:
            self.end(turn)
            return
        turn.computed = stop
        self.manager.commit(turn.id, turn.token_ids, stop)

    def end(self, turn):
        self.running.remove(turn)
        self.manager.free(turn.id, turn.token_ids[: turn.computed])

    def preempt(self, turn):
        """Take a turn's blocks back, and begin it again."""
        self.manager.free(turn.id, turn.token_ids[: turn.computed])
        turn.computed = self.manager.allocate(turn.id, turn.token_ids, turn.namespace)

    def close(self, agent, namespace):
        known = isinstance(self.policy, Sessions) and (namespace, f"agent {agent}") in self.policy.sessions
        assert self.manager.coordinator.close_session(f"agent {agent}", namespace) == known
        if known:
            assert (namespace, f"agent {agent}") not in self.policy.sessions, "a closed session is forgotten"

    def pass_time(self, seconds):
        """Let the clock go on, or jump back, as a clock does that is set."""
        self.now += seconds
        self.latest = max(self.latest, self.now)

    def wait_for_long(self):
        """Let every session that has no turn expire."""
        self.now = self.latest = self.latest + LIMITS.seconds + 1
        self.tree.evict(1)
        if isinstance(self.policy, Sessions):
            idle = [session for session in self.policy.sessions.values() if not session.num_running]
            assert not idle, "a session without a turn for longer than the limit must be forgotten"

    def crowd(self, num_blocks):
        """Evict as a crowd would."""
        before = self.tree.num_evictable
        gone = self.tree.evict(num_blocks)
        assert len(gone) == min(num_blocks, before), "a hint must not keep a block that could be evicted"

    def some(self, chance, steps):
        for _ in range(steps):
            dice, turn = chance.random(), chance.choice(self.running or [None])
            if dice < 0.3 or turn is None:
                agent = chance.randrange(AGENTS)
                keep = len(self.texts[agent]) if chance.random() < 0.8 else chance.randrange(20)
                turn = self.begin(agent, keep, chance.choices(range(2), k=chance.randrange(1, 20)), dice < 0.25)
                self.compute(turn, 60)
            elif dice < 0.5:
                self.end(turn)
            elif dice < 0.7:
                turn.token_ids = turn.token_ids + chance.choices(range(2), k=3)
                self.texts[chance.randrange(AGENTS)] = turn.token_ids
                self.compute(turn, chance.randrange(1, 9))
            elif dice < 0.75:
                self.preempt(turn)
            elif dice < 0.8:
                self.close(chance.randrange(AGENTS), chance.randrange(NAMESPACES))
            elif dice < 0.85:
                self.crowd(chance.choice([*range(1, 9), USABLE]))
            elif dice < 0.99:
                self.pass_time(chance.choice([0.1, 1, 12, 60, -30]))
            else:
                self.wait_for_long()
            self.check()

    # What must be true

    def check(self):
        check_tree(self.tree)
        alive = set(nodes(self.tree))
        if isinstance(self.base, TLRU):
            assert set(self.base.histories) <= alive, "a history must end at a node of the tree"
            assert all(one.cached > 0 for one in self.base.histories.values()), "a history without a block is none"
        if isinstance(self.policy, Sessions):
            self.check_sessions(alive)

    def check_sessions(self, alive):
        policy = self.policy
        assert set(policy.ends) <= alive, "a session must end at a node of the tree, or nowhere"
        assert set(policy.left) <= alive, "a text that was left must end at a node of the tree, or be forgotten"
        counts = Counter()
        for session in policy.sessions.values():
            assert session.num_running >= 0, "more turns of a session have ended than have begun"
            if session.end is None:
                continue
            assert session in policy.ends[session.end], "a session's end must know the session"
            on_path = sum(len(node.blocks) for node in session.end.path())
            assert session.num_blocks == on_path, "num_blocks must be what lies between the root and the end"
            counts[session.namespace] += session.num_own * session.is_held
        ends = [session for sessions in policy.ends.values() for session in sessions]
        assert len(ends) == len({session.key for session in ends}), "a session has one end at most"
        assert all(policy.sessions.get(session.key) is session for session in ends), "a forgotten session has no end"
        assert +counts == +policy.num_blocks, "num_blocks must count what the held sessions of a namespace have"
        assert counts.total() <= LIMITS.blocks and max(counts.values(), default=0) <= LIMITS.each
        assert len(policy.sessions) <= LIMITS.sessions
        assert all(policy.held.values()), "a namespace of which nothing is held must be forgotten"

    def check_order(self):
        """Once `fallen` has been asked, every leaf that can go has an entry that is not too late."""
        for leaf in self.policy.fallen():
            self.tree.queue.add(leaf)
        for leaf in nodes(self.tree):
            if leaf.is_evictable:
                assert leaf.queued <= self.policy.rank(leaf), "a leaf whose rank fell must be reported"

    def finish(self):
        for turn in list(self.running):
            self.end(turn)
        self.check()
        self.check_order()
        self.crowd(USABLE)
        self.check()
        assert self.manager.allocator.num_free == USABLE, "something pins blocks that no request holds"
        kept = [self.ends, getattr(self.policy, "left", ()), getattr(self.base, "histories", ())]
        assert not any(kept), "an empty tree has no ends"


class PolicyMachine(RuleBasedStateMachine):
    """Hypothesis chooses the policy and what happens. One rule may take many steps, to reach thousands quickly."""

    def __init__(self):
        super().__init__()
        self.world = World()

    @initialize(base=st.sampled_from(sorted(POLICIES)), has_sessions=st.sampled_from([True, True, False]))
    def open(self, base, has_sessions):
        self.world = World(base, has_sessions)

    @rule(seed=st.integers(0, 2**32), count=st.sampled_from([1, 25]))
    def some_steps(self, seed, count):
        self.world.some(random.Random(seed), count)

    @rule()
    def a_look_at_the_order(self):
        self.world.check_order()

    @invariant()
    def the_books_are_right(self):
        self.world.check()

    def teardown(self):
        self.world.finish()


def test_hundreds_of_turns_keep_the_order_and_the_books_of_every_policy():
    assert sum(world.num_turns for world in played(PolicyMachine, 60, 30)) >= 500


@pytest.mark.nightly
def test_many_thousands_of_turns_keep_the_order_and_the_books_of_every_policy():
    worlds = played(PolicyMachine, 2500, 30)
    assert sum(world.num_turns for world in worlds) >= 40_000
    assert sum(world.num_chosen for world in worlds) > 20_000
    assert sum(world.num_referenced for world in worlds) > 1000, "sessions' leaves must have gone as a last resort"
