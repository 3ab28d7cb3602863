"""Lesson 8. A pytest plugin: the tests of lessons 5 to 7, as they are, over a manager that shares prefixes.

The engines that these tests build get a PrefixCacheManager. The one thing that is looked at in another way is whose
blocks are whose: where the tests say that nobody shares, the counts say by how many each block is held.
"""

from mini_engine.engine.engine import Engine
from mini_engine.kv.prefix_manager import PrefixCacheManager
from tests.l5 import helpers
from tests.l8.trees import check_tree, nodes


def check_books(engine):
    """Lesson 5's check of the books, with counts."""
    scheduler, manager = engine.scheduler, engine.scheduler.manager
    check_tree(manager.tree)
    holders = [block for table in manager.tables.values() for block in table.blocks]
    holders += [block for node in nodes(manager.tree) for block in node.blocks]
    counts = manager.allocator.counts
    assert all(counts[block] == holders.count(block) for block in range(len(counts))), "a count is not its holders"
    free = manager.allocator.free_blocks
    assert sorted(free) == [block for block in range(1, len(counts)) if not counts[block]], "free means held by nobody"
    assert sum(manager.blocks_by_state) == manager.num_usable_blocks
    assert set(manager.tables) == {r.id for r in scheduler.running}, "only requests that run may hold blocks"
    assert all(table.row.tolist() == table.blocks for table in manager.tables.values())
    for queue in (scheduler.waiting, scheduler.running):
        assert [scheduler.order(r) for r in queue] == sorted(scheduler.order(r) for r in queue), (
            "a queue is out of order"
        )
    assert {r.id for r in scheduler.waiting} | {r.id for r in scheduler.running} == set(scheduler.requests)


def pytest_configure(config):
    helpers.KvCacheManager = PrefixCacheManager
    helpers.check_books = check_books
    Engine.for_model.__func__.__kwdefaults__["manager"] = PrefixCacheManager
