"""Lesson 8. The tree on its own, without reference counts: matching, splitting, inserting, locking, evicting."""

import contextlib
import random
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from mini_engine.base.errors import UserError
from mini_engine.kv import radix
from mini_engine.kv.eviction import FIFO, LFU, LRU
from mini_engine.kv.radix import RadixTree
from mini_engine.kv.radix_node import Node, key_of
from tests import support
from tests.shared.trees import SIZE, Contended, check_tree, contents, hang, nodes, refused, small_tree, tokens


class Holder:
    """Records which blocks the tree takes and releases."""

    def __init__(self):
        self.shared, self.freed = [], []

    def share(self, blocks):
        self.shared += blocks

    def free(self, blocks):
        self.freed += blocks


def cut_off(leaf, tree=None):
    """Take a leaf of one block out of its parent, and out of the tree's count, as another thread's eviction does."""
    del leaf.parent.children[leaf.label]
    leaf.parent = None
    if tree is not None:
        tree.num_blocks -= 1


# Nodes


@pytest.mark.task(2)
def test_a_split_keeps_tokens_and_blocks_in_order():
    tree, trunk, *_ = small_tree()
    upper = trunk.split(1, tree.width)
    assert (upper.blocks, trunk.blocks) == ([5], [6, 7]), "the upper part takes the first blocks"
    assert (upper.key, trunk.key) == (key_of(tokens(1)), key_of(tokens(2, 3))), "and their tokens"
    assert list(tree.root.children) == [(None, key_of(tokens(1)))], "the parent looks the upper part up by its label"
    assert tree.root.children[None, key_of(tokens(1))] is upper and upper.parent is tree.root, (
        "the upper part takes this node's place in its parent's children"
    )
    assert list(upper.children) == [(None, key_of(tokens(2)))], (
        "the lower part needs a new label, its own first block's tokens, and is the upper part's only child"
    )
    assert upper.children[None, key_of(tokens(2))] is trunk and trunk.parent is upper
    assert len(trunk.children) == 2, "the node's children stay below its lower part"


@pytest.mark.task(2)
def test_a_split_of_a_locked_node_keeps_both_halves_locked():
    tree, trunk, *_ = small_tree()
    trunk.locks, trunk.queued = 2, (7,)
    upper = trunk.split(2, tree.width)
    assert (upper.locks, trunk.locks) == (2, 2), "a request that has locked the lower half uses the upper half as well"
    assert (upper.queued, trunk.queued) == (None, (7,)), "the eviction queue has an entry for the lower half only"


@pytest.mark.task(2)
def test_after_a_split_the_lower_half_is_the_same_node():
    tree, trunk, leaf, _ = small_tree()
    trunk.split(1, tree.width)
    assert [part.blocks for part in leaf.path()] == [[8], [6, 7], [5]], "the path up from a child must pass both halves"
    assert leaf.parent is trunk, "the lower half must be the node that requests already refer to"


@pytest.mark.task(2)
def test_a_split_keeps_the_age_of_the_lower_part():
    tree, trunk, *_ = small_tree()
    trunk.last_used, trunk.created, trunk.num_hits = 7, 2, 3
    upper = trunk.split(1, tree.width)
    ages = [(part.last_used, part.created, part.num_hits) for part in (upper, trunk)]
    assert ages == [(7, 2, 3), (7, 2, 3)], (
        "both halves keep last_used, created and num_hits: the upper half was used whenever the lower one was"
    )


@pytest.mark.task(2)
def test_a_split_keeps_the_namespace():
    tree = RadixTree(SIZE)
    node = hang(tree, tree.root, (1, 2), (5, 6), namespace="ours")
    upper = node.split(1, tree.width)
    assert (upper.label, node.label) == (("ours", key_of(tokens(1))), ("ours", key_of(tokens(2)))), (
        "a label is (namespace, the tokens of the first block), and both halves stay in their namespace"
    )


@pytest.mark.task(2)
def test_the_root_cannot_be_split():
    tree, *_ = small_tree()
    children = dict(tree.root.children)
    with refused("split must raise ValueError: the root has no edge to split"):
        tree.root.split(0, tree.width)
    assert tree.root.children == children and tree.root.parent is None, "a refused split must change nothing"


