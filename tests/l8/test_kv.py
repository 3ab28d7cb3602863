"""Lesson 8. Shared blocks hold what the request that computed them wrote, and answers equal a cold run's."""

import random

import pytest
import torch

from mini_engine.attention.registry import load_kernel
from mini_engine.engine.engine import Engine
from mini_engine.engine.offline import generate_all
from mini_engine.engine.request import Request
from mini_engine.engine.runner import ModelRunner
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler import Chunk
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.kv.block_tensor import KvPool
from mini_engine.kv.cache_coordinator import caching_manager
from tests.shared.trees import contents
from tests.support import both, hf_greedy, some_ids

FAMILY = "one query a key head, untied"
SIZE = 4


def greedy(max_tokens):
    return SamplingParams(temperature=0, max_tokens=max_tokens)


class Driver:
    """A manager, a pool and a model, driven by hand. `written` maps each prefix to every row ever computed for it."""

    def __init__(self, usable=40, kernel="auto"):
        self.model, self.hf = both(FAMILY)
        self.pool = KvPool(self.model.config, usable + 1, SIZE, load_kernel(kernel, torch.device("cpu"), torch.float32))
        self.manager = caching_manager(usable + 1, SIZE, self.pool.copy_blocks)
        self.runner = ModelRunner(self.model, self.pool)
        self.requests, self.written = {}, {}

    def begin(self, name, tokens):
        request = self.requests[name] = Request(name, list(tokens), greedy(1))
        request.num_computed_tokens = self.manager.allocate(name, tokens)
        return request

    def chunk(self, name, count=None):
        """Reserve room for the next `count` tokens, or for all; return the chunk to run."""
        request = self.requests[name]
        start = request.num_computed_tokens
        stop = len(request.token_ids) if count is None else start + count
        return Chunk(request, start, stop, self.manager.grow(name, stop))

    def run(self, *chunks):
        """Run one step; return the logits of each chunk that samples."""
        logits = self.runner.run(chunks)
        for chunk in chunks:
            for position in range(chunk.start, chunk.stop):
                prefix = tuple(chunk.request.token_ids[: position + 1])
                self.written.setdefault(prefix, []).append(self.row(chunk.blocks[position // SIZE], position % SIZE))
        for chunk in chunks:
            chunk.request.num_computed_tokens = chunk.stop
            self.manager.commit(chunk.request.id, chunk.request.token_ids, chunk.stop)
        return logits

    def row(self, block, offset):
        """Return a copy of K and V of one slot in all layers."""
        return torch.stack([x[block, offset] for x in (*self.pool.K, *self.pool.V)])

    def end(self, *names):
        for name in names:
            request = self.requests.pop(name)
            self.manager.free(name, request.computed_ids)

    def serve(self, name, tokens, count=None):
        """Run a prompt from beginning to end, `count` tokens per step; return the logits of its last token."""
        self.begin(name, tokens)
        while self.requests[name].num_uncomputed_tokens > (count or len(tokens)):
            self.run(self.chunk(name, count))
        logits = self.run(self.chunk(name))
        self.end(name)
        return logits[0]

    def cold(self, tokens):
        """Return the logits of the last token, and K and V rows of all tokens, computed in a fresh pool."""
        other = Driver()
        other.begin("cold", tokens)
        logits = other.run(other.chunk("cold"))
        return logits[0], [other.written[tuple(tokens[: i + 1])][0] for i in range(len(tokens))]

    def check(self):
        """Assert that stored blocks hold rows computed for their tokens, bit for bit, and near a cold run's."""
        stored = contents(self.manager.coordinator.prefixes.tree)
        longest = [key for _, key in stored if not any(o != key and o.startswith(key) for _, o in stored)]
        for key in longest:
            tokens = memoryview(key).cast("I").tolist()
            _, cold = self.cold(tokens)
            for position in range(len(tokens)):
                block = stored[None, key[: (position // SIZE + 1) * SIZE * 4]]
                row = self.row(block, position % SIZE)
                made = self.written[tuple(tokens[: position + 1])]
                assert any(torch.equal(row, other) for other in made), (
                    f"block {block} holds at position {position} a row that was never computed for these tokens"
                )
                torch.testing.assert_close(row, cold[position], rtol=1e-5, atol=1e-5)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert int(ours.argmax()) == int(theirs.argmax())


@pytest.mark.parametrize("kernel", ["reference", "torch", "auto"])
def test_a_suffix_behind_a_cached_prefix_sees_no_future(kernel):
    driver, prompt = Driver(kernel=kernel), some_ids(19, 160)
    driver.serve("a", prompt[:8])
    logits = driver.serve("b", prompt)
    reference, _ = driver.cold(prompt)
    torch.testing.assert_close(
        logits,
        reference,
        rtol=1e-4,
        atol=1e-4,
        msg="eleven queries behind eight keys: the mask must be aligned to the bottom right",
    )


def test_a_twin_that_waited_a_step_reads_what_the_first_wrote():
    driver, prompt = Driver(), some_ids(14, 160)
    driver.begin("a", prompt)
    first = driver.chunk("a")
    assert driver.manager.cost(prompt, 14).should_wait
    a = driver.run(first)[0]
    assert driver.begin("b", prompt).num_computed_tokens == 12
    b = driver.run(driver.chunk("b"))[0]
    close(b, a)
    close(b, driver.cold(prompt)[0])
    driver.end("a", "b")
    driver.check()


def test_twins_that_did_not_wait_end_with_one_copy():
    driver, prompt = Driver(), some_ids(14, 160)
    driver.begin("a", prompt)
    driver.begin("b", prompt)
    a, b = driver.run(driver.chunk("a"), driver.chunk("b"))
    close(b, a)
    assert driver.manager.tables["a"].blocks[:3] == driver.manager.tables["b"].blocks[:3], "b's own blocks were freed"
    driver.end("a", "b")
    driver.check()


def test_stored_blocks_hold_what_was_computed_after_splits_evictions_and_reuse():
    driver, chance = Driver(usable=14), random.Random(0)
    families = [some_ids(30, 160, seed) for seed in range(3)]
    for index in range(30):
        prompt = families[chance.randrange(3)][: chance.randrange(3, 28)] + some_ids(chance.randrange(1, 9), 160, index)
        logits = driver.serve(f"r{index}", prompt, count=chance.choice([None, 3, 5]))
        if index % 6 == 0:
            close(logits, driver.cold(prompt)[0])
            driver.check()
    driver.check()
    prefixes = driver.manager.coordinator.prefixes
    assert prefixes.tree.num_evicted > 20 and prefixes.stats.num_hits > 10


def test_stored_blocks_survive_a_write_behind_a_truncation():
    driver, prompt = Driver(), some_ids(14, 160)
    driver.begin("a", prompt)
    driver.run(driver.chunk("a"))
    request = driver.requests["a"]
    driver.manager.truncate("a", 6)  # into a stored block
    request.token_ids[6:], request.num_computed_tokens = [7, 8, 9], 6
    close(driver.run(driver.chunk("a"))[0], driver.cold([*prompt[:6], 7, 8, 9])[0])
    driver.end("a")
    driver.check()
    close(driver.serve("c", [*prompt, 3, 4]), driver.cold([*prompt, 3, 4])[0])


def turns(engine, rounds=4):
    """Run a chat; each prompt is the whole conversation so far and something new."""
    history, asked = [], []
    for turn in range(rounds):
        history = history + some_ids(7, 160, turn)
        answer = generate_all(engine, [history], greedy(9), progress=False)[0].token_ids
        asked.append((history, answer))
        history = history + answer
    return asked


@pytest.mark.parametrize(
    "blocks, chunk",
    [(60, 5), (18, 6), *(pytest.param(blocks, 512, marks=pytest.mark.nightly) for blocks in (60, 18))],
)
def test_answers_are_hugging_face_s_in_chats_branches_and_small_pools(blocks, chunk):
    model, hf = both(FAMILY)
    limits = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, chunked_prefill_size=chunk)
    options = {"scheduler_config": limits, "manager": caching_manager}
    engine = Engine.for_model(model, num_blocks=blocks, block_size=SIZE, **options)
    common = some_ids(18, 160, 50)
    asked = turns(engine)
    for prompts in (
        [common + some_ids(n, 160, n) for n in range(1, 6)],
        [common, common, common[:9] + some_ids(9, 160)],
    ):
        answers = [done.token_ids for done in generate_all(engine, prompts, greedy(9), progress=False)]
        asked += zip(prompts, answers, strict=True)
    for prompt, answer in asked:
        assert answer == hf_greedy(hf, prompt, 9), "behind a cached prefix, the tokens must equal a cold run's"
    manager = engine.scheduler.manager
    assert manager.coordinator.prefixes.stats.num_hits >= 6 and manager.blocks_by_state.held == 0


def test_the_last_token_of_an_answer_is_not_cached():
    model, hf = both(FAMILY)
    engine = Engine.for_model(model, num_blocks=40, block_size=SIZE, manager=caching_manager)
    prompt = some_ids(5, 160)
    [done] = generate_all(engine, [prompt], greedy(7), progress=False)  # 12 tokens in all: three whole blocks
    answer = done.token_ids
    assert engine.scheduler.manager.coordinator.prefixes.tree.peek(prompt + answer).num_tokens == 8, (
        "the last token was sampled but never fed: its KV was never written, so its block must not be cached"
    )
    follow = prompt + answer + [3]
    assert generate_all(engine, [follow], greedy(5), progress=False)[0].token_ids == hf_greedy(hf, follow, 5)
