"""Lesson 15. Windows come back with lesson 12's blocks: after eviction, after a restart, and never another text's."""

import random
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from mini_engine.kv.radix_node import TOKEN_BYTES, key_of
from mini_engine.model.qwen3 import qwen3_model
from mini_engine.tiers.companions import item_key
from mini_engine.tiers.records import Kind
from mini_engine.tiers.tiers import Tiers
from tests.l15.cells import GROUPS, MOST, POOL, Cells, connected, served
from tests.l15.pocket import (
    BLOCK,
    PROMPTS,
    ask,
    check_answers,
    check_nothing_is_lost,
    drain,
    model,
    windows,
)
from tests.support import some_ids, thorough

pytestmark = pytest.mark.reference  # no task is about this
LONG = PROMPTS[-1]
REACH = 3  # blocks that a window of 23 needs before a token


def with_tiers(folder=None, **options):
    return windows(kv_cache_dir=folder, **{"kv_host_bytes": 2**28, "kv_always": True} | options)


def answered(engine, when, prompts=PROMPTS):
    requests = ask(engine, prompts, name=when)
    drain(engine)
    return check_answers(requests, when)


def store_of(engine):
    return engine.scheduler.manager.coordinator.connector.block_store


def prefixes_of(engine):
    return engine.scheduler.manager.coordinator.prefixes


def lose(store, tokens, index):
    """Drop the windows of a text's block from host memory."""
    prefix = store.prefix(key_of(tokens), None, BLOCK * TOKEN_BYTES)
    record = store.tiers.host.records.pop(item_key(prefix.keys[index + 1], Kind.WINDOW))
    store.tiers.host.num_bytes -= record.num_bytes


def test_the_writer_has_room_for_the_windows_of_a_long_prompt(tmp_path):
    """59 blocks in one step: as many records of windows, and none of them is dropped."""
    first, prompt = with_tiers(tmp_path), tuple(some_ids(473, 2000))
    answered(first, "cold", [prompt])
    store_of(first).tiers.close()
    assert store_of(first).tiers.writer.num_dropped == 0
    assert answered(with_tiers(tmp_path), "from the disk", [prompt]) == [472]


@pytest.mark.parametrize(("lost", "found"), [(15, 15), (14, 14), (13, 13), (12, 16), (0, 16)])
def test_behind_windows_that_were_lost_a_request_begins_earlier(lost, found):
    engine = with_tiers()
    answered(engine, "cold", [LONG])
    prefixes_of(engine).clear()
    lose(store_of(engine), LONG, lost)
    assert answered(engine, "without one", [LONG]) == [found * BLOCK], (
        f"a window reaches over {REACH} blocks: without that of block {lost}, a request can begin behind {found}"
    )
    check_nothing_is_lost(engine)


def test_windows_that_the_request_holds_need_no_record():
    engine = with_tiers()
    answered(engine, "cold", [LONG])
    prefixes_of(engine).clear()
    answered(engine, "a shorter one", [LONG[: 14 * BLOCK + 1]])
    assert prefixes_of(engine).peek(LONG, None, {}).num_tokens == 14 * BLOCK
    lose(store_of(engine), LONG, 13)
    lose(store_of(engine), LONG, 12)
    assert answered(engine, "the whole one", [LONG]) == [16 * BLOCK], (
        "the tree has windows 12 and 13, the host the rest"
    )


def test_where_the_tree_has_lost_its_windows_the_tiers_have_them():
    engine = with_tiers()
    answered(engine, "cold", [LONG])
    kept = engine.scheduler.manager.coordinator.memory.kept
    kept.trim(1000)
    kept.evict(1000)
    assert not kept.companions and prefixes_of(engine).peek(LONG, None, {}).num_tokens == 0
    assert answered(engine, "tombstones", [LONG]) == [16 * BLOCK], "a tombstone is no reason to compute a prompt again"
    check_nothing_is_lost(engine)


def test_models_that_differ_in_nothing_but_the_window_share_no_record(tmp_path):
    first = with_tiers(tmp_path)
    answered(first, "cold", [LONG])
    store_of(first).tiers.close()
    config = model().config
    other = qwen3_model(replace(config, sliding_window=config.sliding_window + 1))
    other.load_state_dict(model().state_dict())
    second = with_tiers(tmp_path, over=other.eval().requires_grad_(False))
    [request] = ask(second, [LONG])
    drain(second)
    assert not request.error and request.num_cached_tokens == 0, "K and V behind layer 1 follow from the window"
    assert store_of(second).restored_tokens == 0


