"""Lesson 20. Waiting requests in the order of their cached prefixes, and a bound on how long one can be overtaken."""

import gc

import pytest

from mini_engine.agents.longest_prefix import LongestPrefixFirst
from mini_engine.base.errors import UserError
from mini_engine.engine.request import Request
from mini_engine.engine.sampling_params import SamplingParams
from tests.support import must_raise


def waiting_for(*cached):
    """Return requests that arrived in this order and have so many tokens cached, and a function that says so."""
    requests = [Request(f"{arrival}", [1, 2, 3], SamplingParams()) for arrival in range(len(cached))]
    for arrival, request in enumerate(requests):
        request.arrival = arrival
    known = {request.id: num for request, num in zip(requests, cached, strict=True)}
    return requests, lambda request: known[request.id]


def names(requests):
    return [request.id for request in requests]


@pytest.mark.task(8)
def test_the_longest_cached_prefix_goes_first():
    waiting, num_cached = waiting_for(0, 32, 16)
    arrange = LongestPrefixFirst(num_cached)
    arrange(waiting)
    assert names(waiting) == ["1", "2", "0"], "request 1 has 32 tokens cached, 2 has 16 and 0 none"


@pytest.mark.task(8)
def test_among_equals_the_first_come_goes_first():
    waiting, num_cached = waiting_for(16, 0, 16, 0)
    waiting.reverse()
    LongestPrefixFirst(num_cached)(waiting)
    assert names(waiting) == ["0", "2", "1", "3"], "two have 16 tokens cached and two none: arrival decides"


@pytest.mark.task(8)
def test_none_is_overtaken_for_ever():
    (first, *others), num_cached = waiting_for(0, 32, 32, 32, 32)
    arrange = LongestPrefixFirst(num_cached, max_steps=3)
    for step, other in enumerate(others[:3], 1):
        waiting = [first, other]  # the last one was admitted, another one has come
        arrange(waiting)
        assert waiting == [other, first], f"after {step} of 3 steps, request 0 can still be overtaken"
    waiting = [first, others[3]]
    arrange(waiting)
    assert names(waiting) == ["0", "4"], (
        "request 0 has waited for more than 3 steps: from now on it goes before all that have not, whatever they have"
    )


@pytest.mark.task(8)
def test_of_those_that_waited_too_long_the_first_come_goes_first():
    waiting, num_cached = waiting_for(0, 64, 32)
    arrange = LongestPrefixFirst(num_cached, max_steps=0)
    arrange(waiting)
    assert names(waiting) == ["0", "1", "2"], (
        "all three have waited too long: if their prefixes decided again, request 0 could starve among them"
    )


@pytest.mark.task(8)
def test_steps_are_counted_for_each_request():
    waiting, num_cached = waiting_for(0, 32, 64)
    late = waiting.pop()
    arrange = LongestPrefixFirst(num_cached, max_steps=1)
    arrange(waiting)
    waiting.append(late)
    arrange(waiting)
    assert names(waiting) == ["0", "1", "2"], (
        "requests 0 and 1 have waited for two steps, request 2 for one: it may not overtake them, with 64 tokens cached"
    )


@pytest.mark.task(8)
def test_only_the_first_ones_are_looked_up():
    waiting, num_cached = waiting_for(0, 16, 32, 64)
    asked = []
    arrange = LongestPrefixFirst(lambda request: asked.append(request.id) or num_cached(request), most=3)
    arrange(waiting)
    assert names(waiting) == ["2", "1", "0", "3"], (
        "most=3: the three that came first are sorted, the fourth one stays behind them though it has the most"
    )
    assert set(asked) <= {"0", "1", "2"}, "a lookup costs time: those that are not sorted are not looked up"
    arrange(waiting)
    assert names(waiting) == ["2", "1", "0", "3"], (
        "the first three are those that came first, not those that happen to stand in front after the last step"
    )


@pytest.mark.task(8)
def test_one_that_was_looked_up_once_is_looked_up_again():
    waiting, _ = waiting_for(16, 32)
    cached = {"0": 16, "1": 32}
    arrange = LongestPrefixFirst(lambda request: cached[request.id])
    arrange(waiting)
    cached["1"] = 0
    arrange(waiting)
    assert names(waiting) == ["0", "1"], "request 1's prefix has been evicted meanwhile: ask again at every step"


def test_a_request_that_has_left_is_forgotten():
    waiting, num_cached = waiting_for(0, 16)
    arrange = LongestPrefixFirst(num_cached)
    arrange(waiting)
    waiting.clear()
    gc.collect()
    assert len(arrange.steps) == 0, "requests come for months: what is counted for one must go with it"


@pytest.mark.parametrize("wrong", [{"max_steps": -1}, {"most": -1}])
def test_bounds_below_0_are_refused(wrong):
    with must_raise(UserError, "neither bound can be negative"):
        LongestPrefixFirst(lambda request: 0, **wrong)
