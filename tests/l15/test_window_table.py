"""Lesson 15. A window group's table: it grows at its end, makes holes at its beginning, and moves no token."""

import pytest

from mini_engine.base.errors import OutOfBlocks
from mini_engine.kv.refcount import RefCountedAllocator
from mini_engine.windows.window_table import WindowTable

NULL = 0


def table(num_groups=2, num_blocks=20):
    return WindowTable(RefCountedAllocator(num_blocks, 4), num_groups)


def rows(one):
    return [list(row) for row in one.rows]


@pytest.mark.task(3)
def test_growing_takes_a_block_of_each_group_for_each_index():
    one = table()
    one.grow(3)
    first, second = rows(one)
    assert [len(first), len(second)] == [3, 3], "every group reaches over 3 blocks"
    assert len({*first, *second}) == 6, "each group has blocks of its own"
    assert NULL not in first + second, "all of them are needed: there are no holes"
    assert one.allocator.held == {*first, *second}, "what the table holds, and nothing else, is taken from the pool"
    before = rows(one)
    one.grow(2)
    assert rows(one) == before, "there is room already: nothing is taken, and nothing given up"
    one.grow(5)
    assert [row[:3] for row in rows(one)] == before, "tokens stay where they are"
    assert [len(row) for row in rows(one)] == [5, 5], "every group reaches over 5 blocks"
    assert len(one.allocator.held) == 10, "only what is missing is taken from the pool"


@pytest.mark.task(3)
def test_too_few_blocks_for_all_groups_change_nothing():
    one = table(num_groups=3, num_blocks=9)  # 8 usable
    one.grow(2)
    before = rows(one)
    with pytest.raises(OutOfBlocks):
        one.grow(3)
    assert rows(one) == before, "two of three groups could have grown; then none may: allocate once, for all of them"
    assert one.allocator.num_free == 2, "a refused call must give back what it has taken"


@pytest.mark.task(3)
def test_sliding_frees_blocks_and_leaves_holes_where_they_were():
    one = table()
    one.grow(4)
    before = rows(one)
    gone = one.slide(3)
    assert rows(one) == [[NULL, NULL, NULL, row[3]] for row in before], (
        "the null block in their place, in every group, and no entry moves"
    )
    assert [(index, tuple(blocks)) for index, blocks in gone] == [
        (index, (before[0][index], before[1][index])) for index in range(3)
    ], "what became of the blocks is the caller's business, so it is told which they were"
    assert one.first == 3, "`first` counts the holes"
    assert one.allocator.held == {row[3] for row in before}, "the blocks of all groups are free at once"


@pytest.mark.task(3)
def test_sliding_again_frees_no_hole():
    one = table()
    one.grow(4)
    one.slide(2)
    held = set(one.allocator.held)
    for first in (2, 1, 0):
        assert list(one.slide(first)) == [], f"blocks 0 and 1 are holes already: slide({first}) has nothing to free"
        assert one.allocator.held == held, f"slide({first}) must free nothing"
        assert one.first == 2, "a hole stays a hole"
    assert [index for index, _ in one.slide(9)] == [2, 3], "no further than the table reaches"
    assert one.first == 4, "no further than the table reaches"
    assert one.allocator.held == set(), "all blocks are free"


@pytest.mark.task(3)
def test_a_table_that_slid_grows_at_its_end():
    one = table()
    one.grow(4)
    one.slide(3)
    one.grow(6)
    for row in rows(one):
        assert row[:3] == [NULL] * 3, "a table that grows gives its holes no blocks"
        assert NULL not in row[3:], "only what is behind the window is a hole"
    assert len(one.allocator.held) == 6, "three blocks of each of two groups"
    assert one.first == 3, "`first` counts the holes; growing has made none"


@pytest.mark.task(3)
@pytest.mark.parametrize("held", [0, 2])
def test_blocks_that_no_query_will_see_are_holes_from_the_beginning(held):
    """Tokens that come from a tier, say: only the last window of them is brought back."""
    one = table()
    one.grow(held)
    one.slide(held)
    one.grow(6, first=4)
    for row in rows(one):
        assert row[:4] == [NULL] * 4, "no block is taken before index 4"
        assert NULL not in row[4:], "all from index 4 on are needed"
    assert one.first == 4, "`first` comes after the new holes"
    assert len(one.allocator.held) == 4, "two blocks of each of two groups"


@pytest.mark.task(3)
def test_what_is_held_before_the_first_index_stays():
    one = table()
    one.grow(3)
    before = rows(one)
    one.grow(5, first=2)
    assert [row[:3] for row in rows(one)] == before, "`first` says which new blocks are holes; `slide` frees old ones"
    assert one.first == 0, "it has made no holes"
    assert len(one.allocator.held) == 10, "the new entries come after `first`, so each has a block"


@pytest.mark.task(3)
def test_a_table_whose_holes_reach_to_its_end_takes_no_block():
    """A window of one block, and a step that ends where a block ends: the next token sees none of the old ones."""
    one = table()
    one.grow(2, first=2)
    assert rows(one) == [[NULL, NULL], [NULL, NULL]], "both new entries are before `first`: holes"
    assert one.first == 2, "`first` counts the holes"
    one.grow(1, first=4)
    assert rows(one) == [[NULL, NULL], [NULL, NULL]], "the table is long enough: nothing is added"
    assert one.first == 2, "nothing was added, so no hole either"


def test_truncating_frees_the_end_and_only_what_is_held():
    one = table()
    one.grow(5)
    one.slide(3)
    one.truncate(4)
    assert [len(row) for row in rows(one)] == [4, 4] and len(one.allocator.held) == 2
    one.truncate(0)
    assert rows(one) == [[], []] and not one.allocator.held and one.first == 0


def test_adopted_blocks_lie_behind_holes():
    one = table()
    blocks = one.allocator.alloc_blocks(4)
    one.adopt(3, [(blocks[0], blocks[1]), (blocks[2], blocks[3])])
    assert rows(one) == [[NULL] * 3 + [blocks[0], blocks[2]], [NULL] * 3 + [blocks[1], blocks[3]]]
    assert one.at(4) == (blocks[2], blocks[3]) and one.num_held == 4
