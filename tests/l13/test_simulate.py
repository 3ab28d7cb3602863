"""Lesson 13. The simulated replicas: what they find, what they wait for, and what each policy makes of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lessons.l13_machines.simulate import Arrival, Rates, Served, SimulatedReplica, simulate
from mini_engine.distributed.routing.policy import PrefixScore, RoundRobin

RATES = Rates(prefill=2.0, decode=10.0)


def served(replica, seconds, keys, output_tokens=0):
    """What becomes of one request at this replica."""
    return replica.serve(0, Arrival(seconds, keys, output_tokens))


# ---------------------------------------------------------------- one replica


@pytest.mark.task(5)
def test_a_prompt_that_comes_again_computes_its_last_block_only():
    replica = SimulatedReplica(100)
    first, again = (replica.serve(3, Arrival(0.0, [1, 2, 3])) for _ in range(2))
    assert first == Served(3, 0, 3, 0.0), "replica 3 had none of the prompt, and computed 3 blocks of it"
    assert again.num_found > 0, "the prompt came again, and nothing of it was found: is it in the tree?"
    assert again == Served(3, 2, 1, 0.0), "2 blocks are found: the first token's logits come from the last block"
    assert served(replica, 0.0, [1, 2, 3, 4]).num_found == 3, "the last block of the prompt before was inserted too"
    assert replica.num_computed == 5, "3 blocks, then 1 and 1"


@pytest.mark.task(5)
def test_a_full_pool_drops_what_was_used_longest_ago():
    replica = SimulatedReplica(4)
    for keys in ([1, 2], [3, 4], [1, 2], [5, 6]):
        served(replica, 0.0, keys)
    found = [served(replica, 0.0, keys).num_found for keys in ([1, 2], [3, 4])]
    assert found == [1, 0], "a pool of 4 blocks: [1, 2] came again, so [3, 4] was used longest ago and was dropped"


@pytest.mark.task(5)
def test_prompts_are_computed_one_after_another():
    replica = SimulatedReplica(100, RATES)
    waits = [served(replica, 0.0, keys).waited for keys in ([1, 2], [3, 4, 5, 6], [1, 2])]
    assert waits == [1.0, 3.0, 3.5], "2 blocks/s: 2 blocks, after them 4, after those the last one of a known prompt"
    assert served(replica, 10.0, [7, 8]).waited == 1.0, "later nothing is in the way"
    assert served(replica, 10.5, [9]).waited == 1.0, "half a second for the one before, half a second for its own block"


@pytest.mark.task(5)
def test_decoding_does_not_keep_the_next_prompt_waiting():
    replica = SimulatedReplica(100, RATES)
    served(replica, 0.0, [1, 2], output_tokens=1000)
    assert served(replica, 1.0, [3, 4]).waited == 1.0, "the long answer is decoded beside it"


@pytest.mark.task(5)
def test_load_is_the_requests_that_are_not_finished():
    replica = SimulatedReplica(100, RATES)
    served(replica, 0.0, [1, 2], output_tokens=20)
    served(replica, 0.0, [3, 4], output_tokens=5)
    found = [replica.load(now) for now in (0.0, 2.4, 2.6, 3.1)]
    assert found == [2.0, 2.0, 1.0, 0.0], "the second one's answer ends first, at 2.5 s; the other's at 3 s"


@pytest.mark.task(5)
def test_an_answer_that_ends_now_is_finished():
    replica = SimulatedReplica(100, RATES)
    served(replica, 0.0, [1, 2], output_tokens=20)
    assert replica.load(3.0) == 0.0, "computed after 1 s, 20 tokens in 2 s more: at 3 s it is finished"


@pytest.mark.task(5)
def test_without_rates_load_is_the_work_done_so_far():
    replica = SimulatedReplica(100)
    served(replica, 0.0, [1, 2, 3])
    served(replica, 5.0, [1, 2, 4])
    assert replica.load(99.0) == 4.0, "3 blocks and 1: found blocks are no work"
    assert served(replica, 0.0, [7] * 1).waited == 0.0, "time stands still"


# ---------------------------------------------------------------- all of them


class Noted:
    """A policy that chooses what it is told, and notes what it hears."""

    def __init__(self, *chosen):
        self.chosen, self.heard = list(chosen), []

    def choose(self, keys, loads):
        self.heard.append(("choose", list(keys), dict(loads)))
        return self.chosen.pop(0)

    def sent(self, replica, keys):
        self.heard.append(("sent", replica, list(keys)))

    def found(self, replica, keys, num_found):
        self.heard.append(("found", replica, list(keys), num_found))


@pytest.mark.task(5)
def test_the_policy_hears_loads_at_arrival_and_what_was_found():
    policy = Noted(1, 1, 0)
    keys = [1, 2, 3]
    results = simulate([Arrival(0.0, keys, 10), Arrival(1.0, keys, 10), Arrival(2.9, keys)], policy, 2, 10, RATES)
    assert [what for what, *_ in policy.heard] == ["choose", "sent", "found"] * 3, (
        "for each request: the policy chooses, is told where it was sent, and then what was found there"
    )
    assert policy.heard == [
        ("choose", keys, {0: 0.0, 1: 0.0}),
        ("sent", 1, keys),
        ("found", 1, keys, 0),
        ("choose", keys, {0: 0.0, 1: 1.0}),
        ("sent", 1, keys),
        ("found", 1, keys, 2),
        ("choose", keys, {0: 0.0, 1: 1.0}),
        ("sent", 0, keys),
        ("found", 0, keys, 0),
    ], "loads are those at each arrival: at 2.9 s the first answer has ended; a report has what was found"
    assert [one.replica for one in results] == [1, 1, 0], "each request is served by the replica that was chosen"
    assert [one.num_found for one in results] == [0, 2, 0], "in order: the second prompt finds 2 blocks of the first"


@pytest.mark.task(5)
def test_each_replica_has_a_cache_of_its_own_and_of_the_given_size():
    requests = [Arrival(0.0, keys) for keys in ([1, 2], [1, 2], [3, 4, 5, 6], [1, 2])]
    results = simulate(requests, Noted(0, 1, 0, 0), 2, 4)
    assert [one.num_found for one in results] == [0, 0, 0, 0], "4 blocks: the long prompt has pushed out the first one"
    assert [one.waited for one in results] == [0.0] * 4, "without rates, time stands still"


def shared_block_0(count):
    """Chats of two turns under one system prompt, one after another."""
    return [Arrival(float(i), [0, *range(10 * i + 1, 10 * i + 4)]) for i in range(count) for _ in range(2)]


def test_pure_affinity_sends_everything_to_one_replica():
    results = simulate(shared_block_0(50), PrefixScore(0.0, 1000), 4, 1000)
    assert len({one.replica for one in results[1:]}) == 1, "all prompts share block 0, so one replica is best for all"


def test_the_score_finds_as_much_and_keeps_the_load_even():
    requests = shared_block_0(50)
    results = simulate(requests, PrefixScore(1.0, 1000), 4, 1000)
    each = [sum(one.num_computed for one in results if one.replica == index) for index in range(4)]
    turns = simulate(requests, RoundRobin(), 4, 1000)
    assert max(each) < 1.2 * sum(each) / 4, f"blocks computed by each: {each}; without load, one replica gets it all"
    found, by_turns = (sum(one.num_found for one in some) for some in (results, turns))
    assert found > 1.5 * by_turns, f"the score finds {found} blocks, round robin {by_turns}"


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
    results = simulate(requests, PrefixScore(1.0, 8), num_replicas, 8, rates)
    blocks = [one.num_found + one.num_computed for one in results]
    assert blocks == [len(one.keys) for one in requests], "each block of a prompt is found or computed"
    assert all(one.num_computed >= 1 for one in results), "the last block is always computed"
    assert all(0 <= one.replica < num_replicas for one in results), f"replicas are 0 to {num_replicas - 1}"
    assert all(one.waited >= (one.num_computed / rates.prefill if rates else 0) for one in results), (
        "a prompt waits for its own blocks at least"
    )


def test_reports_of_the_replicas_shrink_a_view_that_has_grown_stale():
    class Deaf(PrefixScore):
        def found(self, replica, keys, num_found):
            pass

    requests = [Arrival(0.0, keys) for keys in ([0, 1, 2, 3], [0, 1, 4, 5], [0, 9, 10, 11], [0, 1, 6, 7])]
    known = []
    for policy in (PrefixScore(capacity=1000), Deaf(capacity=1000)):
        simulate(requests, policy, 1, 4)
        known.append(sorted(policy.seen[0].keys))
    assert known[0] == [0, 1, 6, 7, 9, 10, 11], "the last report says that block 1 was evicted: 2 … 5 went before it"
    assert known[1] == [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11], "without reports all is believed to be there"