# Matching


@pytest.mark.task(4)
@pytest.mark.parametrize(
    "names, blocks",
    [((1, 2, 3), [5, 6, 7]), ((1, 2, 3, 4), [5, 6, 7, 8]), ((1, 2, 3, 9, 4), [5, 6, 7, 2]), ((7, 1), []), ((), [])],
)
def test_match_finds_the_longest_stored_prefix(names, blocks):
    tree, *_ = small_tree()
    match = tree.match(tokens(*names))
    assert (match.blocks, match.num_tokens) == (blocks, len(blocks) * SIZE), (
        "match must return the blocks of the whole path, from the root, and how many tokens they hold"
    )
    check_shape(tree)


@pytest.mark.task(4)
def test_a_match_makes_the_whole_path_the_most_recently_used():
    tree, trunk, leaf, other = small_tree()
    tree.match(tokens(1, 2, 3, 9))
    is_fresh = [node.last_used == tree.now for node in (trunk, leaf, other)]
    assert is_fresh == [True, False, True], "all nodes of the path were used now, and no others"


@pytest.mark.task(4)
def test_lookups_are_counted():
    tree, *_ = small_tree()
    assert tree.stats.hit_rate == 0, "no lookups yet"
    tree.match(tokens(1, 2, 3, 7))
    tree.match(tokens(7))
    stats = tree.stats
    assert (stats.num_lookups, stats.num_hits) == (2, 1), "both lookups count, the one that found nothing too"
    assert (stats.asked_tokens, stats.found_tokens) == (20, 12), "stats count tokens: 16 + 4 asked for, 12 found"
    assert stats.hit_rate == 0.6


@pytest.mark.task(4)
def test_a_match_stays_in_its_namespace():
    tree = RadixTree(SIZE)
    hang(tree, tree.root, (1, 2), (5, 6), namespace="ours")
    found = [tree.match(tokens(1, 2), namespace).blocks for namespace in ("ours", "theirs", None)]
    assert found == [[5, 6], [], []], "a match must search only what was stored under its own namespace"


def with_simple_locks(tree):
    """Replace the tree's `lock` by one that only counts on the path."""

    def lock(node):
        for part in node.path():
            part.locks += 1

    tree.lock = lock


@pytest.mark.task(4)
@pytest.mark.parametrize("lock", [True, False])
def test_a_match_locks_what_it_found_if_asked_to(lock):
    tree, trunk, leaf, other = small_tree()
    with_simple_locks(tree)
    tree.match(tokens(1, 2, 3, 4), lock=lock)
    assert (trunk.locks, leaf.locks, other.locks) == (lock, lock, 0), (
        "with lock=True, match must lock the node where the prefix ends, once; without, nothing"
    )


def test_prompts_that_share_only_their_first_token_share_nothing():
    tree, *_ = small_tree()
    stranger = [10, 99, 99, 99]
    assert tree.match(stranger).blocks == [], "one equal token is not enough; only whole equal blocks are shared"
    node = tree.insert(stranger, [3]).node
    assert tree.match(stranger).blocks == [3] and tree.match(tokens(1, 2, 3)).blocks == [5, 6, 7], (
        "two prompts with the same first token must both stay findable: key children by a whole block"
    )
    assert node.parent is tree.root


def test_blocks_whose_hashes_collide_are_told_apart(monkeypatch):
    class SameHash(bytes):
        def __hash__(self):
            return 7

    class Colliding(RadixTree):
        def _label(self, key, depth, namespace):
            namespace, block = super()._label(key, depth, namespace)
            return namespace, SameHash(block) if isinstance(block, bytes) else block

    monkeypatch.setattr(radix, "hash", lambda value: 7, raising=False)
    tree = Colliding(SIZE)
    tree.insert(tokens(1), [5])
    assert tree.match(tokens(2)).blocks == [], "an equal hash is a guess: the tokens themselves must be compared"
    tree.insert(tokens(2), [6])
    assert tree.match(tokens(1)).blocks == [5] and tree.match(tokens(2)).blocks == [6], (
        "an equal hash is a guess: two blocks with the same hash must both stay findable"
    )


