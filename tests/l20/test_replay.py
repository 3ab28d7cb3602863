"""Lesson 20. The replay: what a call finds, when its first token comes, and when the next turn follows."""

import pytest

from lessons.l20_agents.replay import Rates, Replay
from lessons.l20_agents.traces import Call
from mini_engine.agents.session import Limits
from mini_engine.agents.sessions import Sessions
from mini_engine.base.errors import UserError
from mini_engine.kv.eviction import LRU
from tests.l20.loads import turns

SLOW = Rates(prefill=1.0, decode=1.0, block=1)  # a block takes a second


def lru(replay):
    return LRU()


def test_a_next_turn_finds_prompt_and_answer():
    """The tree keeps both, so only what the tool returned is computed: here block 5."""
    trace = [Call("0", [1, 2, 3], [4], 1), Call("1", [1, 2, 3, 4, 5], [6], 1, after=0, wait=2.0)]
    outcome = Replay(trace, lru, 20, SLOW).run()
    assert outcome.found == [0, 4], "the second turn must find the first turn's prompt and its answer"


def test_first_tokens_wait_for_prompts_in_front_and_for_what_is_not_cached():
    trace = [Call("0", [1, 2, 3], (), 1), Call("1", [7, 8], (), 1), Call("2", [1, 2, 3, 4], (), 1, after=0, wait=9.0)]
    outcome = Replay(trace, lru, 20, SLOW).run()
    assert outcome.waited[0] == 3, "three blocks at one a second"
    assert outcome.waited[1] == 5, "it waits for the three blocks in front, then computes its own two"
    assert outcome.waited[2] == 1, "three of four blocks are cached, and nothing is in front"


def test_a_turn_comes_after_the_end_of_the_one_before_and_the_time_of_its_tool():
    trace = [Call("0", [1, 2], (), 4), Call("1", [1, 2, 3], (), 1, after=0, wait=10.0)]
    replay = Replay(trace, lru, 20, SLOW)
    replay.run()
    assert replay.due[1] == 2 + 4 + 10, "prefill of 2 s, 4 tokens of answer, 10 s of tool"


def test_a_prompt_waits_until_the_pool_has_room():
    """Blocks of running requests are not evictable: the second prompt has to wait for the end of the first answer."""
    trace = [Call("0", [1, 2, 3], (), 10), Call("1", [4, 5, 6], (), 1)]
    outcome = Replay(trace, lru, 4, SLOW).run()
    assert outcome.waited[1] == 3 + 10 + 3


def test_a_call_that_never_fits_is_named():
    with pytest.raises(UserError, match="3 blocks does not fit into a pool of 2"):
        Replay([Call("0", [1, 2, 3])], lru, 2)


def test_sessions_have_the_replays_clock_and_are_closed():
    """The registry must see virtual seconds: a clock that stands still would never forget a session."""
    limits = Limits(50, 50, seconds=100.0)
    trace = [
        Call("0", [1, 2], (), 1, session="a", closes=True),
        Call("1", [3, 4], (), 1, session="b", seconds=10.0),
        Call("2", [5, 6], (), 1, session="c", seconds=500.0),
    ]
    replay = Replay(trace, lambda replay: Sessions(limits, clock=lambda: replay.now), 50, SLOW)
    replay.run()
    names = [name for _, name in replay.tree.policy.sessions]
    assert names == ["c"], f"a was closed and b idle for 490 s, but the registry has {names}"


def test_the_same_trace_gives_the_same_outcome():
    runs = [Replay(turns(5), lru, 60).run() for _ in range(2)]
    assert runs[0].found == runs[1].found and runs[0].waited == runs[1].waited
