"""Lesson 15. Windows come back with lesson 12's blocks: after eviction, after a restart, and never another text's."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from mini_engine.tiers.records import Kind
from mini_engine.tiers.tiers import Tiers
from tests.shared.window_cells import GROUPS, POOL, connected
from tests.shared.window_ledger import compute, serve
from tests.support import thorough
from tests.tiered import TierMachine

pytestmark = pytest.mark.reference  # no task is about this


def kinds(host):
    """Return how many records of blocks and of windows host memory has."""
    found = [record.kind for record in host.records.values()]
    return found.count(Kind.KV), found.count(Kind.WINDOW)


def test_every_new_block_is_saved_with_its_windows_while_the_request_holds_them(kv, tiers):
    serve(kv, "a", [1] * 30)
    assert kinds(tiers.host) == (7, 7), "the windows are saved before the request gives them up"
    tiers.host.clear()
    kv.coordinator.clear()
    kv.allocate("b", [1] * 30)
    compute(kv, "b", [1] * 30)
    tiers.host.clear()
    kv.free("b", [1] * 30)
    assert kinds(tiers.host) == (0, 0), "what was saved once is not saved again"


def test_a_block_s_windows_are_handed_over_right_behind_it(kv, tiers):
    serve(kv, "a", [1] * 9)
    order = [record.kind for record in tiers.host.records.values()]
    assert order == [Kind.KV, Kind.WINDOW] * 2, "were all blocks first, a writer that is behind would drop all windows"


def test_of_an_answer_the_windows_that_are_left_are_saved(kv, tiers):
    tokens = [1] * 5 + [0] * 27
    kv.allocate("a", tokens[:5])
    compute(kv, "a", tokens[:5])
    compute(kv, "a", tokens, most=1)
    kv.free("a", tokens)
    assert kinds(tiers.host) == (8, 1 + 2), "of the prompt, and of the last window of the answer"
    kv.coordinator.clear()
    assert serve(kv, "b", [*tokens, 1]) == 32, "a conversation goes on behind the answer"


def test_only_the_last_window_is_read(kv, tiers):
    serve(kv, "a", [1] * 42)
    kv.coordinator.clear()
    before = tiers.num_found["host"]
    assert serve(kv, "b", [1] * 42) == 40
    assert tiers.num_found["host"] - before == 10 + 2, "ten blocks, and the two that 5 tokens can touch"


def test_where_the_tree_has_lost_its_windows_the_tiers_have_them(kv, tiers):
    serve(kv, "a", [1] * 42)
    kv.kept.trim(1000)
    kv.kept.evict(1000)
    assert not kv.kept.companions and kv.findable([1] * 42) == 0
    assert serve(kv, "b", [1] * 42) == 40, "a tombstone is no reason to compute a prompt again"


def test_without_room_for_what_the_tiers_have_a_request_begins_at_its_first_token(kv, tiers):
    tokens = [1] * 42
    serve(kv, "a", tokens)
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


class Machine(TierMachine):
    """Requests with windows: blocks, companions and records go, and the process starts again."""

    @initialize(host=st.sampled_from([6000, 10**7]), disk=st.booleans(), window=st.sampled_from([2, 5, 6, 9]))
    def start(self, host, disk, window):
        self.window = window
        self.start_tiers(host, disk)

    def set_up(self):
        self.tiers = Tiers.of_size(self.directory, self.host, 10**8)
        self.manager = connected(self.tiers, self.window)
        self.hold = self.manager.hold

    def chunk_end(self, name, start, stop):
        return min(stop, start + 8)

    def write(self, name, tokens, start, stop):
        self.manager.write(name, tokens, start, stop)
        self.manager.check_reads(name, tokens, start, stop)

    def check(self, name):
        done = self.hold(name).num_computed
        self.manager.check_reads(name, self.alive[name], done, done)

    @rule(count=st.integers(1, POOL), how=st.sampled_from(["tree", "spare", "places"]))
    def evict(self, count, how):
        kept = self.manager.kept
        {"tree": self.manager.tree.evict, "spare": kept.trim, "places": kept.evict}[how](count)

    @rule(number=st.integers(0, 99))
    def lose(self, number):
        host = self.tiers.host
        if host.records:
            host.num_bytes -= host.records.pop(list(host.records)[number % len(host.records)]).num_bytes


def test_any_order_of_operations():
    run_state_machine_as_test(Machine, settings=settings(max_examples=thorough(40, 6), stateful_step_count=30))