@pytest.mark.task(4)
def test_a_match_counts_a_hit_on_every_node_of_the_path():
    tree, trunk, leaf, other = small_tree()
    tree.match(tokens(1, 2, 3, 4))
    tree.match(tokens(1, 2, 3, 9, 7))
    tree.match(tokens(7))
    assert (trunk.num_hits, leaf.num_hits, other.num_hits) == (2, 1, 1), (
        "the trunk was found twice and each leaf once: a hit counts on the whole path, and a miss on no node"
    )


def test_a_split_by_a_match_keeps_the_matched_part_fresh_and_the_rest_old():
    tree, trunk, *_ = small_tree()
    match = tree.match(tokens(1, 2))
    assert match.node.last_used == tree.now > trunk.last_used == 3, "only the matched part was used"
    assert match.node.num_hits == 1 and trunk.num_hits == 0


def test_peek_changes_nothing():
    tree, trunk, *_ = small_tree()

    def books():
        return contents(tree), len(nodes(tree)), trunk.last_used, tree.stats.num_lookups

    before = books()
    assert tree.peek(tokens(1, 2, 8)).num_tokens == 2 * SIZE and tree.peek(tokens(7)).num_tokens == 0
    assert books() == before


def test_peek_counts_how_many_of_the_blocks_it_finds_are_evictable():
    tree, trunk, leaf, _ = small_tree()
    whole, part = tokens(1, 2, 3, 4), tokens(1, 2)
    assert (tree.peek(whole), tree.peek(part)) == ((16, 4), (8, 2)), "no request has locked any of it"
    tree.lock(trunk)
    assert (tree.peek(whole), tree.peek(part)) == ((16, 1), (8, 0)), "the trunk's three blocks are in use"
    tree.lock(leaf)
    assert tree.peek(whole) == (16, 0)


@pytest.mark.task(4)
def test_a_lookup_counts_tokens_that_fill_no_block():
    tree, *_ = small_tree()
    tree.match([*tokens(1, 2, 3), 99, 98])
    assert (tree.stats.asked_tokens, tree.stats.found_tokens) == (14, 12), "14 tokens were asked for, 12 found"


@pytest.mark.task(4)
def test_what_another_thread_evicted_meanwhile_is_not_matched():
    tree, _, leaf, _ = small_tree()
    tree.mutex = Contended(lambda: cut_off(leaf))
    assert tree.match(tokens(1, 2, 3, 4)).blocks == [5, 6, 7], (
        "another thread evicted block 8 while this call waited for self.mutex: search under the mutex"
    )
    assert not tree.mutex.is_held


# Inserting


def check_shape(tree):
    """Queue the leaves of a tree built by hand, then check it like any other."""
    for node in nodes(tree):
        tree.queue.add(node)
    check_tree(tree)


@pytest.mark.task(5)
def test_insert_stores_what_is_new_behind_what_is_there():
    holder = Holder()
    tree, trunk, *_ = small_tree(holder=holder)
    stored = tree.insert(tokens(1, 2, 3, 6, 7), [5, 6, 7, 11, 12])
    assert stored.blocks == [5, 6, 7, 11, 12], "insert returns all blocks that the tree now has of the prefix"
    assert stored.node.blocks == [11, 12] and stored.node.parent is trunk, "one new node takes what the tree lacked"
    assert holder.shared == [11, 12], "the tree must share the new blocks, each once, and no others"
    assert tree.num_blocks == 7, "num_blocks must count the two new blocks"
    assert stored.node.queued, "a new leaf without locks may be evicted, so it must be in the eviction queue"
    check_shape(tree)


@pytest.mark.task(5)
def test_insert_into_an_empty_tree():
    tree = RadixTree(SIZE)
    stored = tree.insert(tokens(1, 2), [5, 6])
    assert stored.blocks == [5, 6] and stored.node.parent is tree.root and tree.num_blocks == 2
    assert tree.insert([], []).blocks == [] and tree.num_blocks == 2, "nothing to store, nothing stored"
    check_tree(tree)


