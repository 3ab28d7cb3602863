"""Lesson 20. What a session needs beside K and V follows the same order, and the coordinator tells of what waits.

Protects that the next turns of several sessions find their states: `tests/families/test_sessions.py` has one crowd.
"""

from functools import partial

import pytest

from mini_engine.agents.session import Limits
from mini_engine.agents.sessions import WAITING, Sessions
from mini_engine.hybrid.memory import StateMemory
from mini_engine.hybrid.track_slots import TrackSlots
from mini_engine.kv.cache_coordinator import coordinated
from mini_engine.kv.prefix_cache import PrefixCache

SIZE, LENGTH = 4, 24  # tokens of a block, and of a prompt: six blocks
LIMITS = Limits(blocks=60, each=60)


class Turn:
    """A request, as the coordinator knows it."""

    def __init__(self, name, session):
        self.id, self.session, self.namespace = name, session, None


class Kv:
    """A manager with sessions, and a memory of four checkpoints. `answer` runs one request from beginning to end."""

    def __init__(self):
        self.now = 0.0
        self.policy = Sessions(LIMITS, clock=lambda: self.now)
        self.memory = StateMemory(TrackSlots(4, 4), SIZE, 1024, waiting=self.policy.waiting)
        self.manager = coordinated(81, SIZE, prefixes=partial(PrefixCache, policy=self.policy, memory=self.memory))
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

    def crowd(self, count):
        """Answer requests that have nothing in common."""
        for number in range(count):
            self.answer(text(1000 + number))


def text(number):
    """Return a text that no other number's begins like."""
    return [number, *range(LENGTH - 1)]


def test_if_more_sessions_wait_than_slots_can_be_had_some_still_find_their_states():
    kv = Kv()
    for number in [*range(6), *range(6)]:
        kv.answer(text(number), number)
    found = [kv.answer([*text(number), 1, 2, 3, 4, 5], number) for number in range(6)]
    assert sum(number > 0 for number in found) >= 3, (
        f"{found}: agents come back in turn, so if the oldest gave way, each would lose its state just in time"
    )


def test_the_newest_of_several_sessions_gives_way_first():
    kv = Kv()
    for _ in range(2):
        kv.answer(text(1), "early")
        kv.answer(text(2), "late")
    ends = {kv.policy.sessions[None, name].end: name for name in ("early", "late")}
    assert [ends[node] for node in kv.policy.waiting()] == ["late", "early"]


@pytest.mark.parametrize("close", [True, False], ids=["closed", "with a turn that runs"])
def test_only_a_session_that_waits_keeps_its_state(close):
    kv = Kv()
    for _ in range(2):
        kv.answer(text(1), "agent")
    if close:
        kv.manager.coordinator.close_session("agent", None)
    else:
        kv.begin([*text(1), 1, 2], "agent")
    assert list(kv.policy.waiting()) == [], "it needs no state: it has no next turn, or has its state in a slot"


def test_a_checkpoint_above_a_session_s_end_is_the_one_that_counts():
    kv = Kv()
    for _ in range(2):
        kv.answer(text(1), "agent")
    [end] = kv.policy.waiting()
    above = next(node for node in end.path() if node in kv.memory.checkpoints)
    assert above is not end, "the prompt's last token is computed, so its state lies before the text's end"
    kv.crowd(3)
    assert next(iter(kv.memory.checkpoints.slots)) is above, "it is the oldest now"
    kv.crowd(1)
    assert above in kv.memory.checkpoints, "and yet another one has gone"


def test_a_turn_waits_in_the_queue_until_it_is_admitted_or_given_up():
    kv = Kv()
    kv.answer(text(1), "agent")
    turn = Turn("waits", "agent")
    kv.manager.coordinator.request_added(turn)
    [end] = kv.policy.ends
    assert kv.policy.rank(end)[0] == WAITING, "the coordinator tells the policy of each request that comes"
    kv.manager.free(turn.id)
    assert kv.policy.rank(end)[0] < WAITING, "the client has gone: no turn waits any more"
