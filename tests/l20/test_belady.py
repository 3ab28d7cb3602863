"""Lesson 20. The oracle: on a given order of calls, no policy and no order of evictions finds more blocks."""

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lessons.l20_agents.belady import Belady, belady, uses_of
from lessons.l20_agents.compare import BELADY, POLICIES
from lessons.l20_agents.replay import Rates, Replay
from lessons.l20_agents.traces import Call
from mini_engine.kv.eviction import EvictionPolicy

FAST = Rates(prefill=1e9, decode=1e9)  # calls never overlap, so their order is given


def calls(paths):
    """Return a call each second with these texts. A path is a list of names; an id stands for all names up to it."""
    ids = {}
    return [
        Call(str(at), [ids.setdefault(tuple(path[: i + 1]), len(ids) + 1) for i in range(len(path))], seconds=float(at))
        for at, path in enumerate(paths)
    ]


class Fixed(EvictionPolicy):
    """Ranks leaves by their last ids, in a given order of all ids."""

    def __init__(self, order):
        self.order = order

    def rank(self, leaf):
        return (self.order.index(int.from_bytes(leaf.key[-4:], "little")),)


def found(trace, policy, num_blocks):
    return Replay(trace, policy, num_blocks, FAST).run().num_found()


PATHS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=8, max_size=40)


@settings(max_examples=150, deadline=None)
@given(PATHS, st.integers(3, 6))
def test_no_policy_finds_more(paths, num_blocks):
    """All blocks cost the same and the order is given: that is what Belady proved the rule for."""
    trace = calls(paths)
    best = found(trace, POLICIES[BELADY], num_blocks)
    for name, policy in POLICIES.items():
        assert found(trace, policy, num_blocks) <= best, f"{name} finds more than the oracle"


@pytest.mark.parametrize(
    "paths", [["ab", "ac", "ab", "d", "ac", "ab"], ["a", "b", "c", "a", "b", "c"], ["ab", "c", "ad", "ab", "c", "ab"]]
)
def test_no_fixed_order_of_leaves_finds_more(paths):
    """All orders of all texts are tried, whatever the tree looks like when a block is needed."""
    trace = calls([list(path) for path in paths])
    ids = sorted({one for call in trace for one in call.prompt})
    best = found(trace, belady, 3)
    most = max(found(trace, lambda replay, order=order: Fixed(order), 3) for order in permutations(ids))
    assert best >= most, f"an order of leaves finds {most} blocks, the oracle {best}"


def test_the_leaf_that_is_used_again_last_goes_first():
    trace = calls(["ax", "bx", "cx", "ax", "cx"])  # a prompt's last block is always computed
    a, b, c = (call.prompt[0] for call in trace[:3])
    oracle = Belady(uses_of(trace), begun=[True, True, True, False, False], due={3: 3.0, 4: 4.0})
    order = sorted((a, b, c), key=oracle.next_use, reverse=True)
    assert order == [b, c, a], "b is never used again, c after a"


def test_a_call_that_has_a_time_comes_before_one_that_has_none():
    """When a turn comes whose previous turn has not ended is unknown, even to the oracle: it counts as later."""
    trace = calls(["ax", "bx", "ax", "bx"])
    a, b = trace[0].prompt[0], trace[1].prompt[0]
    oracle = Belady(uses_of(trace), begun=[True, True, False, False], due={3: 500.0})
    assert oracle.next_use(b) < oracle.next_use(a), "call 3 is due in 500 s; call 2 has no time yet"
