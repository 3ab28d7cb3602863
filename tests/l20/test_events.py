"""Lesson 20. Events in order: whatever a real manager does, a subscriber ends up with exactly the tree's blocks."""

from functools import partial

import hypothesis.strategies as st
from hypothesis import given, settings

from mini_engine.agents.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventLog,
    short_hash,
)
from mini_engine.base.errors import OutOfBlocks
from mini_engine.distributed.routing.keys import block_keys
from mini_engine.kv.cache_coordinator import cache_of, coordinated
from mini_engine.kv.prefix_cache import PrefixCache
from mini_engine.kv.prefixes import Stored
from mini_engine.kv.radix_node import key_of

SIZE = 4
PRIVATE = object()  # a namespace of one request, as for prompt log probabilities


def hashes(tokens, namespace=None):
    """Return the hashes that lesson 13's router would look up for a prompt."""
    return [short_hash(key) for key in block_keys(tokens, namespace, SIZE)]


def words(*names):
    """Return four tokens per name."""
    return [10 * name + offset for name in names for offset in range(SIZE)]


def tell(log, tokens, blocks, start=0, namespace=None):
    log.stored(Stored(key_of(tokens), namespace, blocks, start))


class Subscriber:
    """A set of hashes, kept as a subscriber would; it insists that events make sense one after another."""

    def __init__(self):
        self.blocks = set()

    def take(self, events):
        for event in events:
            if isinstance(event, BlockStored):
                names = list(event.block_hashes)
                assert len(event.token_ids) == len(names) * event.block_size, "every stored block comes with its tokens"
                assert event.parent_block_hash is None or event.parent_block_hash in self.blocks, (
                    f"{event} comes behind a block that was never stored, or removed before"
                )
                assert not self.blocks & set(names), f"{event} was stored already: publish only what is new"
                self.blocks |= set(names)
            elif isinstance(event, BlockRemoved):
                assert set(event.block_hashes) <= self.blocks, f"{event} was not stored: events came out of order"
                self.blocks -= set(event.block_hashes)
            else:
                self.blocks.clear()


def tree_hashes(tree):
    """Return the hashes of all blocks in a tree, computed from its texts; private ones are left out."""
    found = set()

    def visit(node, text, namespace):
        for child in node.children.values():
            space = child.label[0] if node is tree.root else namespace
            whole = text + bytes(child.key)
            ids = list(memoryview(whole).cast("I"))
            if space is not PRIVATE:
                found.update(hashes(ids, space)[-len(child.blocks) :])
            visit(child, whole, space)

    visit(tree.root, b"", None)
    return found


def test_all_blocks_cleared_forgets_their_names():
    log = EventLog(SIZE)
    tell(log, words(1), [7])
    log.cleared()
    log.removed([7])
    tell(log, words(2), [7])
    assert log.take()[1:] == [AllBlocksCleared(), BlockStored(hashes(words(2)), None, words(2), SIZE)]


def test_removing_costs_the_same_however_long_the_text(monkeypatch):
    """Looked up by the block's id: a hash is never computed a second time."""
    log = EventLog(SIZE)
    tell(log, words(*range(100)), list(range(1, 101)))
    monkeypatch.setattr("mini_engine.agents.events.chain", None)
    monkeypatch.setattr("mini_engine.agents.events.block_keys", None)
    log.removed([100])
    assert log.take()[-1] == BlockRemoved(hashes(words(*range(100)))[-1:])


def test_a_log_that_is_not_read_stays_small_and_ends_in_a_snapshot():
    log = EventLog(SIZE, limit=3)
    for name in range(1, 6):
        tell(log, words(name), [name])
    assert len(log.waiting) <= 3, "what is not read must not fill memory"
    assert log.num_dropped == 5, "every event that never left is counted"
    reader = Subscriber()
    events = log.take()
    assert events[0] == AllBlocksCleared(), "the reader has missed events: it must not keep what it had"
    reader.take(events)
    assert reader.blocks == {one for name in range(1, 6) for one in hashes(words(name))}
    tell(log, words(1, 9), [1, 9], start=1)
    assert len(log.take()) == 1, "afterwards, events come one by one again"


def test_a_snapshot_joins_blocks_that_follow_each_other():
    log = EventLog(SIZE)
    tell(log, words(1, 2), [3, 4])
    tell(log, words(1, 2, 3), [3, 4, 5], start=2)
    tell(log, words(1, 9), [3, 6], start=1)
    waiting, whole = log.take_all()
    assert len(waiting) == 3 and [type(event) for event in whole] == [AllBlocksCleared, BlockStored, BlockStored]
    assert whole[1] == BlockStored(hashes(words(1, 2, 3)), None, words(1, 2, 3), SIZE)
    assert whole[2].parent_block_hash == hashes(words(1))[0]


TURNS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 3), min_size=1, max_size=6),  # the text, by names of blocks
        st.integers(0, 3),  # tokens behind its last whole block
        st.integers(0, 9),  # tokens of its answer
        st.sampled_from([None, "a", PRIVATE]),
        st.sampled_from(["end", "go on", "fail", "truncate", "clear"]),
        st.booleans(),  # the reader takes what there is
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(TURNS, st.sampled_from([None, 0, 5]), st.sampled_from([4, 10_000]))
def test_the_subscribers_blocks_are_those_of_the_tree(turns, capacity, limit):
    """Whatever a real manager does: shared texts, evictions, duplicates, truncations, failures, clearing."""
    log, reader = EventLog(SIZE, limit), Subscriber()
    cache = partial(PrefixCache, capacity=capacity, watcher=log)
    manager = coordinated(14, SIZE, prefixes=cache)
    running = []
    for number, (names, more, answer, namespace, then, reads) in enumerate(turns):
        prompt = words(*names) + [5] * more
        name = f"r{number}"
        try:
            found = manager.allocate(name, prompt, namespace)
            manager.grow(name, len(prompt))
            manager.commit(name, prompt, len(prompt))
            text = prompt + [7] * answer
            manager.grow(name, len(text))
            manager.commit(name, text, len(text))
        except OutOfBlocks:
            manager.free(name, [])
            continue
        if then == "go on" and len(running) < 2:
            running.append((name, text))
        elif then == "truncate":
            keep = max(found, len(prompt) - 1)
            manager.truncate(name, keep)
            text = text[:keep] + [8] * SIZE
            try:
                manager.grow(name, len(text))
                manager.commit(name, text, len(text))
            except OutOfBlocks:
                text = text[:keep]
            manager.free(name, text)
        else:
            manager.free(name, [] if then == "fail" else text)
        if then == "clear":
            for other, other_text in running:
                manager.free(other, other_text)
            running = []
            cache_of(manager).clear()
        if reads:
            reader.take(log.take())
            assert reader.blocks == tree_hashes(cache_of(manager).prefixes.tree)
    reader.take(log.take())
    tree = cache_of(manager).prefixes.tree
    assert reader.blocks == tree_hashes(tree), "the subscriber believes in other blocks than the tree has"
    whole = Subscriber()
    whole.take(log.take_all()[1])
    assert whole.blocks == reader.blocks, "a snapshot has the same blocks"
