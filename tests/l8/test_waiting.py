"""Lesson 8. A request waits while another computes its prefix: first step by step, then in random order."""

import logging
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mini_engine.engine.engine import Engine
from mini_engine.engine.scheduler import Scheduler
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.kv.cache_coordinator import caching_manager
from tests.l8.with_sharing import check_books
from tests.stubs import VOCAB, StubRunner, drain, expected_answer, greedy, spans, stub_config

SIZE = 4
PROMPT = [7 + i % 11 for i in range(22)]  # five whole blocks, and half of one
STRANGER = list(range(30, 36))


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.CRITICAL)  # the engine logs the failures that these tests cause


class Watched(Scheduler):
    """Records each step's chunks, and which requests were held back, with what their admission would have cost."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.chunks, self.held, self.asked = [], {}, self.manager.cost
        self.manager.cost = self.cost

    def cost(self, token_ids, num_tokens, namespace=None):
        cost = self.asked(token_ids, num_tokens, namespace)
        if cost.should_wait:
            request = next(request for request in self.waiting if request.token_ids is token_ids)
            self.held[request] = cost.num_blocks
        return cost

    def schedule(self):
        self.held.clear()
        self.chunks = super().schedule()
        return self.chunks


def engine_of(usable=40, **limits):
    """Return a real engine, scheduler and caching_manager around lesson 5's stub model."""
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "chunked_prefill_size": 64, "watermark": 0} | limits
    scheduler = Watched(caching_manager(usable + 1, SIZE), SchedulerConfig(**limits))
    return Engine(stub_config(), scheduler, StubRunner(SIZE))


def add(engine, *names, prompt=PROMPT, max_tokens=3, **more):
    for name in names:
        engine.add_request(name, prompt, greedy(max_tokens, ignore_eos=True), **more)


def step(engine):
    """Run one step; return its chunks."""
    engine.step()
    return spans(engine.scheduler.chunks)


def fail():
    raise RuntimeError("a failure on purpose")


def test_twins_compute_their_prefix_once():
    engine = engine_of()
    add(engine, "a", "b", "c")
    assert step(engine) == [("a", 0, 22)], "b and c would compute what a computes in this very step"
    assert step(engine) == [("a", 22, 23), ("b", 20, 22), ("c", 20, 22)], "one step later, five blocks of six are there"
    for request in drain(engine).values():
        assert request.output_ids == expected_answer(PROMPT, 3, ()), "b and c must read what a wrote"
    assert engine.scheduler.manager.coordinator.prefixes.stats.found_tokens == 40


def test_later_requests_go_on_and_the_waiting_one_keeps_its_place():
    engine = engine_of(max_num_seqs=3)
    add(engine, "a", "b")
    add(engine, "c", prompt=STRANGER)
    add(engine, "d", prompt=STRANGER[::-1])
    assert step(engine) == [("a", 0, 22), ("c", 0, 6)], "c has nothing to wait for; the third seat is b's, not d's"
    assert step(engine) == [("a", 22, 23), ("c", 6, 7), ("b", 20, 22)]


def test_a_twin_waits_through_all_chunks_of_what_it_shares():
    engine = engine_of(chunked_prefill_size=6)
    add(engine, "a", prompt=PROMPT)
    add(engine, "b", prompt=[*PROMPT[:13], *STRANGER])
    assert [step(engine) for _ in range(4)] == [
        [("a", 0, 6)],
        [("a", 6, 12)],
        [("a", 12, 18), ("b", 12, 18)],  # from here on, each computes its own tokens
        [("b", 18, 19), ("a", 18, 22)],
    ]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_room_for_a_whole_answer_is_set_aside_for_a_waiting_request(policy):
    engine = engine_of(usable=14, reserve_answers=True, policy=policy)
    add(engine, "a", "b", max_tokens=7)  # 28 tokens with KV: seven blocks each
    add(engine, "c", prompt=STRANGER, max_tokens=3, priority=1)
    assert step(engine) == [("a", 0, 22)], (
        "seven blocks belong to a and seven are set aside for b: c must not take any of them"
    )
    assert step(engine) == [("a", 22, 23), ("b", 20, 22), ("c", 0, 6)], "b shares five blocks with a, so c fits now"


