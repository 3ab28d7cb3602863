"""Lesson 12. Compaction moves blocks and whatever names them: requests and prefixes read what they did before."""

import pytest

from lessons.l12_tiers.compact import compact, moves, nodes
from mini_engine.kv.cache_coordinator import caching_manager
from tests.shared.tier_cells import BLOCKS, SIZE, Cells, digests
from tests.shared.trees import holders

pytestmark = pytest.mark.task(4)


@pytest.mark.parametrize("held", [set(), {1}, {3}, {1, 2, 9}, {4, 5, 6}, {2, 15, 7, 8}])
def test_moves_fill_the_front_with_as_few_copies_as_possible(held):
    moved = moves(set(held))
    placed = sorted(moved.get(block, block) for block in held)
    assert placed == list(range(1, len(held) + 1)), "after the moves the held blocks are 1 … len(held), each once"
    staying = [block for block in moved if block <= len(held)]
    assert staying == [], "a block at the front stays where it is: it is not in the result"


class Pool:
    """Lesson 8's manager over cells, without tiers."""

    def __init__(self):
        self.cells = Cells()
        self.manager = caching_manager(BLOCKS, SIZE, self.cells.copy)

    def fill(self, name, tokens):
        found = self.manager.allocate(name, tokens)
        self.manager.grow(name, len(tokens))
        blocks = self.manager.tables[name].blocks
        for index, digest in enumerate(digests(None, tokens)):
            if index >= found:
                self.cells.slots[blocks[index // SIZE] * SIZE + index % SIZE] = digest
        self.manager.commit(name, tokens, len(tokens))
        return found

    def contents(self):
        """Return what the held blocks contain, in no order."""
        return sorted(self.cells.read([block])[0].tobytes() for block in self.manager.allocator.held)

    def named(self):
        """Return the blocks that tables name, and those that the tree's nodes name."""
        tables = {block for table in self.manager.tables.values() for block in table.blocks}
        return tables, {block for node in nodes(self.manager.coordinator.prefixes.tree.root) for block in node.blocks}

    def reads(self, name, tokens):
        """Whether the request's table leads to the KV of its tokens."""
        table = self.manager.tables[name]
        assert list(table.row) == table.blocks, "the row that kernels read must name the same blocks as the table"
        seen = [self.cells.slots[table.blocks[i // SIZE] * SIZE + i % SIZE] for i in range(len(tokens))]
        return seen == digests(None, tokens)


LONG, SHORT, OTHER = [1] * 14, [2] * 6, [3] * 9


@pytest.fixture
def pool():
    """Blocks with holes between them: LONG has ended and is cached in part, SHORT and OTHER run."""
    pool = Pool()
    pool.fill("long", LONG)
    pool.fill("gone", [9] * 8)
    pool.fill("short", SHORT)
    pool.fill("other", OTHER)
    pool.manager.free("long", LONG)
    pool.manager.free("gone")
    pool.manager.coordinator.prefixes.tree.evict(3)
    return pool


def test_the_held_blocks_become_the_first_ones(pool):
    allocator = pool.manager.allocator
    before = len(allocator.held)
    behind = sum(block > before for block in allocator.held)
    moved = compact(pool.manager)
    assert allocator.held == set(range(1, before + 1)), "no hole is left before the last held block"
    assert sorted(allocator.free_blocks) == list(range(before + 1, BLOCKS)), "every other block is free, once"
    assert moved == behind, "return how many blocks were moved: those after the first len(held)"
    assert compact(pool.manager) == 0, "a second time there are none to move"


def test_what_is_in_the_blocks_moves_with_them(pool):
    before = pool.contents()
    compact(pool.manager)
    assert pool.contents() == before, "K and V of each moved block must be copied to its new place, none over another"


def test_what_names_a_block_names_its_new_place(pool):
    compact(pool.manager)
    tables, tree = pool.named()
    held = set(pool.manager.allocator.held)
    assert tables - held == set(), "the tables name blocks that are not held: rename them in `table.blocks`"
    assert tree - held == set(), "the tree names blocks that are not held: rename them in its nodes' `blocks`"
    assert held - tables - tree == set(), "blocks are held, and neither a table nor the tree names them"


def test_running_requests_read_what_they_read_before(pool):
    compact(pool.manager)
    assert pool.reads("short", SHORT) and pool.reads("other", OTHER), "a table must name the blocks' new places"


def test_cached_prefixes_move_too(pool):
    compact(pool.manager)
    found = pool.fill("again", OTHER)
    assert found == 8, "the tree still has both whole blocks of this prompt"
    assert pool.reads("again", OTHER), "the tree must name the blocks' new places"


def test_each_block_takes_its_count_along(pool):
    pool.fill("sharing", OTHER)
    compact(pool.manager)
    assert pool.manager.allocator.counts == holders(pool.manager), (
        "a count is the number of tables and nodes that hold the block"
    )


def test_what_is_allocated_next_overwrites_nothing(pool):
    compact(pool.manager)
    pool.fill("next", [4] * 12)
    assert pool.reads("short", SHORT) and pool.reads("other", OTHER) and pool.reads("next", [4] * 12), (
        "a block that is free twice, or free and held, is written by two requests"
    )


def test_a_pool_without_holes_is_left_alone():
    pool = Pool()
    pool.fill("a", LONG)
    blocks = list(pool.manager.tables["a"].blocks)
    assert set(blocks) == {1, 2, 3, 4}
    assert compact(pool.manager) == 0, "the held blocks are the first ones already"
    assert pool.manager.tables["a"].blocks == blocks and pool.reads("a", LONG)
