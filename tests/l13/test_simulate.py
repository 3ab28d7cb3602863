"""Lesson 13. The simulated replicas: what they find, what they wait for, and what each policy makes of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.routing.policy import PrefixScore, RoundRobin
from mini_engine.routing.simulate import Arrival, Rates, Replica, simulate

RATES = Rates(prefill=2.0, decode=10.0)


def test_a_prompt_that_comes_again_computes_its_last_block_only():
    replica = Replica(100)
    first, again = (replica.serve(0, Arrival(0.0, [1, 2, 3])) for _ in range(2))
    assert (first.num_found, first.num_computed) == (0, 3)
    assert (again.num_found, again.num_computed) == (2, 1), "the first token's logits come from the last block"


def test_prompts_are_computed_one_after_another():
    replica = Replica(100, RATES)
    waits = [replica.serve(0, Arrival(0.0, keys)).waited for keys in ([1, 2], [3, 4, 5, 6], [1, 2])]
    assert waits == [1.0, 3.0, 3.5], "2 blocks/s: 2 blocks, behind them 4, behind those the last one of a known prompt"
    assert replica.serve(0, Arrival(10.0, [7, 8])).waited == 1.0, "later nothing is in the way"


def test_load_is_the_requests_that_are_not_finished():
    replica = Replica(100, RATES)
    replica.serve(0, Arrival(0.0, [1, 2], output_tokens=20))
    replica.serve(0, Arrival(0.0, [3, 4], output_tokens=5))
    assert [replica.load(now) for now in (0.0, 2.4, 2.6, 3.1)] == [2.0, 2.0, 1.0, 0.0]


def test_without_rates_load_is_the_work_done_so_far():
    replica = Replica(100)
    replica.serve(0, Arrival(0.0, [1, 2, 3]))
    assert replica.load(99.0) == 3.0


def shared_block_0(count):
    """Chats of two turns under one system prompt, one after another."""
    return [Arrival(float(i), [0, *range(10 * i + 1, 10 * i + 4)]) for i in range(count) for _ in range(2)]


def test_pure_affinity_sends_everything_to_one_replica():
    served = simulate(shared_block_0(50), PrefixScore(0.0, 1000), 4, 1000)
    assert len({one.replica for one in served[1:]}) == 1, "all prompts share block 0, so one replica is best for all"


def test_the_score_finds_as_much_and_keeps_the_load_even():
    requests = shared_block_0(50)
    served = simulate(requests, PrefixScore(1.0, 1000), 4, 1000)
    each = [sum(one.num_computed for one in served if one.replica == index) for index in range(4)]
    turns = simulate(requests, RoundRobin(), 4, 1000)
    assert max(each) < 1.2 * sum(each) / 4
    assert sum(one.num_found for one in served) > 1.5 * sum(one.num_found for one in turns)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 9), min_size=1, max_size=6)), max_size=30),
    st.integers(1, 4),
    st.sampled_from([None, RATES]),
)
def test_every_request_is_served_once_and_every_block_found_or_computed(gaps, num_replicas, rates):
    now, requests, names = 0.0, [], {}
    for gap, ids in gaps:
        now += gap
        keys = [names.setdefault(tuple(ids[: i + 1]), len(names)) for i in range(len(ids))]
        requests.append(Arrival(now, keys, 3))
    served = simulate(requests, PrefixScore(1.0, 8), num_replicas, 8, rates)
    assert [one.num_found + one.num_computed for one in served] == [len(one.keys) for one in requests]
    assert all(one.num_computed >= 1 and 0 <= one.replica < num_replicas for one in served)
    assert all(one.waited >= (one.num_computed / rates.prefill if rates else 0) for one in served)


def test_the_same_trace_gives_the_same_answers():
    requests = shared_block_0(20)
    first, second = (simulate(requests, PrefixScore(), 3, 20, RATES) for _ in range(2))
    assert first == second and pytest.approx(first[-1].waited) == second[-1].waited
