"""Lesson 20. What a session needs beside K and V follows the same order: states' checkpoints, windows' companions.

Protects that a waiting session's next turn finds them behind a crowd, and that without sessions nothing changes.
"""

from functools import partial

import pytest

from mini_engine.agents.session import Limits
from mini_engine.agents.sessions import Sessions
from mini_engine.hybrid.memory import StateMemory
from mini_engine.hybrid.track_slots import TrackSlots
from mini_engine.kv.cache_coordinator import coordinated
from mini_engine.kv.prefix_cache import PrefixCache
from mini_engine.kv.refcount import RefCountedAllocator
from mini_engine.windows.memory import WindowMemory

SIZE, LENGTH = 4, 24  # tokens of a block, and of a prompt: six blocks
LIMITS = Limits(blocks=60, each=60)


class Turn:
    """A request, as the coordinator knows it."""

    def __init__(self, name, session):
        self.id, self.session, self.namespace = name, session, None


class Kv:
    """A manager with sessions. `answer` runs one request from beginning to end."""

    def __init__(self, memory_of, num_blocks=81):
        self.now = 0.0
        self.policy = Sessions(LIMITS, clock=lambda: self.now)
        self.allocator = RefCountedAllocator(num_blocks, SIZE)
        self.memory = memory_of(self)
        cache = partial(PrefixCache, policy=self.policy, memory=self.memory, allocator=self.allocator)
        self.manager = coordinated(num_blocks, SIZE, prefixes=cache)
        self.num_answered = 0

    def begin(self, tokens, session=None):
        """Begin a request and compute its prompt; return its name, and how many of its tokens were found."""
        self.num_answered += 1
        turn = Turn(f"request {self.num_answered}", session)
        self.manager.coordinator.request_added(turn)
        found = stop = self.manager.allocate(turn.id, tokens)
        while stop < len(tokens):
            stop = self.manager.coordinator.chunk_end(turn.id, stop, len(tokens))
            self.manager.grow(turn.id, stop)
            self.manager.commit(turn.id, tokens, stop)
        return turn.id, found

    def answer(self, tokens, session=None):
        """Run one request; return how many of its tokens were found."""
        name, found = self.begin(tokens, session)
        self.manager.free(name, tokens)
        self.now += 1
        return found

    def crowd(self, count=10):
        """Answer requests that have nothing in common."""
        for number in range(count):
            self.answer(text(1000 + number))


def states(kv, track=4):
    return StateMemory(TrackSlots(4, track), SIZE, 1024, waiting=kv.policy.waiting)


def states_in_order_of_use(kv):
    return StateMemory(TrackSlots(4, 4), SIZE, 1024)


def windows(kv):
    return WindowMemory(kv.allocator, 6, 2, 8)


def text(number, length=LENGTH):
    """Return a text that no other number's begins like."""
    return [number, *range(length - 1)]


def turns(count):
    """Return the first turns of agents, and their second ones."""
    first = {f"agent {number}": text(number) for number in range(count)}
    return first, {agent: [*tokens, 1, 2, 3, 4, 5] for agent, tokens in first.items()}


def found_behind_a_crowd(kv, count, session=lambda agent: agent):
    """Return how many tokens the agents' third turns find when a crowd has passed."""
    first, second = turns(count)
    for agent, tokens in first.items():
        kv.answer(tokens[:8], session(agent))  # a session is held from its second turn on
    for agent, tokens in first.items():
        kv.answer(tokens, session(agent))
    kv.crowd()
    return [kv.answer(tokens, session(agent)) for agent, tokens in second.items()]


def test_a_crowd_does_not_take_the_states_of_waiting_sessions():
    assert found_behind_a_crowd(Kv(states), 3) == [20, 20, 20], (
        "K and V of a session are of no use without the state: the crowd's checkpoints must go first"
    )
    without = found_behind_a_crowd(Kv(states), 3, lambda agent: None)
    assert without == found_behind_a_crowd(Kv(states_in_order_of_use), 3) == [0, 0, 0], (
        "without sessions, or a memory that is told of none, checkpoints go in the order of their use"
    )


def test_a_crowd_does_not_take_the_windows_of_waiting_sessions():
    assert found_behind_a_crowd(Kv(windows), 2) == [24, 24], "a session's last window must outlive the crowd's"
    without = found_behind_a_crowd(Kv(windows), 2, lambda agent: None)
    assert without == [0, 0], "this crowd is too small: it evicts nothing"


def test_if_more_sessions_wait_than_slots_can_be_had_some_still_find_their_states():
    kv = Kv(states)
    first, second = turns(6)
    for agent, tokens in [*first.items(), *first.items()]:
        kv.answer(tokens, agent)
    found = [kv.answer(tokens, agent) for agent, tokens in second.items()]
    assert sum(number > 0 for number in found) >= 3, (
        f"{found}: agents come back in turn, so if the oldest gave way, each would lose its state just in time"
    )


def test_the_newest_of_several_sessions_gives_way_first():
    kv = Kv(states)
    for _ in range(2):
        kv.answer(text(1), "early")
        kv.answer(text(2), "late")
    ends = {kv.policy.sessions[None, name].end: name for name in ("early", "late")}
    assert [ends[node] for node in kv.policy.waiting()] == ["late", "early"]


@pytest.mark.parametrize("close", [True, False], ids=["closed", "with a turn that runs"])
def test_only_a_session_that_waits_keeps_its_state(close):
    kv = Kv(states)
    for _ in range(2):
        kv.answer(text(1), "agent")
    if close:
        kv.manager.coordinator.close_session("agent", None)
    else:
        kv.begin([*text(1), 1, 2], "agent")
    assert list(kv.policy.waiting()) == [], "it needs no state: it has no next turn, or has its state in a slot"


def test_a_checkpoint_above_a_session_s_end_is_the_one_that_counts():
    kv = Kv(states)
    for _ in range(2):
        kv.answer(text(1), "agent")
    [end] = kv.policy.waiting()
    above = next(node for node in end.path() if node in kv.memory.checkpoints)
    assert above is not end, "the prompt's last token is computed, so its state lies before the text's end"
    kv.crowd(3)
    assert next(iter(kv.memory.checkpoints.slots)) is above, "it is the oldest now"
    kv.crowd(1)
    assert above in kv.memory.checkpoints, "and yet another one has gone"