def test_what_pays_is_measured_with_the_windows():
    engine = with_tiers(kv_always=False)
    assert answered(engine, "cold") == [0, 0, 0, 0]
    prefixes_of(engine).clear()
    answered(engine, "warm")
    assert store_of(engine).min_tokens.host > 0, "each time the last windows come back, too"


# ---------------------------------------------------------------- what is saved, and what is asked for

FAMILIES = [random.Random(seed).choices(range(2), k=MOST - 10) for seed in range(2)]


def kinds(host):
    """Return how many records of blocks and of windows host memory has."""
    found = [record.kind for record in host.records.values()]
    return found.count(Kind.KV), found.count(Kind.WINDOW)


def test_every_new_block_is_saved_with_its_windows_while_the_request_holds_them():
    tiers = Tiers.of_size(None, 10**7, 0)
    kv = connected(tiers)
    served(kv, "a", [1] * 30)
    assert kinds(tiers.host) == (7, 7), "the windows are saved before the request gives them up"
    tiers.host.clear()
    kv.coordinator.clear()
    kv.allocate("b", [1] * 30)
    for stop in (8, 16, 24, 30):
        kv.grow("b", stop)
        kv.write("b", [1] * 30, stop - 8 if stop < 30 else 24, stop)
        kv.commit("b", [1] * 30, stop)
    tiers.host.clear()
    kv.free("b", [1] * 30)
    assert kinds(tiers.host) == (0, 0), "what was saved once is not saved again"
    tiers.close()


def test_a_block_s_windows_are_handed_over_right_behind_it():
    tiers = Tiers.of_size(None, 10**7, 0)
    kv = connected(tiers)
    served(kv, "a", [1] * 9)
    order = [record.kind for record in tiers.host.records.values()]
    assert order == [Kind.KV, Kind.WINDOW] * 2, "were all blocks first, a writer that is behind would drop all windows"
    tiers.close()


def test_of_an_answer_the_windows_that_are_left_are_saved():
    tiers = Tiers.of_size(None, 10**7, 0)
    kv = connected(tiers)
    tokens = [1] * 5
    kv.allocate("a", tokens)
    tokens += [0] * 27
    while (start := kv.hold("a").num_computed) < len(tokens):
        stop = start + 5 if not start else start + 1
        kv.grow("a", stop)
        kv.write("a", tokens, start, stop)
        kv.commit("a", tokens, stop)
    kv.free("a", tokens)
    assert kinds(tiers.host) == (8, 1 + 2), "of the prompt, and of the last window of the answer"
    kv.coordinator.clear()
    assert served(kv, "b", [*tokens, 1]) == 32, "a conversation goes on behind the answer"
    tiers.close()


def test_only_the_last_window_is_read():
    tiers = Tiers.of_size(None, 10**7, 0)
    kv = connected(tiers)
    served(kv, "a", [1] * 42)
    kv.coordinator.clear()
    before = tiers.num_found["host"]
    assert served(kv, "b", [1] * 42) == 40
    assert tiers.num_found["host"] - before == 10 + 2, "ten blocks, and the two that 5 tokens can touch"
    tiers.close()


def test_without_room_for_what_the_tiers_have_a_request_begins_at_its_first_token():
    tiers = Tiers.of_size(None, 10**7, 0)
    kv = connected(tiers)
    tokens = [1] * 42
    served(kv, "a", tokens)
    kv.coordinator.clear()
    needed = 10 + 2 * GROUPS
    held = kv.allocator.alloc_blocks(POOL - 1 - (needed - 1))
    assert kv.allocate("b", tokens) == 0, f"{needed} blocks come back, and one less is free"
    assert kv.num_free_blocks == needed - 1, "what cannot be loaded takes no block"
    kv.free("b")
    kv.allocator.free(held[:1])
    assert kv.allocate("c", tokens) == 40 and kv.num_free_blocks == 0, "exactly enough"
    kv.check_reads("c", tokens, 40, 40)
    kv.free("c")
    tiers.close()


