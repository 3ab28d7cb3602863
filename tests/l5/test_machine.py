"""Lesson 5. Random sequences of events, chosen by hypothesis, with a check of all blocks and queues after each step."""

import logging

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mini_engine.base.errors import UserError
from tests.stubs import EOS, VOCAB, check_books, check_empty, expected_answer, greedy, stub_engine

USABLE, SIZE = 12, 4


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.CRITICAL)  # the engine logs the failures that these tests inject


class World:
    """An engine and the expected outcome of each of its requests."""

    def __init__(self, **limits):
        self.engine = stub_engine(
            USABLE, SIZE, max_num_seqs=4, max_num_batched_tokens=7, chunked_prefill_size=6, **limits
        )
        self.added, self.ended, self.growth, self.forced = {}, set(), 0, 0

    def add(self, prompt_len, max_tokens, seed, priority=0):
        prompt = [(seed * 13 + i * 7) % (VOCAB - 1) + 1 for i in range(prompt_len)]
        name, kv_tokens = f"r{len(self.added)}", prompt_len + max_tokens - 1
        if prompt_len == 0 or -(-kv_tokens // SIZE) > USABLE:
            before = set(self.engine.scheduler.requests)
            with pytest.raises(UserError):
                self.engine.add_request(name, prompt, greedy(max_tokens), priority)
            assert set(self.engine.scheduler.requests) == before
            return
        self.added[name] = self.engine.add_request(name, prompt, greedy(max_tokens), priority)
        self.growth += -(-kv_tokens // SIZE) - -(-prompt_len // SIZE)

    def alive(self):
        return sorted(self.engine.scheduler.requests)

    def abort(self, which):
        name = f"r{which % (len(self.added) + 1)}"
        was_there = name in self.engine.scheduler.requests
        assert self.engine.abort(name) is was_there
        self.ended |= {name} if was_there else set()

    def preempt(self, which):
        running = self.engine.scheduler.running
        if running:
            self.engine.scheduler.preempt(running[which % len(running)])
            self.forced += 1

    def step(self):
        running = self.engine.scheduler.running
        decoding = {r.id: r.num_preemptions for r in running if not r.is_prefilling}
        result = self.engine.step()
        for request in result.finished:
            assert request.id not in self.ended, f"{request.id} ended twice"
            self.ended.add(request.id)
            self.check_answer(request)
        spared = {name for name, times in decoding.items() if self.added[name].num_preemptions == times}
        if not any(r.error for r in result.finished):
            missed = spared - set(result.new_tokens) - {n for n in spared if self.added[n].finish_reason == "abort"}
            assert not missed, f"{missed} were decoding but got no token: see continue_running (task 2)"
        stats = result.stats
        computed = stats.prefill_tokens + stats.decode_tokens
        assert computed <= 7, f"{computed} tokens in a step of 7: see continue_running (task 2) and admit (task 4)"
        assert stats.num_running <= 4, f"{stats.num_running} run, max_num_seqs is 4: see admit (task 4)"
        assert sum(stats.blocks) == USABLE, f"{stats.blocks} are not the pool's {USABLE} blocks"
        # a forced preemption frees the blocks that an answer grew by, which may then be needed again
        assert self.engine.scheduler.num_preemptions - self.forced <= self.growth, (
            "more preemptions than blocks that answers grew by: see make_room (task 3)"
        )

    def check_answer(self, request):
        if request.finish_reason != "error":
            want = expected_answer(request.prompt_ids, request.params.max_tokens)
            assert request.output_ids == want, (
                f"{request.id}, preempted {request.num_preemptions} times, has another answer than alone: it read "
                "slots that were unwritten or another's, or got another request's token"
            )
            reason = "stop" if want[-1] == EOS else "length"
            assert request.finish_reason == reason, (
                f"{request.id} ended by {request.finish_reason}: see update (task 5)"
            )

    def fail(self):
        raise RuntimeError("injected failure")

    def finish(self):
        self.engine.runner.during = None
        for _ in range(3000):
            if not self.engine.has_unfinished:
                break
            self.step()
        assert not self.engine.has_unfinished, f"{self.alive()} never finished"
        assert self.ended == set(self.added), "every request must end"
        check_empty(self.engine)


class EngineMachine(RuleBasedStateMachine):
    """Requests arrive, end, fail and are preempted, in a pool with room for about two of them."""

    @initialize(
        policy=st.sampled_from(["fcfs", "priority"]),
        watermark=st.sampled_from([0, 0.5]),
        overtaking=st.sampled_from([0.1, 1]),
    )
    def begin(self, **limits):
        self.world = World(**limits)

    @rule(
        prompt_len=st.integers(0, 40), max_tokens=st.integers(1, 20), seed=st.integers(0, 9), priority=st.integers(0, 2)
    )
    def add(self, prompt_len, max_tokens, seed, priority):
        self.world.add(prompt_len, max_tokens, seed, priority)

    @rule(count=st.integers(1, 8))
    def steps(self, count):
        for _ in range(count):
            self.world.step()

    @rule(which=st.integers(0, 50))
    def abort(self, which):
        self.world.abort(which)

    @rule(which=st.integers(0, 50))
    def abort_in_flight(self, which):
        self.world.engine.runner.during = lambda: self.world.abort(which)
        self.world.step()

    @rule(which=st.integers(0, 3))
    def preempt(self, which):
        self.world.preempt(which)

    @rule()
    def fail_in_flight(self):
        self.world.engine.runner.during = self.world.fail
        self.world.step()

    @invariant()
    def the_books_are_right(self):
        if hasattr(self, "world"):
            check_books(self.world.engine)

    def teardown(self):
        if hasattr(self, "world"):
            self.world.finish()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
