"""Lesson 8. A pytest plugin that runs the tests of lessons 5 to 7, unchanged, over a manager that shares prefixes.

The engines that these tests build get a caching_manager. Only one check differs: where the tests require that each
block belongs to one request, this plugin requires that each block's count equals its number of holders.
"""

from mini_engine.engine.engine import Engine
from mini_engine.kv.cache_coordinator import caching_manager
from tests import stubs
from tests.shared.trees import check_tree, holders


def check_books(engine):
    """Make lesson 5's check of the books, with reference counts."""
    scheduler, manager = engine.scheduler, engine.scheduler.manager
    check_tree(manager.coordinator.prefixes.tree)
    counts = manager.allocator.counts
    assert counts == holders(manager), "a count must equal the number of holders"
    free = manager.allocator.free_blocks
    assert sorted(free) == [block for block in range(1, len(counts)) if not counts[block]], (
        "a block is free exactly when it has no holders"
    )
    assert sum(manager.blocks_by_state) == manager.num_usable_blocks
    assert set(manager.tables) == {r.id for r in scheduler.running}, "only running requests may hold blocks"
    assert all(table.row.tolist() == table.blocks for table in manager.tables.values())
    for queue in (scheduler.waiting, scheduler.running):
        assert [scheduler.order(r) for r in queue] == sorted(scheduler.order(r) for r in queue), (
            "a queue is out of order"
        )
    assert {r.id for r in scheduler.waiting} | {r.id for r in scheduler.running} == set(scheduler.requests)


def pytest_configure(config):
    stubs.KvCacheManager = caching_manager
    stubs.check_books = check_books
    Engine.for_model.__func__.__kwdefaults__["manager"] = caching_manager
