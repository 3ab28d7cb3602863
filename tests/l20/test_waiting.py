"""Lesson 20. Sessions and the queue: what waits goes last, what has come back once is held, and hints stay bounded."""

import pytest

from mini_engine.agents.session import Limits
from mini_engine.agents.sessions import REFERENCED, WAITING, Sessions
from mini_engine.kv.cache_coordinator import cache_of, caching_manager

SIZE = 4


class Asked:
    """A request as the coordinator sees it."""

    def __init__(self, name, ids, session=None, namespace=None):
        self.id, self.token_ids, self.session, self.namespace = name, ids, session, namespace


class World:
    """A manager with sessions, and a clock that is set by hand."""

    def __init__(self, num_blocks=40, **limits):
        self.now, self.count, self.asked = 0.0, 0, []
        self.policy = Sessions(Limits(**{"blocks": 20, "each": 20} | limits), clock=lambda: self.now)
        self.manager = caching_manager(num_blocks + 1, SIZE, policy=self.policy)
        self.tree = cache_of(self.manager).prefixes.tree

    def arrive(self, ids, session=None, namespace=None):
        self.count += 1
        self.asked.append(Asked(f"r{self.count}", ids, session, namespace))
        self.manager.coordinator.request_added(self.asked[-1])
        return self.asked[-1]

    def serve(self, asked):
        found = self.manager.allocate(asked.id, asked.token_ids, asked.namespace)
        self.manager.grow(asked.id, len(asked.token_ids))
        self.manager.commit(asked.id, asked.token_ids, len(asked.token_ids))
        self.manager.free(asked.id, asked.token_ids)
        self.asked.remove(asked)
        return found

    def turn(self, ids, session=None, namespace=None):
        return self.serve(self.arrive(ids, session, namespace))

    def place(self, ids, namespace=None):
        return self.policy.rank(self.tree.path(ids, namespace)[0])[0]


def text(name, num_blocks=4):
    return [name * 100 + index for index in range(num_blocks * SIZE)]


def test_a_turn_that_waits_keeps_its_text_until_last():
    """The queue is certain: a text for which a turn waits goes after everything else, held or not."""
    world = World(num_blocks=12)
    for name in (1, 2, 3):
        world.turn(text(name), name)
    world.arrive(text(1, 5), 1)
    world.turn(text(8, 8))
    assert world.tree.peek(text(1)).num_tokens == 16, "the oldest text has a turn in the queue, so it must stay"
    assert world.tree.peek(text(2)).num_tokens == 0, "the others are LRU's"


def test_of_texts_that_wait_the_last_in_the_queue_goes_first():
    world = World(num_blocks=8)
    world.turn(text(1), 1)
    world.turn(text(2), 2)
    world.arrive(text(2, 5), 2)
    world.arrive(text(1, 5), 1)
    world.turn(text(8, 4))
    assert world.tree.peek(text(2)).num_tokens == 16, "its turn is the first in the queue"
    assert world.tree.peek(text(1)).num_tokens == 0


def test_a_request_that_gives_up_in_the_queue_returns_its_text_to_the_order():
    world = World()
    world.turn(text(1), 1)
    asked = world.arrive(text(1, 5), 1)
    assert world.place(text(1)) == WAITING
    world.manager.free(asked.id)
    assert world.place(text(1)) != WAITING, "the client has gone: no turn waits any more"
    leaf = world.tree.path(text(1))[0]
    assert leaf in list(world.policy.fallen()), "its rank fell, so the queue has to be told"


def test_a_session_is_held_once_it_has_come_back():
    """A client that opens a session for each question must not hold anything with them."""
    world = World()
    world.turn(text(1), "a")
    assert world.place(text(1)) < REFERENCED and not world.policy.num_blocks
    world.turn(text(1, 5), "a")
    assert world.place(text(1, 5)) == REFERENCED
    assert world.policy.num_blocks[None] == 5


@pytest.mark.parametrize(("patience", "gone"), [(30.0, 3), (0.0, 1)])
def test_the_newest_session_gives_way_and_one_that_has_been_idle_for_long_before_it(patience, gone):
    """Its text stays known: if its turn comes while the text is there, the turn protects it."""
    world = World(num_blocks=60, blocks=12, each=12, patience=patience)
    for name in (1, 2, 3):
        world.turn(text(name), name)
        world.turn(text(name, 5), name)
    places = {name: world.place(text(name, 5)) for name in (1, 2, 3)}
    assert [name for name, place in places.items() if place < REFERENCED] == [gone], places
    world.arrive(text(gone, 6), gone)
    assert world.place(text(gone, 5)) == WAITING


def test_ten_thousand_sessions_and_namespaces_leave_a_bounded_registry():
    """Each with two turns, so that each is held for a time; none is ever closed."""
    world = World(num_blocks=100, sessions=50)
    for index in range(10_000 // 20):
        for _ in range(2):
            world.turn(text(index + 1, 2), index, f"client {index}")
    policy = world.policy
    assert len(policy.sessions) <= 50
    for name in ("ends", "held", "left", "num_blocks"):
        assert len(getattr(policy, name)) <= 50, f"{name} grows with every session that a client opens"
    assert policy.num_blocks.total() <= 20
    assert len(policy._fallen) <= 101, "no more leaves can have fallen than the tree ever had between two evictions"


def test_turns_without_an_eviction_leave_nothing_behind():
    """A pool that is large enough is never asked to evict; its registry must not grow either."""
    world = World()
    for _ in range(500):
        world.turn(text(1), 1)
    assert len(world.policy._fallen) <= 2