def test_a_window_s_record_is_no_block_s():
    tiers = Tiers.of_size(None, 10**7, 0)
    kv = connected(tiers)
    served(kv, "a", [1] * 9)
    by_kind = {record.kind: record for record in tiers.host.records.values()}
    block, window = by_kind[Kind.KV], by_kind[Kind.WINDOW]
    assert window.parent in {one.key for one in tiers.host.records.values()}, "its parent is its block"
    assert window.key != block.key and len(window.payload) == GROUPS * len(block.payload)
    groups = [window.payload[group * Cells.payload_bytes] for group in range(GROUPS)]
    assert groups == [1, 2], "a block of each window group, in their order"
    tiers.close()


class Machine(RuleBasedStateMachine):
    """Requests begin, compute and end; blocks, companions and records go; the process starts again."""

    @initialize(host=st.sampled_from([6000, 10**7]), disk=st.booleans(), window=st.sampled_from([2, 5, 6, 9]))
    def start(self, host, disk, window):
        self.folder = tempfile.TemporaryDirectory(prefix="kv-course-", ignore_cleanup_errors=True)
        self.host, self.directory, self.window = host, Path(self.folder.name) if disk else None, window
        self.count = 0
        self.set_up()

    def set_up(self):
        self.tiers, self.alive = Tiers.of_size(self.directory, self.host, 10**8), {}
        self.kv = connected(self.tiers, self.window)

    @precondition(lambda self: len(self.alive) < 3)
    @rule(family=st.sampled_from(FAMILIES), length=st.integers(1, 60), most=st.integers(1, 60))
    def serve(self, family, length, most):
        tokens = family[:length]
        cost = self.kv.cost(tokens, length)
        if cost.should_wait or cost.num_blocks > self.kv.num_free_blocks:
            return
        self.count += 1
        name = f"r{self.count}"
        found = self.kv.allocate(name, tokens)
        self.alive[name] = tokens
        assert found < length and found == self.kv.hold(name).num_computed
        self.kv.check_reads(name, tokens, found, found)
        self.compute(name, most)

    def compute(self, name, most):
        tokens = self.alive[name]
        stop = min(len(tokens), self.kv.hold(name).num_computed + most)
        while (start := self.kv.hold(name).num_computed) < stop:
            end = min(stop, start + 8)
            if self.kv.missing_blocks(name, end) > self.kv.num_free_blocks:
                return self.end(name)
            self.kv.grow(name, end)
            self.kv.write(name, tokens, start, end)
            self.kv.check_reads(name, tokens, start, end)
            self.kv.commit(name, tokens, end)
            self.tiers.flush()

    @precondition(lambda self: self.alive)
    @rule(number=st.integers(0, 9), most=st.integers(1, 60))
    def go_on(self, number, most):
        self.compute(sorted(self.alive)[number % len(self.alive)], most)

    @precondition(lambda self: self.alive)
    @rule(number=st.integers(0, 9))
    def finish(self, number):
        self.end(sorted(self.alive)[number % len(self.alive)])

    @rule(count=st.integers(1, POOL), how=st.sampled_from(["tree", "spare", "places"]))
    def evict(self, count, how):
        kept = self.kv.kept
        {"tree": self.kv.tree.evict, "spare": kept.trim, "places": kept.evict}[how](count)

    @rule(number=st.integers(0, 99))
    def lose(self, number):
        host = self.tiers.host
        if host.records:
            host.num_bytes -= host.records.pop(list(host.records)[number % len(host.records)]).num_bytes

    @rule()
    def restart(self):
        for name in list(self.alive):
            self.end(name)
        self.tiers.close()
        self.set_up()

    def end(self, name):
        tokens = self.alive.pop(name)
        self.kv.free(name, tokens[: self.kv.hold(name).num_computed])
        self.tiers.flush()

    def teardown(self):
        if hasattr(self, "kv"):
            for name in list(self.alive):
                self.end(name)
            assert self.kv.num_free_blocks == POOL - 1, "blocks leaked"
            self.tiers.close()
            self.folder.cleanup()


def test_any_order_of_operations():
    run_state_machine_as_test(Machine, settings=settings(max_examples=thorough(40, 6), stateful_step_count=30))