@pytest.mark.task(5)
def test_insert_of_what_is_there_keeps_the_blocks_of_the_tree():
    holder = Holder()
    tree, *_ = small_tree(holder=holder)
    stored = tree.insert(tokens(1, 2, 3, 4), [11, 12, 13, 14])
    assert stored.blocks == [5, 6, 7, 8], (
        "the caller must learn which blocks the tree has, to use them instead of its own"
    )
    assert holder.shared == [] and holder.freed == [] and tree.num_blocks == 5, (
        "nothing new was stored, so the tree shares nothing; freeing the duplicates is up to the caller"
    )


@pytest.mark.task(5)
@pytest.mark.parametrize("count, blocks", [(8, [5]), (7, [5, 6]), (8, [5, 6, 7])])
def test_tokens_that_do_not_fill_the_blocks_are_refused(count, blocks):
    tree = RadixTree(SIZE)
    with refused(f"insert must raise ValueError: {count} tokens do not fill {len(blocks)} blocks of {SIZE}"):
        tree.insert(list(range(count)), blocks)
    assert tree.num_blocks == 0 and not tree.root.children, "a refused insertion must store nothing"


@pytest.mark.task(5)
def test_insert_stores_under_a_namespace():
    tree = RadixTree(SIZE)
    for number, namespace in enumerate(["ours", "theirs"]):
        stored = tree.insert(tokens(1), [5 + number], namespace)
        assert stored.blocks == [5 + number], "what another namespace stored is invisible: the block given is kept"
    assert contents(tree) == {("ours", key_of(tokens(1))): 5, ("theirs", key_of(tokens(1))): 6}, (
        "each prefix must be stored under its own namespace: contents are {(namespace, tokens): block}"
    )


@pytest.mark.task(5)
@pytest.mark.parametrize("names", [(1, 2, 3, 6), (1, 2, 3, 4)], ids=["a new node", "a node that is there"])
def test_insert_locks_what_it_stored_if_asked_to(names):
    tree, trunk, *_ = small_tree()
    with_simple_locks(tree)
    stored = tree.insert(tokens(*names), [5, 6, 7, 11], lock=True)
    assert (stored.node.locks, trunk.locks) == (1, 1), "with lock=True, insert must lock the node where the prefix ends"
    assert tree.insert(tokens(1, 2, 3, 9), [5, 6, 7, 2]).node.locks == 0, "without lock=True, it must lock nothing"


@pytest.mark.task(5)
def test_insert_notes_when_a_node_was_created_and_used():
    tree, trunk, *_ = small_tree()
    first = tree.insert(tokens(1, 2, 3, 6), [5, 6, 7, 11]).node
    second = tree.insert(tokens(7), [12]).node
    assert first.created < second.created, "created is the tree's tick at the insertion: FIFO needs it"
    assert trunk.last_used == first.last_used < second.last_used, "an insertion uses the whole path, like a match"


@pytest.mark.task(5)
def test_without_room_insert_leaves_the_end_out():
    holder = Holder()
    tree, *_ = small_tree(holder=holder)
    tree._room = lambda wanted, node: min(wanted, 1)
    stored = tree.insert(tokens(1, 2, 3, 6, 7), [5, 6, 7, 11, 12])
    assert (stored.blocks, holder.shared, tree.num_blocks) == ([5, 6, 7, 11], [11], 6), (
        "self._room allowed one new block of two: the prefix must be stored without its last block"
    )
    tree._room = lambda wanted, node: 0
    assert tree.insert(tokens(8), [13]).blocks == [] and len(tree.root.children) == 1, "no room, so no new node"
    check_shape(tree)


@pytest.mark.task(5)
def test_what_another_thread_inserted_meanwhile_is_kept():
    tree, trunk, *_ = small_tree(holder=(holder := Holder()))
    tree.mutex = Contended(lambda: hang(tree, trunk, (6,), (11,)))
    assert tree.insert(tokens(1, 2, 3, 6), [5, 6, 7, 12]).blocks == [5, 6, 7, 11] and holder.shared == [], (
        "another thread stored block 11 while this call waited for self.mutex: search under the mutex"
    )
    assert not tree.mutex.is_held


