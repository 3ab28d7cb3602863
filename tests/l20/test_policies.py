"""Lesson 20. Two policies that know more than when a prefix was used: SLRU and TLRU, on trees of a few blocks."""

import pytest

from mini_engine.agents.policies import SLRU, TLRU, History
from mini_engine.base.errors import UserError
from mini_engine.kv.eviction import EvictionPolicy
from mini_engine.kv.prefixes import SharedPrefix
from mini_engine.kv.radix import RadixTree
from mini_engine.kv.radix_node import key_of
from tests.shared.trees import SIZE, check_tree, hang, tokens
from tests.support import must_raise


def tree_of(policy):
    return RadixTree(SIZE, policy=policy)


# ---------------------------------------------------------------- SLRU


@pytest.mark.task(1)
def test_a_prefix_that_was_found_again_outlives_a_crowd():
    tree = tree_of(SLRU())
    tree.insert(tokens(1), [1])
    for _ in range(2):
        tree.match(tokens(1))
    for name in (2, 3, 4):
        tree.insert(tokens(name), [name])
    assert tree.evict(2) == [2, 3], "block 1 was found twice: those that were never found again go first, oldest first"
    assert tree.evict(2) == [4, 1], "the protected go when nothing else is left: protection is an order, not a pin"
    check_tree(tree)


@pytest.mark.task(1)
def test_one_hit_too_few_is_still_probation():
    tree = tree_of(SLRU(threshold=3))
    proved, nearly = (
        hang(tree, tree.root, (1,), (1,), used=1, hits=3),
        hang(tree, tree.root, (2,), (2,), used=9, hits=2),
    )
    assert tree.policy.rank(nearly) < tree.policy.rank(proved), (
        "with threshold 3, two hits are not enough: this leaf goes before one with three, though it was used later"
    )
    nearly.num_hits = 3
    assert tree.policy.rank(proved) < tree.policy.rank(nearly), "with three hits it is protected, and was used later"


@pytest.mark.task(1)
def test_within_a_segment_the_least_recently_used_goes_first():
    tree = tree_of(SLRU())
    old, new = (hang(tree, tree.root, (name,), (name,), used=name, hits=0) for name in (1, 2))
    assert tree.policy.rank(old) < tree.policy.rank(new), "both are on probation: LRU decides"
    old.num_hits, new.num_hits = 50, 2
    assert tree.policy.rank(old) < tree.policy.rank(new), (
        "both are protected: LRU decides, not the number of hits. Otherwise last week's favourite stays for ever"
    )


def test_a_threshold_of_none_is_refused():
    with must_raise(UserError, "a threshold of 0 would protect every prefix, found or not"):
        SLRU(threshold=0)


# ---------------------------------------------------------------- TLRU


def conversation(policy, length, cached=None, num_blocks=None, used=1):
    """Return a tree and its one leaf of `num_blocks` blocks, where a conversation of `length` blocks ends."""
    tree = tree_of(policy)
    cached = length if cached is None else cached
    num_blocks = cached if num_blocks is None else num_blocks
    leaf = hang(tree, tree.root, range(1, num_blocks + 1), range(1, num_blocks + 1), used=used)
    policy.histories[leaf] = History(length, cached)
    return tree, leaf


@pytest.mark.task(2)
@pytest.mark.parametrize(
    ("budget", "next_blocks", "length", "cached", "safe", "why"),
    [
        (4, 0, 10, 10, 4, "the next turn adds nothing and may compute 4 blocks: 4 at the end can go"),
        (4, 1, 10, 10, 3, "the next turn computes the block that it adds, and 3 more"),
        (4, 6, 10, 10, 0, "the next turn alone is over the budget: nothing can be spared"),
        (4, 1, 10, 8, 1, "two of the last blocks have gone: one more may go"),
        (4, 1, 10, 7, 0, "three have gone, and that was all that could be spared"),
        (4, 1, 10, 5, 0, "more than that has gone: late already, but never a negative number"),
        (9, 1, 3, 3, 3, "a short conversation can be computed whole within the budget: all 3 blocks can go"),
        (0, 0, 5, 5, 0, "no budget, nothing to spare: plain LRU"),
    ],
)
def test_what_a_next_turn_can_spare(budget, next_blocks, length, cached, safe, why):
    policy = TLRU(budget, next_blocks)
    _, leaf = conversation(policy, length, cached)
    assert policy.num_safe(leaf) == safe, f"budget {budget}, next {next_blocks}, {cached} of {length} cached: {why}"


