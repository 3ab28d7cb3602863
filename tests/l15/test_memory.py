"""Lesson 15. A request begins with companions of its last window, and gives back what no later token sees."""

import pytest

from tests.shared.window_ledger import NULL, Windows, begin, compute, remember, serve

TEXT = list(range(40))


def stored(window=6, num_groups=2, **options):
    """Return a manager whose tree has the TEXT."""
    kv = Windows(window, num_groups, **options)
    serve(kv, "first", TEXT)
    return kv


@pytest.mark.task(7)
@pytest.mark.parametrize(("window", "num_held"), [(6, 2), (2, 1), (5, 1), (9, 2), (10, 3), (100, 9)])
def test_a_hit_takes_group_0_whole_and_of_the_others_the_last_window(window, num_held):
    kv = Windows(window)
    blocks = remember(kv, TEXT)
    begin(kv, "r", blocks[:9], 40)
    for row in kv.rows("r")[1:]:
        assert len(row) == 9, "every group's table reaches over the 9 blocks that were found"
        assert row[: 9 - num_held] == [NULL] * (9 - num_held), f"W = {window}: token 36 sees nothing of these blocks"
        assert NULL not in row[9 - num_held :], f"W = {window}: token 36 sees {window - 1} tokens before it"
    assert kv.hold("r").table.first == 9 - num_held, "`first` counts the holes"
    kv.check_reads("r", TEXT, 36, 36)


@pytest.mark.task(7)
def test_adopted_blocks_have_one_more_holder_and_are_not_evictable():
    kv = Windows()
    blocks = remember(kv, TEXT)
    kept = kv.kept.num_evictable
    begin(kv, "r", blocks[:9], 40)
    for row in kv.rows("r")[1:]:
        counts = [kv.allocator.counts[block] for block in row[7:]]
        assert counts == [2, 2], "the tree and the request hold the blocks of the last window"
    assert kv.kept.num_evictable == kept - 4, "what a request holds is not evictable: two blocks in each of two groups"
    kv.check_reads("r", TEXT, 36, 36)


@pytest.mark.task(7)
def test_two_requests_begin_behind_the_same_window():
    kv = Windows()
    blocks = remember(kv, TEXT)
    for name in ("a", "b"):
        begin(kv, name, blocks[:9], 40)
    for row in kv.rows("b")[1:]:
        counts = [kv.allocator.counts[block] for block in row[7:]]
        assert counts == [3, 3], "the tree, the first request and the second"
    assert kv.rows("a") == kv.rows("b"), "both read the same blocks; none is copied"


@pytest.mark.task(7)
def test_the_hold_says_where_the_request_stands():
    kv = Windows()
    blocks = remember(kv, TEXT)
    table = begin(kv, "r", blocks[:5], 43, num_known=28)
    hold = kv.hold("r")
    assert hold.num_computed == 20, "the tokens that were found need not be computed"
    assert hold.main is table, "`main` is the table of group 0: what is kept is found by its blocks"
    assert hold.ends == {7, 10}, (
        "others may begin where this prompt leaves what is known, after 28 tokens, and at its end: use `_ends`"
    )


@pytest.mark.task(7)
def test_without_a_hit_a_request_begins_with_nothing():
    kv = Windows()
    begin(kv, "r", [], 40)
    assert kv.rows("r") == [[], [], []], "there is nothing behind it, so no window and no hole"
    assert kv.hold("r").num_computed == 0, "every token is still to be computed"
    assert kv.allocator.num_free == 59, "blocks are taken when the request grows"


def test_a_place_where_a_request_began_outlives_spare_companions():
    kv = stored(num_blocks=80)
    serve(kv, "second", [*TEXT[:20], *range(60, 64)])
    kv.kept.trim(1000)
    assert kv.findable([*TEXT[:20], 99]) == 20, "one request began behind 20 tokens, so another may"


def test_a_block_that_leaves_the_tree_takes_its_companion_along():
    kv = Windows()
    remember(kv, TEXT)
    kv.tree.evict(4)
    assert len(kv.kept.companions) == 6, (
        "four blocks have left the tree: their ids will stand for other texts, and companions that are still found by "
        "these ids would be taken for those texts' windows"
    )
    assert kv.allocator.num_free == 59 - 6 * 3, "a block in each of three groups goes together"


def test_no_block_is_freed_before_its_last_token_is_behind_the_window():
    kv = Windows(window=6, num_groups=1, caching=False)
    kv.allocate("r", TEXT)
    for stop in range(1, 25):
        kv.grow("r", stop), kv.write("r", TEXT, stop - 1, stop), kv.commit("r", TEXT, stop)
        place = stop // 4 * 4
        first = max(0, place - 5)
        holes = kv.rows("r")[1].count(NULL)
        assert holes == first // 4, (
            f"of {stop} tokens the tree can have {place}, and a request that begins there sees token {first}: "
            "its block is still needed, none before it"
        )


@pytest.mark.parametrize("window", [2, 5, 6, 9])
@pytest.mark.parametrize("num_tokens", range(20, 41))
def test_the_next_turn_of_a_chat_begins_where_the_answer_ended(window, num_tokens):
    """Also if it ended in the middle of a block: the tree has whole blocks, and needs the window before their end."""
    kv = Windows(window)
    kv.allocate("chat", TEXT[:3])  # the rest is an answer, of which the tree has nothing before it ends
    compute(kv, "chat", TEXT[:num_tokens], most=1)
    kv.free("chat", TEXT[:num_tokens])
    assert kv.findable(TEXT[:num_tokens]) == num_tokens // 4 * 4, (
        f"{num_tokens} tokens are {num_tokens // 4} whole blocks, and the next turn begins after them"
    )


def test_a_chunk_sees_further_back_than_its_last_token():
    """Freeing by the chunk's last token instead of its first would take blocks that the chunk still reads."""
    kv = Windows(window=6, max_step=8)
    kv.allocate("r", TEXT)
    compute(kv, "r", TEXT[:24])
    kv.grow("r", 32)
    assert kv.rows("r")[1][:4] == [NULL] * 4, "token 24 sees 19 … 24: nothing of the first four blocks"
    assert kv.rows("r")[1][4] != NULL, (
        "token 24, the chunk's first, sees 19 … 24: block 4 must not be freed before it ran"
    )