@pytest.mark.parametrize(
    "options, values",
    [
        (dict(capacity=-1), "capacity -1"),
        (dict(capacity=2.5), "capacity 2.5"),
        (dict(policy="lru"), "policy 'lru'"),
        (dict(policy=LRU), "policy LRU"),
    ],
)
def test_bad_options_are_refused(options, values):
    with support.refused(UserError, values):
        RadixTree(SIZE, **options)


def test_over_capacity_the_least_recently_used_prefix_is_evicted():
    holder = Holder()
    tree = RadixTree(SIZE, holder, capacity=3)
    tree.insert(tokens(1, 2), [5, 6])
    tree.insert(tokens(3), [7])
    tree.match(tokens(1, 2))
    tree.insert(tokens(4), [8])
    assert holder.freed == [7] and set(contents(tree).values()) == {5, 6, 8}
    check_tree(tree)


def test_over_capacity_the_end_of_a_prefix_is_left_out():
    tree = RadixTree(SIZE, capacity=3)
    locked = tree.insert(tokens(1, 2), [5, 6], lock=True)
    stored = tree.insert(tokens(3, 4, 5), [7, 8, 9])
    assert stored.blocks == [7], "locked blocks stay, so there is room for one block of the new prefix"
    assert tree.insert(tokens(1, 2, 6), [5, 6, 11]).blocks == [5, 6, 11], "a prefix never evicts its own beginning"
    tree.unlock(locked.node)
    check_tree(tree)


def test_room_for_a_prefix_is_never_made_by_evicting_its_own_beginning():
    tree = RadixTree(1, capacity=1)
    tree.insert([1], [1])
    assert tree.insert([1, 2], [1, 2]).blocks == [1], "the only block that could be evicted is the prefix's own first"
    check_tree(tree)


# Locks


@pytest.mark.task(3)
def test_a_lock_counts_on_the_whole_path():
    tree, trunk, leaf, other = small_tree()
    tree.lock(leaf)
    assert (trunk.locks, leaf.locks, other.locks) == (1, 1, 0), "a request that uses a node uses all nodes above it"
    assert (tree.num_protected, tree.num_evictable) == (4, 1), "the trunk's three blocks and the leaf's are protected"
    tree.lock(leaf)
    assert (trunk.locks, leaf.locks, tree.num_protected) == (2, 2, 4), "locks are counted; blocks are protected once"
    tree.lock(other)
    assert (trunk.locks, tree.num_protected, tree.num_evictable) == (3, 5, 0), "the trunk is protected once, not twice"


@pytest.mark.task(3)
def test_unlock_takes_back_one_lock():
    tree, trunk, leaf, other = small_tree()
    trunk.locks, leaf.locks, other.locks, tree.num_protected = 3, 2, 1, 5
    tree.unlock(leaf)
    assert (trunk.locks, leaf.locks, tree.num_evictable) == (2, 1, 0), "another request still uses the leaf"
    assert not leaf.queued, "a leaf that is still locked does not belong in the eviction queue"
    tree.unlock(leaf)
    assert tree.num_evictable == 1, "only the leaf's block: the trunk is still locked by the other request"
    tree.unlock(other)
    assert (trunk.locks, leaf.locks, other.locks) == (0, 0, 0), "every lock was taken back, so no count may be left"
    assert tree.num_evictable == 5, "no node is locked, so all five blocks can be evicted"
    assert leaf.queued and other.queued, "leaves that are unlocked may be evicted, so they must be in the queue"


@pytest.mark.task(3)
def test_one_unlock_too_many_is_refused():
    tree, trunk, leaf, _ = small_tree()
    trunk.locks, tree.num_protected = 1, 3  # another request ends at the trunk
    with refused("unlock must raise ValueError: this leaf is not locked, although the trunk above it is"):
        tree.unlock(leaf)
    assert (trunk.locks, leaf.locks, tree.num_protected) == (1, 0, 3), "a refused unlock must change no count"


@pytest.mark.task(3)
def test_an_evicted_node_cannot_be_locked():
    tree, trunk, leaf, _ = small_tree()
    cut_off(leaf, tree)
    leaf.blocks = []
    with refused("lock must raise ValueError: this node was evicted, so its blocks may hold other tokens by now"):
        tree.lock(leaf)
    assert (trunk.locks, leaf.locks, tree.num_protected) == (0, 0, 0), "a refused lock must change no count"


