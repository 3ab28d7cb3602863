"""Lesson 20. Routers in simulation: what a guess cannot know, and events do."""

from functools import cache

import pytest

from lessons.l20_agents.agents import Load
from lessons.l20_agents.replay import Rates
from lessons.l20_agents.routing import POLICIES, RoutedReplay, Setting
from lessons.l20_agents.traces import Call
from mini_engine.kv.cache_coordinator import cache_of

SLOW = Rates(prefill=1.0, decode=1.0, block=1)  # a block takes a second
LOAD = Load(agents=4, sessions=1, turns=(8.0, 0.3), scale=40.0)


@cache
def ran(policy, num_routers=1, num_blocks=400, restarts=()):
    """Return a run of the small load."""
    setting = Setting(num_replicas=3, num_blocks=num_blocks, num_routers=num_routers, restarts=restarts)
    replay = RoutedReplay(LOAD.generate(0), POLICIES[policy], setting)
    replay.run()
    return replay


def chain_of(policy, calls, **options):
    """Return a run of calls on two replicas, a block a second."""
    replay = RoutedReplay(calls, POLICIES[policy], Setting(num_replicas=2, num_blocks=10, **options), SLOW)
    replay.run()
    return replay


def turn(index, prompt, seconds):
    return Call(str(index), prompt, (), 0, seconds)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_call_is_answered_and_its_blocks_are_found_or_computed(policy):
    replay = ran(policy)
    assert not any(server.waiting or server.manager.tables for server in replay.servers)
    assert replay.outcome.num_found() + sum(replay.num_computed) == replay.outcome.num_asked()
    assert not any(router.in_flight.total() for router in replay.routers), "load falls when an answer is complete"
    assert not replay.keys and not replay.followers


@pytest.mark.parametrize(("num_routers", "num_blocks", "restarts"), [(1, 400, ()), (3, 60, ()), (2, 60, (30.0, 60.0))])
def test_every_routers_index_is_the_replicas_tree(num_routers, num_blocks, restarts):
    """Also under evictions, and when a replica has lost its cache."""
    replay = ran("events", num_routers, num_blocks, restarts)
    for router in replay.routers:
        for server in replay.servers:
            tree = cache_of(server.manager).prefixes.tree
            assert router.index.num_blocks(server.name) == tree.num_blocks
    if restarts:
        assert all(server.num_starts == 1 + len(restarts) for server in replay.servers)


def test_a_guess_knows_only_what_its_own_router_has_sent():
    """The next turn comes to another router, which follows events to the blocks, or guesses that there are none."""
    calls = [
        Call("0", [90], (), 30),  # keeps one replica busy, so that the text goes to the other one
        turn(1, [1, 2, 3, 4], 0.5),
        turn(2, [91], 100.0),
        turn(3, [92], 100.0),
        turn(4, [1, 2, 3, 4, 5], 20.0),
    ]
    runs = {policy: chain_of(policy, calls, num_routers=2) for policy in ("guesses", "events")}
    assert runs["events"].router_of(calls[1]) is not runs["events"].router_of(calls[4])
    found = {policy: run.outcome.found[4] for policy, run in runs.items()}
    assert found == {"guesses": 0, "events": 4}, "whichever router is asked, the blocks are where they are"


def test_with_several_routers_events_find_more():
    rates = {policy: ran(policy, num_routers=4).outcome.hit_rate("agents") for policy in POLICIES}
    assert rates["events"] > rates["guesses"] > rates["round robin"], rates


def test_a_lost_cache_is_empty_after_the_running_requests_have_ended():
    calls = [turn(0, [1, 2, 3], 0.0), turn(1, [1, 2, 3, 4], 10.0)]
    kept, lost = (chain_of("events", calls, restarts=when) for when in ((), (1.0,)))
    assert (kept.outcome.found[1], lost.outcome.found[1]) == (3, 0)
    assert lost.outcome.waited == [3.0, 4.0], "the request that was running when the cache was to be lost ends first"
