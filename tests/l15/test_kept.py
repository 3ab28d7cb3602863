"""Lesson 15. What the tree keeps of window groups: where a request can begin, and what goes first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.kv.refcount import RefCountedAllocator
from mini_engine.windows.kept import KeptWindows
from tests.shared.window_ledger import Windows, compute, serve

SIZE = 4


def kept(window=6, blocks=(), num_groups=1):
    """Return KeptWindows with companions for these blocks of the tree, held by nothing else."""
    one = KeptWindows(RefCountedAllocator(200, SIZE), window, num_groups)
    for block in blocks:
        one.companions[block] = tuple(one.allocator.alloc_blocks(num_groups))
        one.spare[block] = None
    return one


def left(one, *blocks, proven=()):
    """Let a request compute these blocks, leave companions to the tree, prove some, and end."""
    held = {block: tuple(one.allocator.alloc_blocks(one.num_groups)) for block in blocks}
    for block, companion in held.items():
        one.keep(block, companion)
    one.prove(proven)
    for block, companion in held.items():
        one.allocator.free(companion)
        one.release(block, companion)


@pytest.mark.task(6)
@pytest.mark.parametrize(
    ("has", "expected", "why"),
    [
        ("xxxxxx", 6, "all of them"),
        ("······", 0, "a request can always begin at 0"),
        ("····xx", 6, "token 24 sees 5 tokens before it, in two blocks; those before them may be tombstones"),
        ("···xx·", 5, "token 24 sees block 5, which has none; token 20 sees blocks 3 and 4"),
        ("xx·x·x", 2, "a window of 6 reaches over two blocks, and these two are the only ones in a row"),
        ("x·····", 1, "after one block, a token sees no more than that block"),
        ("·x····", 0, "after two blocks, a token sees block 0 as well"),
        ("x·xx·x", 4, "token 24 sees block 4, and token 20 does, too; token 16 sees blocks 2 and 3"),
    ],
)
def test_a_request_begins_behind_the_longest_prefix_whose_last_window_is_there(has, expected, why):
    one = kept(6, [10 + index for index, mark in enumerate(has) if mark == "x"])
    got = one.num_usable([10 + index for index in range(len(has))])
    assert got == expected, f"companions {has}, W = 6, blocks of 4: after {expected} of 6 blocks: {why}"


@pytest.mark.task(6)
@given(st.integers(2, 30), st.lists(st.booleans(), max_size=16))
def test_no_longer_prefix_would_do(window, has):
    one = kept(window, [10 + index for index, there in enumerate(has) if there])
    blocks = [10 + index for index in range(len(has))]
    usable = [
        end
        for end in range(len(has) + 1)
        if all(has[index] for index in range(max(0, end * SIZE - window + 1) // SIZE, end))
    ]
    assert one.num_usable(blocks) == max(usable), "the longest prefix whose last W - 1 tokens have companions"


@pytest.mark.task(6)
def test_looking_is_not_using():
    one = kept(6, [10, 11, 12])
    before = list(one.spare)
    one.num_usable([10, 11, 12])
    assert list(one.spare) == before and not one.places, "`peek` asks at every step; only `use` counts"


@pytest.mark.task(7)
def test_a_companion_in_use_is_not_evictable():
    one = kept(6, [10, 11, 12], num_groups=2)
    one.places[12] = one.spare.pop(12)  # it may be in either queue
    expected = [one.companions[11], one.companions[12]]
    used = [tuple(companion) for companion in one.use([11, 12])]
    assert used == expected, "return the companions, in the order of the blocks"
    counts = [one.allocator.counts[block] for companion in used for block in companion]
    assert counts == [2] * 4, "the request holds them beside the tree: `share`"
    assert one.num_evictable == 2, "only the companion of block 10 is evictable: a request reads the others"
    assert [*one.spare, *one.places] == [10], "the others are in neither queue while a request reads them"
    one.use([11])
    assert one.allocator.counts[used[0][0]] == 3, "the tree and two requests"


@pytest.mark.task(7)
def test_where_a_request_began_another_may():
    one = kept(6, [10, 11, 12])
    one.use([11, 12])
    assert one.proven == {11, 12}, "a request began behind block 12, so their companions are worth more: `proven`"


@pytest.mark.task(8)
@pytest.mark.parametrize("when", ["while a request holds its window", "when its window is evictable already"])
def test_before_any_block_of_the_tree_only_windows_go_that_no_request_needs(when):
    one = kept()
    is_held = when.startswith("while")
    left(one, 10, 11, 12, 13, proven=[12, 13] if is_held else [])
    if not is_held:
        one.prove([12, 13])
    assert one.num_evictable == 4, "each companion that only the tree holds is in one queue, and in one only"
    one.trim(99)
    assert set(one.companions) >= {12, 13}, (
        f"place proven {when}: requests begin behind block 13. Without the windows of blocks 12 and 13 they find none "
        "of the tree's blocks, so these windows are worth more than a leaf of the tree"
    )
    assert set(one.companions) == {12, 13}, (
        "no request begins behind blocks 10 or 11, so their windows go before any block of the tree does"
    )
    one.evict(99)
    assert not one.companions, "the tree has no leaf left: what is left goes too"


@pytest.mark.task(8)
@pytest.mark.parametrize("of", ["trim", "evict"])
def test_no_more_windows_go_than_have_to_and_the_oldest_first(of):
    one = kept(num_groups=2)
    left(one, 10, 11, 12, 13)
    if of == "evict":
        one.prove([10, 11, 12, 13])
    give_up = getattr(one, of)
    free = one.allocator.num_free
    for num_blocks, expected in ((-1, [10, 11, 12, 13]), (0, [10, 11, 12, 13]), (1, [11, 12, 13]), (3, [13])):
        give_up(num_blocks)
        assert list(one.companions) == expected, f"{of}({num_blocks}): a companion has two blocks, the oldest go first"
    assert one.allocator.num_free == free + 6, "their blocks are free"


@pytest.mark.task(8)
def test_what_a_request_reads_is_not_evictable():
    one = kept(blocks=[10])
    [companion] = one.companions.values()
    one.spare.clear(), one.allocator.share(companion), one.allocator.share(companion)  # two requests begin with it
    for num_readers in (1, 0):
        one.allocator.free(companion)
        one.release(10, companion)
        assert one.num_evictable == 1 - num_readers, f"{num_readers} requests still read it, and the tree keeps it"


@pytest.mark.task(8)
def test_a_block_without_a_companion_proves_nothing():
    one = kept()
    one.prove([10])
    left(one, 10)
    one.trim(1)
    assert not one.companions, "block 10 had no companion to be proven; later its id may stand for another text"


@pytest.mark.task(8)
def test_another_copy_of_the_same_text_is_not_the_trees():
    """Two requests compute the same tokens at once: the tree keeps one's blocks, and the other frees its own."""
    one = kept(6)
    mine, theirs = tuple(one.allocator.alloc_blocks(1)), tuple(one.allocator.alloc_blocks(1))
    one.keep(10, mine)
    one.keep(10, theirs)
    assert one.companions == {10: mine}
    one.drop(10)
    one.keep(10, theirs)
    one.allocator.share(mine)
    one.allocator.free(mine)  # another request still reads the first copy
    one.release(10, mine)
    assert one.num_evictable == 0, "what was released is not what the tree keeps, which a request still holds"


def test_under_pressure_windows_do_not_vanish_before_the_texts_that_they_serve():
    """If every window went before any block of group 0, each hit would be 0 tokens, and nothing would say so."""
    kv = Windows(num_groups=2, num_blocks=61)
    texts = [[100 * name + i for i in range(40)] for name in range(1, 9)]
    for index, text in enumerate(texts):
        serve(kv, f"r{index}", text)
    found = [kv.findable(text) for text in texts]
    assert found[-1] == 40 and sum(length > 0 for length in found) >= 3, f"hits of {found} tokens in a full pool"
    assert sum(kv.blocks_by_state) == 60


def test_what_was_evicted_while_a_request_ran_is_offered_again_when_it_ends():
    kv, tokens = Windows(num_groups=1), list(range(24))
    kv.allocate("a", tokens)
    compute(kv, "a", tokens)
    for block in kv.tables["a"].blocks:
        kv.kept.drop(block)
    assert kv.findable(tokens) == 0
    kv.free("a", tokens)
    assert kv.findable(tokens) == 24, "it holds the last window, so the next turn of the chat begins behind it"