@pytest.mark.task(3)
def test_the_root_needs_no_lock():
    tree, trunk, *_ = small_tree()
    tree.lock(tree.root)
    assert (trunk.locks, tree.num_protected) == (0, 0), "a request that found nothing protects nothing"
    tree.unlock(tree.root)
    assert (trunk.locks, tree.num_protected) == (0, 0)


@pytest.mark.task(3)
def test_a_node_that_another_thread_evicted_meanwhile_is_not_locked():
    tree, _, leaf, _ = small_tree()
    tree.mutex = Contended(lambda: cut_off(leaf))
    with refused("another thread evicted the leaf while this call waited for self.mutex: check under the mutex"):
        tree.lock(leaf)
    assert not tree.mutex.is_held


@pytest.mark.task(3)
def test_a_lock_that_another_thread_took_back_meanwhile_is_not_taken_back_again():
    tree, trunk, leaf, _ = small_tree()
    trunk.locks, leaf.locks, tree.num_protected = 1, 1, 4

    def other_thread():
        trunk.locks = leaf.locks = tree.num_protected = 0

    tree.mutex = Contended(other_thread)
    with contextlib.suppress(ValueError):
        tree.unlock(leaf)
    assert (trunk.locks, leaf.locks, tree.num_protected) == (0, 0, 0), (
        "another thread took the last lock back while this call waited for self.mutex: check under the mutex"
    )


def test_a_match_that_locks_leaves_no_gap_for_an_eviction():
    tree = RadixTree(SIZE)
    tree.insert(tokens(1, 2, 3), [5, 6, 7])
    match = tree.match(tokens(1, 2), lock=True)
    assert tree.evict(9) == [7], (
        "no eviction may come between match and lock: the matched blocks must be locked already"
    )
    assert tree.match(tokens(1, 2)).blocks == match.blocks
    check_tree(tree)


# Evicting


def queued(tree, *leaves):
    for leaf in leaves:
        tree.queue.add(leaf)
    return tree


@pytest.mark.task(6)
def test_the_least_recently_used_leaf_goes_first():
    tree, _, leaf, other = small_tree(holder=(holder := Holder()))
    queued(tree, leaf, other)
    assert tree.evict(1) == [2], "block 2's leaf was used least recently, so it must go first"
    assert holder.freed == [2], "evicted blocks must be freed through self.holder, or their counts stay up for ever"
    assert other.parent is None and tree.num_blocks == 4
    assert tree.evict(1) == [8], "the next call must find the other leaf: pop no leaf from the queue that is not cut"
    assert (holder.freed, tree.num_evicted) == ([2, 8], 2), "num_evicted counts the blocks of all calls"


@pytest.mark.task(6)
def test_a_parent_goes_only_after_its_children_and_from_its_end():
    tree, trunk, leaf, other = small_tree()
    trunk.last_used = 0
    queued(tree, leaf, other)
    assert tree.evict(3) == [2, 8, 7], "leaves first, though the trunk is older; then the trunk's tail"
    assert trunk.blocks == [5, 6] and trunk.key == key_of(tokens(1, 2)), "tokens and blocks are cut together"
    assert tree.evict(9) == [6, 5] and not tree.root.children and tree.num_blocks == 0, "asked for more, all must go"


@pytest.mark.task(6)
def test_nothing_locked_is_evicted():
    tree, trunk, leaf, other = small_tree()
    queued(tree, leaf, other)
    leaf.locks = trunk.locks = 1
    tree.num_protected = 4
    assert tree.evict(9) == [2], "block 8 and all above it are in use"
    assert tree.num_evictable == 0
    assert tree.evict(9) == []


@pytest.mark.task(6)
@pytest.mark.parametrize("count", [0, -3])
def test_evict_without_need_takes_nothing(count):
    tree, _, leaf, other = small_tree(holder=(holder := Holder()))
    queued(tree, leaf, other)
    assert (tree.evict(count), holder.freed, tree.num_blocks) == ([], [], 5), f"evict({count}) must release no block"
    assert tree.evict(2) == [2, 8], "and the queue must still have every leaf"