def test_an_abort_releases_the_twin():
    engine = engine_of(chunked_prefill_size=8)
    add(engine, "a", "b")
    assert step(engine) == [("a", 0, 8)]
    engine.abort("a")
    assert step(engine) == [("b", 8, 16)], "b must continue where a stopped"


def test_a_failed_request_leaves_nothing_of_its_answer():
    engine = engine_of()
    add(engine, "a", max_tokens=9)
    for _ in range(7):  # six tokens of the answer have KV: 28 tokens, seven whole blocks
        step(engine)
    [request] = engine.scheduler.running
    engine.runner.during = fail
    step(engine)
    assert (
        request.error and engine.scheduler.manager.coordinator.prefixes.tree.peek(request.token_ids).num_tokens == 20
    ), "the prompt's five blocks were stored while it ran; after a failure, no block of the answer can be trusted"


def test_an_answer_says_how_much_was_cached_when_it_was_first_admitted():
    engine = engine_of()
    add(engine, "a", max_tokens=9)
    step(engine)
    [request] = engine.scheduler.running
    engine.scheduler.preempt(request)
    step(engine)
    assert (request.num_preemptions, request.num_computed_tokens) == (1, 23), "it found what it had computed itself"
    assert request.num_cached_tokens == 0, (
        "nothing was cached when the request arrived: what it stored itself before its preemption is no hit"
    )


class World:
    """An engine whose requests share a lot. Each step is checked: which requests were admitted or waited, and why."""

    def __init__(self, **limits):
        options = {"max_num_seqs": 5, "max_num_batched_tokens": 20, "chunked_prefill_size": 7} | limits
        self.engine = engine_of(usable=24, **options)
        self.scheduler = self.engine.scheduler
        self.added, self.admitted_with, self.holds, self.disturbed, self.ended = {}, {}, {}, {}, set()

    def add(self, family, length, own, max_tokens, priority=0):
        prompt = random.Random(family).choices(range(1, VOCAB), k=length) + own
        name = f"r{len(self.added)}"
        params = greedy(max_tokens, ignore_eos=True)
        request = self.added[name] = self.engine.add_request(name, prompt, params, priority, namespace=family % 2)
        self.holds[request] = self.disturbed[request] = 0

    def disturb(self, how, which):
        """Abort or preempt a request, now or during the next step, or make that step fail."""
        running = self.scheduler.running
        request = running[which % len(running)] if running else None
        self.note_disturbances(1)
        if how == "fail":
            self.engine.runner.during = fail
        elif request and how == "abort in flight":
            self.engine.runner.during = lambda: self.engine.abort(request.id)
        elif request and how == "abort":
            self.engine.abort(request.id)
        elif request:
            self.scheduler.preempt(request)

    def note_disturbances(self, count):
        for request in self.scheduler.waiting:
            self.disturbed[request] += count

    def step(self):
        scheduler = self.scheduler
        preempted, schedule = scheduler.num_preemptions, scheduler.schedule

        def schedule_and_look():
            was_running, was_waiting = set(scheduler.running), list(scheduler.waiting)
            chunks = schedule()
            self.check_planned(chunks, was_running, was_waiting)
            return chunks

        scheduler.schedule = schedule_and_look
        finished = self.engine.step().finished
        scheduler.schedule = schedule
        self.engine.runner.during = None
        self.note_disturbances(scheduler.num_preemptions - preempted)
        for request in finished:
            self.ended.add(request.id)
            if not request.error:
                assert request.output_ids == expected_answer(request.prompt_ids, request.params.max_tokens, ())

    def check_planned(self, chunks, was_running, was_waiting):
        scheduler = self.scheduler
        new = [chunk.request for chunk in chunks if chunk.request not in was_running]
        for request in new:
            self.admitted_with[request] = len(request.token_ids)
        for at, chunk in enumerate(chunks):
            if chunk.request in new:
                self.check_computed_once(chunk, chunks[:at])
        for request in new:
            before = [each for each in scheduler.waiting if scheduler.order(each) < scheduler.order(request)]
            overtaken = [each.id for each in before if each not in scheduler.held]
            assert not overtaken, f"{request.id} overtook {overtaken}, which did not wait for a twin"
            promised = sum(map(scheduler.reserved_blocks, scheduler.running)) + sum(map(scheduler.held.get, before))
            assert promised <= scheduler.manager.num_free_blocks, (
                f"{request.id} took room that is set aside for {before}"
            )
        assert not scheduler.held or chunks, (
            "a request waits, but no running request computes anything it could wait for"
        )
        for request in scheduler.held:
            self.holds[request] += 1
            most = len(request.token_ids) * (1 + self.disturbed[request])  # its twin computes at least a token per step
            assert self.holds[request] <= most, f"{request.id} is held back for ever"

    def check_computed_once(self, chunk, before):
        """Assert that a new request computes no block that an earlier chunk of this step computes."""
        start, end = chunk.start, chunk.start + SIZE
        tokens, namespace = chunk.request.token_ids, chunk.request.namespace
        for other in before:
            twin = other.request
            same = twin.namespace == namespace and twin.token_ids[:end] == tokens[:end]
            if same and end < len(tokens) and end <= self.admitted_with[twin]:
                assert other.start >= end or other.stop <= start, (
                    f"{chunk.request.id} begins with tokens {start} … {end - 1}, and {twin.id} computes "
                    f"{other.start} … {other.stop - 1} of them in the same step: it should have waited"
                )

    def finish(self):
        for _ in range(3000):
            if not self.engine.has_unfinished:
                break
            self.step()
        left = sorted(self.scheduler.requests)
        assert not left, f"{left} never ended"
        assert {r.id for r in self.added.values() if r.finish_reason != "abort"} <= self.ended
        check_books(self.engine)
        assert self.scheduler.manager.blocks_by_state.held == 0, "blocks leaked"


