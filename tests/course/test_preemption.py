"""Course machinery. Preemption always lets requests get on: for each family's memories, in pools that are too small.

Protects servers and scripts from running for ever. The first of all requests, in the policy's order, never loses its
place and computes something in each step, so it ends, and then the next one is the first. Each test runs lesson 5's
engine around a model that only reads what was written. Latents need what dense models need: `cached`.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.engine.engine import Engine
from mini_engine.engine.scheduler import Scheduler
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.engine.turns import give_place
from mini_engine.kv.cache_coordinator import caching_manager
from mini_engine.kv.manager import KvCacheManager
from tests.l5.helpers import StubRunner, expected_answer, greedy, stub_config
from tests.l11.ledger import Hybrid
from tests.shared.window_ledger import Windows

pytestmark = pytest.mark.ci
SIZE, BUDGET, CHUNK, PLACES = 4, 9, 7, 4
FAMILIES = {
    "plain": lambda num_blocks: KvCacheManager(num_blocks, SIZE),
    "cached": lambda num_blocks: caching_manager(num_blocks, SIZE),
    "windows": lambda num_blocks: Windows(6, 2, num_blocks, SIZE, CHUNK).manager,
    "hybrid": lambda num_blocks: Hybrid(PLACES, 3, num_blocks, SIZE, 8).manager,
    "hybrid, few slots": lambda num_blocks: Hybrid(2, 1, num_blocks, SIZE, 32).manager,
    "hybrid without checkpoints": lambda num_blocks: Hybrid(PLACES, 0, num_blocks, SIZE, 8).manager,
}
each_family = pytest.mark.parametrize("family", FAMILIES)


def engine_of(family, num_blocks, policy="fcfs", places=PLACES, watermark=0.0):
    manager = FAMILIES[family](num_blocks)
    limits = SchedulerConfig(places, BUDGET, CHUNK, watermark, policy=policy)
    return Engine(stub_config(), Scheduler(manager, limits), StubRunner(SIZE))


def prompt_of(chance, most=40):
    """Return a prompt that begins like others."""
    return [chance.randrange(2) + 1 for _ in range(2)] + [3] * chance.randrange(most - 4) + [chance.randrange(9)]


class World:
    """An engine whose pool has room for its largest request and little more, and what its requests should answer."""

    def __init__(self, family, chance, policy, places):
        asked = [(prompt_of(chance), chance.randint(1, 14), chance.randrange(3)) for _ in range(chance.randint(2, 7))]
        self.asked, self.chance, self.added = asked, chance, []
        shape = dict(policy=policy, places=places, watermark=chance.choice([0, 0.5]))
        for num_blocks in range(2, 99):  # the smallest pool that takes each of them alone
            self.engine = engine_of(family, num_blocks + chance.choice([0, 0, 1, 4]), **shape)
            if all(self.fits(len(prompt) + max_tokens - 1) for prompt, max_tokens, _ in asked):
                return

    def fits(self, num_tokens):
        manager = self.engine.scheduler.manager
        need = manager.most_blocks(num_tokens)
        return need <= manager.num_usable_blocks

    def add(self):
        index = len(self.added)
        prompt, max_tokens, priority = self.asked[index]
        self.added.append(self.engine.add_request(f"r{index}", prompt, greedy(max_tokens), priority))

    def step(self):
        """Run one step, and check what it did to the first request of all."""
        scheduler = self.engine.scheduler
        first = min(scheduler.requests.values(), key=scheduler.order)
        before = first.num_computed_tokens, first.num_preemptions, first in scheduler.running
        give_place(scheduler)
        if scheduler.requests:
            self.engine.step()
        if before[2]:
            assert first.num_preemptions == before[1], f"{first.id} is the first, and was preempted"
            assert first.is_finished or first.num_computed_tokens > before[0], f"{first.id}, the first, got nothing"

    def finish(self):
        num_steps = 0
        while self.engine.has_unfinished or len(self.added) < len(self.asked):
            if len(self.added) < len(self.asked) and (self.chance.random() < 0.3 or not self.engine.has_unfinished):
                self.add()
            self.step()
            num_steps += 1
        assert num_steps <= 2 * sum(len(prompt) + max_tokens for prompt, max_tokens, _ in self.asked)


@each_family
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), places=st.integers(1, PLACES))
def test_the_first_request_always_gets_on_so_all_end(family, policy, seed, places):
    world = World(family, random.Random(seed), policy, places)
    world.finish()
    for request in world.added:
        assert request.output_ids == expected_answer(request.prompt_ids, request.params.max_tokens), request.error
    manager = world.engine.scheduler.manager
    assert manager.blocks_by_state.held == 0


@each_family
def test_requests_are_preempted_at_all(family):
    """Otherwise the test before shows nothing."""
    total = 0
    for seed in range(10):
        world = World(family, random.Random(seed), "fcfs", PLACES)
        world.finish()
        total += world.engine.scheduler.num_preemptions
    assert total > 3