@pytest.mark.task(6)
def test_evict_cuts_no_more_than_it_needs_from_a_leaf():
    tree = RadixTree(SIZE)
    node = hang(tree, tree.root, (1, 2, 3), (5, 6, 7))
    queued(tree, node)
    assert tree.evict(2) == [7, 6] and node.blocks == [5], "two blocks were asked for: the leaf keeps its first block"
    assert tree.evict(9) == [5], "what is left of a leaf must stay evictable, and evict returns what there is"


@pytest.mark.task(6)
def test_blocks_that_another_thread_evicted_meanwhile_are_not_evicted_again():
    tree, _, leaf, other = small_tree(holder=(holder := Holder()))
    queued(tree, leaf, other)
    tree.mutex = Contended(lambda: cut_off(other, tree))
    assert tree.evict(1) == [8] == holder.freed, (
        "another thread evicted block 2 while this call waited for self.mutex: pop under the mutex"
    )
    assert not tree.mutex.is_held


def test_a_prefix_found_after_it_was_queued_is_not_the_next_to_go():
    tree = RadixTree(SIZE)
    for name in (1, 2, 3):
        tree.insert(tokens(name), [name])
    tree.match(tokens(1))
    assert tree.evict(2) == [2, 3], "1 was used after it was queued: its entry in the queue is stale"
    check_tree(tree)


@pytest.mark.parametrize(("policy", "order"), [(LRU, [1, 3, 2]), (LFU, [3, 2, 1]), (FIFO, [1, 2, 3])])
def test_each_policy_has_an_order_of_its_own(policy, order):
    tree = RadixTree(SIZE, policy=policy())
    locked = [tree.insert(tokens(name), [name], lock=True).node for name in (1, 2, 3)]
    for name in (2, 3, 1):  # so that the queueing order matches no policy
        tree.unlock(locked[name - 1])
    for name in (1, 1, 3, 2):
        tree.match(tokens(name))
    assert tree.evict(3) == order, "1 was found twice, before the others; 3 and 2 once each, 3 before 2"


def test_clear_is_refused_while_a_prefix_is_used():
    tree = RadixTree(SIZE)
    stored = tree.insert(tokens(1, 2), [5, 6], lock=True)
    tree.insert(tokens(3), [7])
    with pytest.raises(ValueError):
        tree.clear()
    assert tree.num_blocks == 3, "a refused clear must forget nothing"
    tree.unlock(stored.node)
    tree.clear()
    assert tree.num_blocks == 0 and not tree.root.children


def test_the_queue_holds_one_entry_per_node_however_often_prefixes_are_found():
    tree = RadixTree(SIZE)
    for name in range(1, 9):
        tree.insert(tokens(name), [name])
    for _ in range(200):
        for name in range(1, 9):
            match = tree.match(tokens(name), lock=True)
            tree.unlock(match.node)
    assert len(tree.queue.heap) <= 8, "the heap must not grow with the number of lookups"


# All together


@pytest.fixture
def restless():
    """Make threads switch as often as possible: at the usual interval, each would finish before the next starts."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_that_use_one_tree_leave_its_books_right(restless):
    tree, blocks = RadixTree(SIZE, capacity=40), iter(range(1, 10**6))
    give = [[next(blocks) for _ in range(3)] for _ in range(4 * 400)]

    def work(seed):
        chance = random.Random(seed)
        for index in range(400):
            prompt = tokens(*(chance.randrange(1, 5) for _ in range(3)))
            match = tree.match(prompt, lock=True)
            mine = tree.insert(prompt, match.blocks + give[seed * 400 + index][len(match.blocks) :], lock=True)
            tree.evict(chance.randrange(2))
            assert tree.peek(prompt).num_tokens >= match.num_tokens, "locked blocks must stay"
            tree.unlock(match.node)
            tree.unlock(mine.node)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert tree.num_protected == 0
    check_tree(tree)


def test_a_node_is_made_with_its_own_key():
    key = key_of(tokens(1))
    node = Node(None, (None, key), key, [5])
    node.key.clear()
    assert key == key_of(tokens(1))
