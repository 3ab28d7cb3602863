"""Lesson 14. The tree's continuation of a text: only behind the whole text, in its namespace, touching nothing."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mini_engine.kv.radix import RadixTree
from mini_engine.kv.radix_node import key_of
from mini_engine.speculation.lookup import LookupDrafter
from mini_engine.speculation.options import Speculation
from mini_engine.speculation.speculator import speculator_of
from mini_engine.speculation.tree_lookup import TreeDrafter, continuation
from tests.l14.toys import Always, request_of

SIZE = 4
TEXTS = st.lists(st.lists(st.integers(0, 1), min_size=SIZE, max_size=5 * SIZE), max_size=6)


def tree_of(texts, namespace=None):
    """Return a tree with the whole blocks of every text."""
    tree, used = RadixTree(SIZE), 1
    for text in texts:
        count = len(text) // SIZE
        tree.insert(text[: count * SIZE], list(range(used, used + count)), namespace)
        used += count
    return tree


def next_tokens(tree, text, count=8, namespace=None):
    return continuation(tree, key_of(text), namespace, count)


@given(TEXTS, st.lists(st.integers(0, 1), max_size=5 * SIZE), st.integers(0, 12))
@example([[0] * 8], [0, 0, 0, 0, 1], 3)  # begins as the stored text, and leaves it within a block
def test_what_is_found_continues_a_stored_text_and_is_found_if_there_is_one(texts, text, count):
    stored = [one[: len(one) // SIZE * SIZE] for one in texts]
    rests = [one[len(text) :] for one in stored if one[: len(text)] == text and len(one) > len(text)]
    found = next_tokens(tree_of(texts), text, count)
    assert bool(found) == bool(rests and count), f"{text} is continued by {found}, and the tree has behind it {rests}"
    assert not found or any(rest[: len(found)] == found for rest in rests), f"{found} continues no text of {rests}"
    assert len(found) <= count, f"at most {count} tokens"


def test_it_stops_where_the_tree_ends():
    assert next_tokens(tree_of([[1, 2, 3, 4, 5, 6, 7, 8]]), [1, 2, 3, 4, 5, 6], 8) == [7, 8]


def test_it_goes_on_below_a_split():
    tree = tree_of([[1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9], [1, 2, 3, 4, 5, 6, 7, 8, 10, 10, 10, 10]])
    assert next_tokens(tree, [1, 2, 3], 6) == [4, 5, 6, 7, 8, 10], "the prefix used last is followed"


def test_another_namespace_is_not_read():
    tree = tree_of([[1, 2, 3, 4, 5, 6, 7, 8]], namespace="mine")
    assert next_tokens(tree, [1, 2, 3], namespace="mine") == [4, 5, 6, 7, 8]
    assert next_tokens(tree, [1, 2, 3], namespace="yours") == [], "a guess would tell one client another one's text"


def test_looking_up_changes_nothing():
    tree = tree_of([[1, 2, 3, 4, 5, 6, 7, 8]])
    [node] = tree.root.children.values()
    before = (node.num_hits, node.last_used, node.locks, list(node.blocks), tree.stats.num_lookups, tree.num_protected)
    next_tokens(tree, [1, 2, 3, 4, 5])
    assert (
        node.num_hits, node.last_used, node.locks, list(node.blocks), tree.stats.num_lookups, tree.num_protected
    ) == before  # fmt: skip


def test_where_the_tree_knows_nothing_the_text_itself_is_looked_up():
    drafter = TreeDrafter(tree_of([[1, 2, 3, 4]]), Always(lambda request, count: [7] * count))
    assert drafter.propose(request_of([1, 2, 3]), 1) == [4]
    assert drafter.propose(request_of([2, 3, 1]), 2) == [7, 7]


@pytest.mark.parametrize(("use_tree", "tree", "kind"), [
    (True, RadixTree(SIZE), TreeDrafter), (True, None, LookupDrafter), (False, RadixTree(SIZE), LookupDrafter)
])  # fmt: skip
def test_the_tree_is_asked_if_that_is_wanted_and_there_is_one(use_tree, tree, kind):
    assert type(speculator_of(Speculation(use_tree=use_tree), tree).drafter) is kind
