"""Lesson 14. A machine of hypothesis drives an engine with speculation: no block is lost, and only true tokens stay."""

import itertools
import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mini_engine.kv.radix_node import TOKEN_BYTES
from mini_engine.speculation.options import Speculation
from tests.l14.toys import ANY_LOAD, Always, cycle, engine_of, greedy, plain_engine
from tests.shared.trees import holders, nodes
from tests.support import thorough

PERIOD = 5


def guesses(request, count):
    """Guess right, wrong or anything between, always the same at the same place."""
    last, chance = request.token_ids[-1], random.Random(len(request.token_ids))
    right = [(last + i) % PERIOD + 1 for i in range(count)]
    return [token if chance.random() < 0.7 else 9 for token in right[: chance.randint(0, count)]]


class Speculating(RuleBasedStateMachine):
    """Requests arrive, are aborted and preempted, in a pool too small for all of them."""

    def __init__(self):
        super().__init__()
        self.engine = engine_of(
            cycle(PERIOD), Speculation(6, max_rows=ANY_LOAD), Always(guesses),
            num_blocks=14, max_num_seqs=4, max_num_batched_tokens=16, chunked_prefill_size=5,
        )  # fmt: skip
        self.added = []

    @property
    def manager(self):
        return self.engine.scheduler.manager

    @rule(start=st.integers(1, PERIOD), length=st.integers(1, 12), max_tokens=st.integers(1, 24))
    def add(self, start, length, max_tokens):
        prompt = [(start + i) % PERIOD + 1 for i in range(length)]
        self.added.append(self.engine.add_request(str(len(self.added)), prompt, greedy(max_tokens)))

    @rule(index=st.integers(0, 50))
    def abort(self, index):
        if self.added:
            self.engine.abort(self.added[index % len(self.added)].id)

    @rule(index=st.integers(0, 50))
    def step_with_an_abort(self, index):
        if self.added:
            self.engine.runner.during = lambda: self.engine.abort(self.added[index % len(self.added)].id)
        self.engine.step()
        self.engine.runner.during = lambda: None

    @rule(count=st.integers(1, 5))
    def step(self, count):
        for _ in range(count):
            self.engine.step()

    @rule()
    def evict(self):
        self.manager.coordinator.prefixes.tree.evict(2)

    @invariant()
    def blocks_are_where_they_belong(self):
        manager = self.manager
        assert sum(manager.blocks_by_state) == manager.num_usable_blocks, "a block is neither free, held nor cached"
        for request in self.engine.scheduler.running:
            table = manager.tables[request.id]
            assert table.num_tokens == request.num_computed_tokens, "a table counts tokens that were rejected"
            assert len(table.blocks) == -(-table.num_tokens // manager.block_size), "a block holds no token"
        assert holders(manager) == manager.allocator.counts, "a block's count is the number of its holders"

    @invariant()
    def the_tree_has_only_tokens_of_true_answers(self):
        for node in nodes(self.manager.coordinator.prefixes.tree):
            tokens = list(memoryview(bytes(node.key)).cast("I"))
            assert len(node.key) == len(node.blocks) * self.manager.block_size * TOKEN_BYTES
            assert all(b == a % PERIOD + 1 for a, b in itertools.pairwise(tokens)), "a wrong guess is cached"

    @invariant()
    def answers_are_those_of_the_model(self):
        for request in self.added:
            text = request.token_ids[len(request.prompt_ids) - 1 :]
            assert all(b == a % PERIOD + 1 for a, b in itertools.pairwise(text))
            assert len(request.output_ids) <= request.params.max_tokens and request.error is None

    def teardown(self):
        for _ in range(400):
            if not self.engine.has_unfinished:
                break
            self.engine.step()
        assert not self.engine.has_unfinished
        assert self.manager.blocks_by_state.held == 0, "blocks are held although every request has ended"
        assert self.manager.coordinator.prefixes.tree.num_protected == 0, "a prefix is still locked"
        for request in self.added:
            if request.finish_reason == "length":
                want = plain_engine(cycle(PERIOD))
                other = want.add_request("0", request.prompt_ids, request.params)
                while want.has_unfinished:
                    want.step()
                assert request.output_ids == other.output_ids


TestSpeculating = Speculating.TestCase
TestSpeculating.settings = settings(max_examples=thorough(60, 20), stateful_step_count=30)