@pytest.mark.task(2)
def test_no_more_is_safe_than_the_leaf_has():
    policy = TLRU(budget=8)
    _, leaf = conversation(policy, length=10, num_blocks=3)
    assert policy.num_safe(leaf) == 3, (
        "the turn can spare 8 blocks, but this leaf has 3: its parent is ranked by itself"
    )


@pytest.mark.task(2)
def test_a_leaf_where_no_conversation_ends_has_nothing_to_spare():
    tree = tree_of(TLRU(budget=8))
    leaf = hang(tree, tree.root, (1, 2), (1, 2))
    assert tree.policy.num_safe(leaf) == 0, "no turn has ended here, so nothing is known of a next one"


@pytest.mark.task(2)
def test_safe_ends_go_first_and_no_further_than_they_are_safe():
    policy = TLRU(budget=3, next_blocks=1)
    tree, leaf = conversation(policy, length=6, used=9)
    other = hang(tree, tree.root, (50,), (50,), used=1)
    for one in (leaf, other):
        tree.queue.add(one)
    assert tree.evict(1) == [6], "the conversation was used later, but its last two blocks can be spared"
    assert tree.evict(1) == [5], "one more block can be spared"
    assert tree.evict(2) == [50, 4], (
        "after two blocks the next turn is as late as it may be: the rest is ranked by use again, and block 50 is older"
    )
    check_tree(tree)


def test_one_eviction_stops_at_the_safe_end():
    policy = TLRU(budget=3, next_blocks=1)
    tree, leaf = conversation(policy, length=6, used=9)
    other = hang(tree, tree.root, (50,), (50,), used=1)
    for one in (leaf, other):
        tree.queue.add(one)
    assert tree.evict(3) == [6, 5, 50], (
        "only two blocks of the conversation are safe; the third one to go is the oldest of the rest, "
        "also if all three are evicted by one call"
    )


def test_a_conversation_that_loses_a_leaf_goes_on_at_the_node_above():
    policy = TLRU(budget=4)
    tree = tree_of(policy)
    trunk = hang(tree, tree.root, (1, 2), (1, 2), used=1)
    leaf = hang(tree, trunk, (3,), (3,), used=2)
    policy.ended(SharedPrefix(key_of(tokens(1, 2, 3)), None, leaf, 3, 3))
    tree.queue.add(leaf)
    tree.evict(1)
    assert set(policy.histories) == {trunk}, "the conversation's cached part ends at the trunk now"
    assert policy.histories[trunk] == History(3, 2), "it is 3 blocks long, and the tree has 2 of them"
    tree.evict(2)
    assert not policy.histories, "nothing of it is cached: a history that stays would keep a freed node alive"


@pytest.mark.parametrize("wrong", [(-1, 0), (0, -1)])
def test_a_budget_below_0_is_refused(wrong):
    with must_raise(UserError, "blocks cannot be negative"):
        TLRU(*wrong)


# ---------------------------------------------------------------- the page's guess


class Latest(EvictionPolicy):
    """Evicts what was used last: with agents that take turns, what is needed again last."""

    def rank(self, leaf):
        return (-leaf.last_used,)


@pytest.mark.parametrize(("policy", "found"), [(EvictionPolicy(), 0), (Latest(), 80)], ids=["LRU", "the latest first"])
def test_agents_that_take_turns_find_none_of_their_blocks_under_lru(policy, found):
    """Ten agents with 10 blocks each, and room for 90: the page's guess at a tenth of its size, nine rounds."""
    tree = RadixTree(SIZE, capacity=90, policy=policy)
    hits = 0
    for turn in range(10 * 10):
        text = tokens(*(1000 * (turn % 10) + block for block in range(10)))
        match = tree.match(text, lock=True)
        hits += match.num_tokens // SIZE if turn >= 10 else 0
        locked = tree.insert(text, [100 * (turn % 10) + block for block in range(10)], lock=True)
        tree.unlock(match.node)
        tree.unlock(locked.node)
    assert hits == 10 * found, f"in 90 turns, {found} of 90 find their text"
