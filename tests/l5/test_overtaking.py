"""Lesson 5. Short prompts overtake long ones, counted in steps and tokens, and long ones finish hardly later for it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.engine.sampled import Sampled
from mini_engine.engine.scheduler import Scheduler
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.kv.manager import KvCacheManager
from tests.l5.helpers import CountingManager, by_id, request_of, scheduler_with

BUDGET = 64
LIMITS = {"max_num_seqs": 64, "max_num_batched_tokens": BUDGET, "chunked_prefill_size": BUDGET, "watermark": 0}


def waits_of(jobs, overtaking, blocks=10_000):
    """Return, for each (step of arrival, prompt tokens), how many steps and tokens pass until its first token.

    Answers have one token, so steps hold prompts and nothing else.
    """
    scheduler = Scheduler(KvCacheManager(blocks, 4), SchedulerConfig(**LIMITS, overtaking=overtaking))
    coming, since, waits, num_tokens, step = list(enumerate(jobs)), {}, {}, 0, 0
    while coming or scheduler.requests:
        while coming and coming[0][1][0] <= step:
            place, (_, prompt_len) = coming.pop(0)
            scheduler.add(request_of(prompt_len, max_tokens=1, name=str(place)))
            since[str(place)] = step, num_tokens
        chunks = scheduler.schedule()
        step, num_tokens = step + 1, num_tokens + sum(chunk.stop - chunk.start for chunk in chunks)
        for name in scheduler.update(chunks, [Sampled(1, None)] * sum(chunk.samples for chunk in chunks)):
            waits[int(name)] = step - since[name][0], num_tokens - since[name][1]
    return [waits[place] for place in range(len(jobs))]


FOUR_LONG = [(0, 700)] * 4


def test_a_short_prompt_need_not_wait_for_four_long_ones():
    *before, (in_order, _) = waits_of([*FOUR_LONG, (0, 4)], overtaking=0)
    *after, (steps, _) = waits_of([*FOUR_LONG, (0, 4)], overtaking=0.1)
    assert in_order == 44, "in order of arrival, 2,804 tokens in steps of 64 come first"
    assert steps == 2, "in the second step each long prompt has waited for 64 tokens: it gives way for 5 of them"
    assert [wait for wait, _ in after] == [wait for wait, _ in before], "four tokens delay no long prompt by a step"


def test_long_prompts_finish_at_most_a_tenth_later_whatever_arrives():
    """A short prompt arrives in every step, as long as the long ones run."""
    jobs = sorted([*FOUR_LONG, *((step, 30) for step in range(80))], key=lambda job: job[0])
    in_order, overtaken = waits_of(jobs, overtaking=0), waits_of(jobs, overtaking=0.1)
    for place, (_, prompt_len) in enumerate(jobs):
        if prompt_len == 700:
            assert overtaken[place][0] <= 1.1 * in_order[place][0] + 1, (
                f"a long prompt took {overtaken[place][0]} steps instead of {in_order[place][0]}: short ones that keep "
                "coming may delay it by a tenth, no more"
            )
    assert overtaken[4][0] <= 11 < in_order[4][0], "the first short prompt waits no longer than one long prompt takes"


@settings(max_examples=150, deadline=None)
@given(
    jobs=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 300)), min_size=2, max_size=14).map(sorted),
    overtaking=st.sampled_from([0.1, 0.5, 1.0]),
)
def test_no_prompt_waits_longer_than_promised_and_equals_keep_their_order(jobs, overtaking):
    in_order, now = waits_of(jobs, 0), waits_of(jobs, overtaking)
    for place, ((_, before), (_, after)) in enumerate(zip(in_order, now, strict=True)):
        assert after <= (1 + overtaking) * before + BUDGET, (
            f"prompt {place} of {jobs} waited for {after} tokens, in order of arrival for {before}"
        )
    ends = [step + wait for (step, _), (wait, _) in zip(jobs, now, strict=True)]
    for place, (_, prompt_len) in enumerate(jobs):
        later = [ends[other] for other in range(place + 1, len(jobs)) if jobs[other][1] >= prompt_len]
        assert all(ends[place] <= end for end in later), "a prompt was overtaken by one that is no shorter"


def waiting_since(manager=None, waiting=(), **limits):
    """Return a scheduler whose requests have all waited while 1,000 tokens were computed."""
    scheduler = scheduler_with(manager or CountingManager(usable=99), waiting=waiting, **limits)
    scheduler.num_scheduled = 1000
    return scheduler


def three(second=30):
    return [request_of(n, name=name) for name, n in (("a", 40), ("b", second), ("c", 3))]


def test_the_one_that_overtakes_gets_its_tokens_first():
    scheduler = waiting_since(waiting=three())
    assert by_id(scheduler.schedule()) == [("a", 0, 13), ("c", 0, 3)], "of a step of 16, c takes 3 and a the rest"
    assert [request.id for request in scheduler.running] == ["a", "c"], "the order of preemption stays that of arrival"
    assert [request.num_overtaken for request in (*scheduler.running, *scheduler.waiting)] == [3, 0, 3]


def test_overtaking_can_be_switched_off():
    assert by_id(waiting_since(waiting=three(), overtaking=0).schedule()) == [("a", 0, 16)]


@pytest.mark.parametrize(
    "limits, why",
    [
        ({"usable": 17}, "a and b are owed 10 and 8 of 17 blocks: b could not start beside a, so c must not take any"),
        ({"max_num_seqs": 2}, "the two seats are a's and b's"),
        ({"watermark": 99.0}, "b would have to leave 99 blocks free for a"),
    ],
)
def test_none_overtakes_a_request_that_waits_for_blocks_or_a_seat(limits, why):
    manager = CountingManager(usable=limits.pop("usable", 99))
    assert by_id(waiting_since(manager, waiting=three(), **limits).schedule()) == [("a", 0, 16)], why


def test_one_that_should_wait_a_step_does_not_overtake():
    scheduler = waiting_since(CountingManager(usable=99, held_back=3), waiting=three())
    assert by_id(scheduler.schedule()) == [("a", 0, 16)], "c's prefix is being computed by another request"
    assert all(request.num_overtaken == 0 for request in scheduler.running + scheduler.waiting)


def test_a_prompt_of_the_same_length_does_not_overtake():
    scheduler = waiting_since(waiting=[request_of(16, name=name) for name in "ab"])
    assert by_id(scheduler.schedule()) == [("a", 0, 16)], "b is no shorter than a, which the budget fits exactly"
