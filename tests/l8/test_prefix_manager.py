"""Lesson 8. The manager: what a request finds, what it leaves behind, and what happens in between."""

from types import MappingProxyType

import pytest

from mini_engine.base.errors import OutOfBlocks
from mini_engine.kv.cache_coordinator import caching_manager
from mini_engine.kv.manager import BlocksByState
from mini_engine.kv.prefixes import SharedPrefix
from mini_engine.kv.radix import RadixTree
from mini_engine.kv.radix_node import TOKEN_BYTES, Match, Node, key_of
from mini_engine.kv.refcount import RefCountedAllocator
from mini_engine.kv.request_table import RequestTable
from tests.shared.trees import SIZE, contents, hang, refused, tokens


class StubTree:
    """A tree that finds and stores what it is told to, and records its calls.

    locks: the calls that lock or unlock, in order: ("match", lock), ("insert", lock), ("lock", node), ("unlock", node).
    asked, inserted: what was looked up and stored: (token ids, namespace), and (token ids, blocks, namespace).
    """

    def __init__(self, found=(), stored=None):
        self.block_size, self.width, self.num_evictable = SIZE, SIZE * 4, 0
        self.locks, self.asked, self.inserted = [], [], []
        self.tree = RadixTree(SIZE)
        self.root = self.node = self.tree.root
        for number, block in enumerate(found):
            self.node = hang(self.tree, self.node, (number + 1,), (block,))
        self.found, self.stored = list(found), stored

    def match(self, token_ids, namespace=None, lock=False):
        key = key_of(token_ids)
        self.asked.append((list(memoryview(key).cast("I")), namespace))
        self.locks.append(("match", lock))
        path = list(self.node.path())[::-1][: len(key) // self.width]
        return Match(path[-1] if path else self.root, self.found[: len(path)], len(path) * SIZE)

    def insert(self, token_ids, blocks, namespace=None, lock=False):
        key = key_of(token_ids)
        self.inserted.append((list(memoryview(key).cast("I")), list(blocks), namespace))
        self.locks.append(("insert", lock))
        has = list(blocks if self.stored is None else self.stored)
        self.new = Node(self.root, (namespace, key[: self.width]), key, has)
        return Match(self.new, has, len(has) * SIZE)

    def lock(self, node):
        self.locks.append(("lock", node))

    def unlock(self, node):
        self.locks.append(("unlock", node))


def manager_of(usable=12, cached=(), **options):
    """Return a manager whose tree has each prompt of `cached`, stored by requests that have ended."""
    manager = caching_manager(usable + 1, SIZE, **options)
    for prompt in cached:
        serve(manager, "before", prompt)
    return manager


def tree_of(manager):
    return manager.coordinator.prefixes.tree


def stats_of(manager):
    return manager.coordinator.prefixes.stats


def serve(manager, name, prompt, computed=None, end=True, **where):
    """Run one request from admission to its end; return how many tokens it found."""
    found = manager.allocate(name, prompt, **where)
    manager.grow(name, len(prompt))
    manager.commit(name, prompt, len(prompt))
    if end:
        manager.free(name, prompt if computed is None else computed)
    return found


class PlainCounts(RefCountedAllocator):
    """Frees blocks without checks, except that no table of `tables` may still point at a block that becomes free."""

    tables = MappingProxyType({})

    def free(self, blocks):
        for block in blocks:
            self.counts[block] -= 1
            if self.counts[block] == 0:
                users = [name for name, table in self.tables.items() if block in table.blocks or block in table.row]
                assert not users, (
                    f"block {block} is freed while the table of {users[0]!r} still has it; "
                    "the table and its row must point at the blocks that stay before the duplicates are freed"
                )
                self.held.remove(block)
                self.free_blocks.append(block)


def by_hand(counts, found=(), stored=None):
    """Return a manager over a stub tree, with blocks that have the reference counts of `counts`."""
    manager = manager_of()
    manager.allocator = manager.coordinator.prefixes.allocator = PlainCounts(13, SIZE)
    manager.coordinator.prefixes.tree = StubTree(found, stored)
    manager.allocator.tables = manager.tables
    for block, count in counts.items():
        manager.allocator.counts[block] = count
        manager.allocator.held.add(block)
        manager.allocator.free_blocks.remove(block)
    return manager


def table_of(manager, name, blocks, *names, namespace=None):
    """Return a table built by hand that holds `blocks`; it was admitted with the tokens of `names`."""
    table, node = RequestTable(manager.allocator), tree_of(manager).node
    num_stored = sum(len(part.blocks) for part in node.path())
    table.shared = SharedPrefix(key_of(tokens(*names)), namespace, node, num_stored, len(names))
    table.blocks, table.num_tokens = list(blocks), len(blocks) * SIZE
    table.row.fromlist(table.blocks)
    manager.tables[name] = table
    return table


# Admission


@pytest.mark.task(7)
def test_a_request_begins_with_the_blocks_that_are_found():
    manager = by_hand({5: 1, 6: 1}, found=[5, 6])
    assert manager.allocate("a", tokens(1, 2, 3)) == 8, "two blocks of four tokens need not be computed"
    table = manager.tables["a"]
    assert isinstance(table.shared, SharedPrefix), "table.shared must be a SharedPrefix: it says what is shared"
    assert (table.blocks, table.row.tolist(), table.num_tokens) == ([5, 6], [5, 6], 8), (
        "the table must begin with the two blocks that were found, and count their eight tokens"
    )
    assert manager.allocator.counts[5:7] == [2, 2], "the request must hold the blocks it found, alongside the tree"


@pytest.mark.task(7)
def test_what_is_found_is_locked_by_the_same_call():
    manager = by_hand({5: 1}, found=[5])
    manager.allocate("a", tokens(1, 2, 3))
    assert tree_of(manager).locks == [("match", True)], (
        "match with lock=True, once: between a match and a later lock, an eviction may take the blocks"
    )
    assert manager.tables["a"].shared.node is tree_of(manager).node, (
        "the table must remember the node that was locked, to unlock it"
    )


@pytest.mark.task(7)
@pytest.mark.parametrize("length, usable", [(12, 8), (11, 8), (9, 8), (8, 4), (4, 0), (1, 0)])
def test_the_last_token_is_never_taken_from_the_tree(length, usable):
    manager, prompt = by_hand({5: 1, 6: 1, 7: 1}, found=[5, 6, 7]), tokens(1, 2, 3)[:length]
    assert manager.allocate("a", prompt) == usable, (
        f"the tree has all whole blocks of these {length} tokens, but at least one token must be computed: "
        "without it there are no logits to choose the first new token from"
    )


@pytest.mark.task(7)
def test_the_table_s_key_has_all_whole_blocks_of_the_prompt():
    manager = by_hand({5: 1}, found=[5])
    for name, length in (("a", 12), ("b", 14)):
        manager.allocate(name, tokens(1, 2, 3, 4)[:length])
        table = manager.tables[name]
        assert (len(table.shared.key) // TOKEN_BYTES, table.shared.num_whole) == (12, 3), (
            f"{length} tokens fill three blocks. The key says what the request will store, and all three will be full; "
            "only the lookup leaves out the last token"
        )
        assert table.shared.key == key_of(tokens(1, 2, 3)), "the key is the prompt's whole blocks"
        assert table.shared.num_stored == 1, "the tree has one of these blocks"


@pytest.mark.task(7)
def test_a_request_looks_only_in_its_namespace():
    manager = by_hand({})
    manager.allocate("a", tokens(1, 2), "ours")
    assert [namespace for _, namespace in tree_of(manager).asked] == ["ours"], (
        "match must be told the request's namespace"
    )
    assert manager.tables["a"].shared.namespace == "ours", "the table stores under the same namespace later"


@pytest.mark.task(7)
def test_an_admission_is_counted():
    manager = by_hand({5: 1, 6: 1}, found=[5, 6])
    manager.allocate("a", tokens(1, 2, 3))
    manager.allocate("b", tokens(1, 2)[:5])
    stats = stats_of(manager)
    assert (stats.num_lookups, stats.asked_tokens, stats.found_tokens) == (2, 17, 12), (
        "12 + 5 prompt tokens were asked for, and 8 + 4 of them found; self.stats counts every admission"
    )


@pytest.mark.parametrize("length, most", [(8, 4), (9, 8), (12, 8), (13, 12), (1, 0), (4, 0), (5, 4)])
def test_at_least_one_token_of_a_cached_prompt_is_computed(length, most):
    prompt = tokens(1, 2, 3, 4)[:length]
    manager = manager_of(cached=[tokens(1, 2, 3, 4)])
    assert manager.allocate("a", prompt) == most, "without a computed token there are no logits to choose from"


def test_an_id_in_use_is_refused():
    manager = by_hand({5: 1}, found=[5])
    manager.allocate("a", tokens(1, 2))

    def books():
        counts = list(manager.allocator.counts)
        return manager.tables["a"], list(tree_of(manager).locks), counts, stats_of(manager).num_lookups

    before = books()
    with refused("allocate must raise ValueError: request 'a' has a table, and its blocks would be lost"):
        manager.allocate("a", tokens(1, 2))
    assert books() == before, "a refused call must change nothing: no table, no lock, no count, no statistics"


def test_an_eviction_between_match_and_allocation_spares_what_was_matched():
    manager = manager_of(6, cached=[tokens(1, 2), tokens(3, 4, 5)])
    assert manager.allocate("a", tokens(1, 2, 6)) == 8
    mine = list(manager.tables["a"].blocks)
    assert manager.allocate("b", tokens(7, 8, 9, 6)) == 0
    manager.grow("b", 16)
    assert manager.tables["a"].blocks == mine and set(mine).isdisjoint(manager.tables["b"].blocks), (
        "b grows after a's match and before a's own growth: the blocks that a has matched must not be given to b"
    )
    with pytest.raises(OutOfBlocks):
        manager.grow("a", 12)


@pytest.mark.parametrize("prompt", [tokens(1, 2, 6), tokens(3, 3), tokens(8)])
def test_asking_for_the_cost_changes_nothing(prompt):
    manager = manager_of(6, cached=[tokens(1, 2, 5), tokens(3)])
    tree = tree_of(manager)

    def books():
        return contents(tree), tree.now, list(manager.allocator.counts), manager.blocks_by_state

    before = books()
    manager.cost(prompt, len(prompt))
    assert books() == before
    assert manager.tables == {} and stats_of(manager).num_lookups == 2, "who was not admitted did not look up"


@pytest.mark.parametrize(
    "prompt, cost, what",
    [
        (tokens(8, 9), 2, "nothing is stored: two blocks"),
        (tokens(1, 2, 6), 1, "a running request has locked both blocks that are found: only the third"),
        (tokens(3, 4, 6), 3, "two are found that were evictable: they no longer count as free"),
        (tokens(3, 6), 2, "one of the two on that edge is found, and the other can still be evicted"),
        (tokens(1, 2, 7, 6), 2, "two are locked, one is evictable, one is missing"),
    ],
)
def test_the_cost_is_what_an_admission_takes(prompt, cost, what):
    manager = manager_of(cached=[tokens(1, 2, 7), tokens(3, 4)])
    manager.allocate("other", tokens(1, 2, 9))
    free = manager.num_free_blocks
    assert manager.cost(prompt, len(prompt)) == (cost, False), what
    manager.allocate("a", prompt)
    manager.grow("a", len(prompt))
    assert free - manager.num_free_blocks == cost, what


# What a request leaves


def test_chunks_are_stored_as_they_are_computed():
    manager, prompt = manager_of(), tokens(1, 2, 3)
    manager.allocate("a", prompt)
    manager.grow("a", 6)
    manager.commit("a", prompt, 6)
    assert len(contents(tree_of(manager))) == 1, "six computed tokens fill one block, which can be shared"
    assert manager.allocate("b", prompt) == 4, "a request that arrives during a's prefill finds a's first chunk"
    manager.grow("a", 12)
    manager.commit("a", prompt, 12)
    assert len(contents(tree_of(manager))) == 3


@pytest.mark.task(8)
def test_duplicates_are_given_back_and_the_table_points_at_what_the_tree_has():
    manager = by_hand({5: 1, 6: 1, 7: 1, 8: 1}, stored=[5, 6])
    table = table_of(manager, "b", [7, 8], 1, 2)
    manager.coordinator.prefixes.store(table, 2)
    assert table.blocks == [5, 6], "the table must point at the blocks that stay"
    assert table.row.tolist() == [5, 6], "table.row, which attention reads, must point at the blocks that stay as well"
    assert manager.allocator.counts[5:9] == [2, 2, 0, 0], "b must hold the tree's blocks now, and its own must be free"
    assert set(manager.allocator.free_blocks) >= {7, 8}


@pytest.mark.task(8)
def test_only_duplicates_are_replaced():
    manager = by_hand({5: 1, 6: 1, 7: 1}, stored=[5, 6])
    table = table_of(manager, "b", [7, 6], 1, 2)
    manager.coordinator.prefixes.store(table, 2)
    assert table.blocks == [5, 6] and manager.allocator.counts[5:8] == [2, 1, 0], (
        "block 7 is a duplicate of the tree's block 5; block 6 is the tree's own, and its count stays as it is"
    )


@pytest.mark.task(8)
def test_a_store_without_duplicates_keeps_the_table_s_blocks():
    manager = by_hand({7: 1, 8: 1})
    table = table_of(manager, "b", [7, 8], 1, 2)
    manager.coordinator.prefixes.store(table, 2)
    assert (table.blocks, manager.allocator.counts[7:9]) == ([7, 8], [1, 1]), "the tree took b's own blocks: keep them"
    assert tree_of(manager).inserted == [(tokens(1, 2), [7, 8], None)], "store must insert the tokens and their blocks"
    assert table.shared.node is tree_of(manager).new and table.shared.num_stored == 2, (
        "the table must remember the node that it has locked now, and that two of its blocks are stored"
    )


@pytest.mark.task(8)
def test_only_the_first_blocks_are_stored():
    manager = by_hand({6: 1, 7: 1, 8: 1})
    table = table_of(manager, "b", [6, 7, 8], 1, 2, 3, namespace="ours")
    manager.coordinator.prefixes.store(table, 2)
    assert tree_of(manager).inserted == [(tokens(1, 2), [6, 7], "ours")], (
        "store(table, 2) must insert two blocks, their tokens, under the table's namespace: the third is not full yet"
    )
    assert (table.shared.num_stored, table.shared.num_whole) == (2, 3), (
        "two blocks are stored; the third will be stored later"
    )


@pytest.mark.task(8)
def test_the_new_path_is_locked_before_the_old_one_is_unlocked():
    manager = by_hand({5: 2, 8: 1}, found=[5], stored=[5, 8])
    table = table_of(manager, "b", [5, 8], 1, 2)
    before = table.shared.node
    manager.coordinator.prefixes.store(table, 2)
    assert tree_of(manager).locks == [("insert", True), ("unlock", before)], (
        "insert with lock=True, then unlock the node that the table had locked, once: "
        "while the path has no lock, an eviction may take its blocks"
    )


@pytest.mark.task(8)
def test_what_the_tree_has_no_room_for_is_not_tried_again():
    manager = by_hand({5: 1, 7: 1, 8: 1}, stored=[5])
    table = table_of(manager, "b", [7, 8], 1, 2)
    manager.coordinator.prefixes.store(table, 2)
    assert (table.blocks, table.shared.num_stored, table.shared.num_whole) == ([5, 8], 1, 1), (
        "the tree took one block of two: num_stored and num_whole must say so, and b keeps its second block"
    )


# Twins


def computing(prompt, num_tokens, **options):
    """Return a manager in the middle of a step that computes the first `num_tokens` tokens of request "a"."""
    manager = manager_of(**options)
    manager.allocate("a", prompt, "ours")
    manager.grow("a", num_tokens)
    return manager


def test_a_twin_should_wait_until_the_tree_has_what_the_first_computes():
    manager = computing(tokens(1, 2, 3), 12)
    assert manager.cost(tokens(1, 2, 3), 12, "ours") == (3, True), "a computes these very blocks in this step"
    manager.commit("a", tokens(1, 2, 3), 12)
    assert manager.cost(tokens(1, 2, 3), 12, "ours") == (1, False), "one step later, two of three are there"


def test_a_twin_should_wait_for_each_chunk_of_what_it_shares():
    prompt, twin = tokens(1, 2, 3, 4, 5), tokens(1, 2, 3, 9, 5)
    manager = manager_of()
    manager.allocate("a", prompt)
    waits = []
    for stop in (4, 6, 10, 12, 16, 20):
        manager.grow("a", stop)
        waits.append(manager.cost(twin, 20).should_wait)
        manager.commit("a", prompt, stop)
    assert waits == [True, True, True, True, False, False], (
        "the twin shares its first three blocks with a; the rest is its own"
    )
    assert manager.cost(twin, 20).num_blocks == 2


@pytest.mark.parametrize(
    "other, namespace, why",
    [
        (tokens(1, 2), "theirs", "requests of another namespace share nothing"),
        (tokens(6, 2), "ours", "different tokens have different KV"),
        ([10, 11, 12, 99, *tokens(2)], "ours", "only whole blocks are shared"),
        (tokens(1), "ours", "its only block holds its last token, which it must compute itself"),
    ],
)
def test_only_a_twin_should_wait(other, namespace, why):
    manager = computing(tokens(1, 2), 8)
    assert not manager.cost(other, len(other), namespace).should_wait, why
    assert manager.cost(tokens(1, 6), 8, "ours").should_wait


def test_no_request_waits_for_what_the_tree_will_not_have():
    answering = computing(tokens(1, 2)[:6], 6)  # its answer goes into its second block
    answering.commit("a", tokens(1, 2)[:6], 6)
    answering.grow("a", 8)
    assert not answering.cost(tokens(1, 2, 3), 12, "ours").should_wait, "an answer is stored when its request ends"
    cut = computing(tokens(1, 2, 3), 10)
    cut.truncate("a", 6)
    assert cut.cost(tokens(1, 2, 3), 12, "ours").should_wait, "the first block still holds the prompt's tokens"
    cut.commit("a", tokens(1, 2, 3), 6)
    assert not cut.cost(tokens(1, 2, 3), 12, "ours").should_wait, "what is written after a truncation may be anything"
    full = computing(tokens(1, 2, 3), 12, capacity=1)
    full.commit("a", tokens(1, 2, 3), 12)
    assert not full.cost(tokens(1, 2, 3), 12, "ours").should_wait, (
        "the tree has no room for the rest: it will never be stored"
    )


def test_no_request_waits_for_one_that_lags_behind_the_tree():
    manager = computing(tokens(1, 2, 3), 8)
    serve(manager, "b", tokens(1, 2), namespace="ours")  # stores a's first two blocks before a does
    prompt = tokens(1, 2, 3)
    assert not manager.cost(prompt, 12, "ours").should_wait, "it lacks the third block, and a is not computing that yet"
    assert not manager.cost(prompt[:9], 9, "ours").should_wait, "it already finds all that it may use"
    manager.grow("a", 9)
    assert manager.cost([*prompt, 99], 13, "ours").should_wait, "now a has begun the third block"


def test_a_twin_need_not_wait_once_the_first_is_gone():
    manager, prompt = computing(tokens(1, 2, 3), 6), tokens(1, 2, 3)
    manager.commit("a", prompt, 6)
    manager.grow("a", 12)
    assert manager.cost(prompt, 12, "ours").should_wait
    manager.free("a", prompt[:6])  # aborted while the step runs, preempted, or failed
    assert not manager.cost(prompt, 12, "ours").should_wait, "no request is computing it any more"
    assert manager.allocate("b", prompt, "ours") == 4, "a's computed block must be in the tree"


# Room


def test_a_pool_full_of_cached_prefixes_still_admits():
    manager = manager_of(6, cached=[tokens(1, 2, 3), tokens(4, 5, 6)])
    assert manager.blocks_by_state == BlocksByState(free=0, held=0, cached=6) and manager.num_free_blocks == 6
    assert serve(manager, "a", tokens(7, 8, 9, 10, 11, 12)) == 0
    assert tree_of(manager).peek(tokens(7, 8, 9, 10, 11, 12)).num_tokens == 24


def test_growth_beyond_the_pool_is_refused_and_evicts_nothing():
    manager = manager_of(6, cached=[tokens(1, 2), tokens(3)])
    serve(manager, "a", tokens(4, 5), end=False)
    manager.allocate("b", tokens(6, 7, 8, 9, 10, 11))
    before = contents(tree_of(manager))
    with pytest.raises(OutOfBlocks):
        manager.grow("b", 20)
    assert contents(tree_of(manager)) == before and manager.blocks_by_state == BlocksByState(1, 2, 3)


def test_no_more_is_evicted_than_a_request_lacks():
    manager = manager_of(6, cached=[tokens(1, 2), tokens(3, 4)])  # two blocks are free, four are cached
    manager.allocate("a", tokens(5, 6, 7))
    manager.grow("a", 12)
    assert tree_of(manager).num_evicted == 1, "two of the three blocks were free: one cached block had to go"


def test_the_capacity_limits_what_is_kept():
    manager = manager_of(12, cached=[tokens(1, 2), tokens(3, 4), tokens(5, 6)], capacity=3)
    assert manager.blocks_by_state == BlocksByState(free=9, held=0, cached=3)


# Copy on write


class Copies(list):
    def __call__(self, sources, targets):
        self.append((list(sources), list(targets)))


def test_a_request_truncated_into_a_stored_block_writes_into_a_copy():
    manager = manager_of(copy=(copies := Copies()))
    serve(manager, "a", tokens(1, 2, 3), end=False)
    stored = contents(tree_of(manager))
    manager.truncate("a", 6)
    assert manager.missing_blocks("a", 7) == 1, "the next token goes into a shared block: a copy will be needed"
    manager.grow("a", 7)
    assert manager.missing_blocks("a", 8) == 0, "a is the only holder of its block now"
    manager.grow("a", 8)
    assert len(copies) == 1 and manager.tables["a"].blocks[1] not in stored.values(), (
        "block 2 is in the tree: other requests would read what a writes into it"
    )
    assert contents(tree_of(manager)) == stored
    assert tree_of(manager).num_protected == 1 and manager.blocks_by_state == BlocksByState(free=8, held=2, cached=2)