HOW = ("abort", "abort in flight", "preempt", "fail")
OWN = st.lists(st.integers(1, VOCAB - 1), max_size=6)


class WaitingMachine(RuleBasedStateMachine):
    """Requests with common beginnings arrive, end, fail and are preempted, in a pool that holds only a few of them."""

    @initialize(
        policy=st.sampled_from(["fcfs", "priority"]),
        reserve=st.booleans(),
        chunk=st.sampled_from([1, 3, 7, 20]),
        watermark=st.sampled_from([0, 0.5]),
    )
    def begin(self, policy, reserve, chunk, watermark):
        limits = {"policy": policy, "reserve_answers": reserve, "watermark": watermark}
        self.world = World(chunked_prefill_size=chunk, **limits)

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 40),
        own=OWN,
        rest=st.tuples(st.integers(1, 9), *[st.integers(0, 2)]),
    )
    def add(self, family, length, own, rest):
        self.world.add(family, length, own, *rest)

    @rule(family=st.integers(0, 2), length=st.integers(9, 40), count=st.integers(2, 4), max_tokens=st.integers(1, 9))
    def add_twins(self, family, length, count, max_tokens):
        for _ in range(count):
            self.world.add(family, length, [], max_tokens)

    @rule(count=st.integers(1, 6))
    def steps(self, count):
        for _ in range(count):
            self.world.step()

    @rule(how=st.sampled_from(HOW), which=st.integers(0, 4))
    def disturb(self, how, which):
        self.world.disturb(how, which)

    @invariant()
    def the_books_are_right(self):
        if hasattr(self, "world"):
            check_books(self.world.engine)

    def teardown(self):
        if hasattr(self, "world"):
            self.world.finish()


TestWaitingMachine = WaitingMachine.TestCase
TestWaitingMachine.settings = settings(max_examples=12, stateful_step_count=30, deadline=None)
