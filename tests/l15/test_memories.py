"""Lesson 15. Several memories as one: a request begins at the longest prefix from which all of them can resume."""

import random
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.base.errors import OutOfBlocks
from mini_engine.hybrid.memory import StateMemory
from mini_engine.kv.cache_coordinator import coordinated
from mini_engine.kv.memories import Memories
from mini_engine.kv.memory import CacheMemory
from mini_engine.kv.prefix_cache import PrefixCache
from mini_engine.kv.radix_node import TOKEN_BYTES, key_of
from tests.l8.trees import check_tree
from tests.l11.ledger import Ledger
from tests.l15.ledger import Windows

SIZE, INTERVAL, MOST = 4, 8, 8


class Places(CacheMemory):
    """A memory that can resume after these numbers of tokens, and after none of the others."""

    def __init__(self, places):
        self.places = {0, *places}

    def last(self, tree, key, namespace):
        return max(place for place in self.places if place <= len(key) // TOKEN_BYTES)


@given(st.lists(st.sets(st.integers(0, 40)), min_size=2, max_size=4), st.integers(0, 45))
def test_the_hit_is_the_longest_prefix_that_all_can_resume_from(places, length):
    found = Memories([Places(some) for some in places]).last(None, bytes(length * TOKEN_BYTES), None)
    assert found == max(place for place in {0}.union(set.intersection(*places)) if place <= length), (
        f"{places}: asking each once is not enough, since the answer of one may suit the others no more"
    )


def test_the_page_s_example_takes_two_rounds():
    states, windows = Places({32, 96}), Places({16, 32, 64, 80})
    assert Memories([states, windows]).last(None, bytes(96 * TOKEN_BYTES), None) == 32


class Both(Windows):
    """A manager whose requests need a state and windows. `memory` is that of the windows."""

    def __init__(self, window=6, num_blocks=71, slots=4, track=5):
        super().__init__(window, 2, num_blocks, SIZE, MOST)
        self.states = Ledger(slots, track)
        self.state_memory = StateMemory(self.states, SIZE, INTERVAL)
        self.states.checkpoints = self.state_memory.checkpoints
        self.both = Memories([self.state_memory, self.memory])
        cache = partial(PrefixCache, memory=self.both, allocator=self.allocator)
        self.manager = coordinated(num_blocks, SIZE, prefixes=cache)

    def slot(self, name):
        return self.state_memory.slots_of(name)[0]

    def compute(self, name, tokens, most):
        """Run one chunk of at most `most` tokens; return whether the text has been computed."""
        start = self.hold(name).num_computed
        stop = self.chunk_end(name, start, min(len(tokens), start + most))
        self.grow(name, stop)
        self.write(name, tokens, start, stop)
        self.check_reads(name, tokens, start, stop)
        assert self.states.seen[self.slot(name)] == tuple(tokens[:start]), "the state has seen another text"
        self.states.advance(self.slot(name), tokens[start:stop])
        self.commit(name, tokens, stop)
        return stop == len(tokens)

    def places(self, tokens):
        """Return after how many tokens both can resume, counted by hand."""
        nodes = {
            len(list(node.path())) and sum(len(part.blocks) for part in node.path()): node for node in self.path(tokens)
        }
        found = [0]
        for num_blocks, node in nodes.items():
            blocks = self.tree.prefix(key_of(tokens[: num_blocks * SIZE]), None)
            first = max(0, num_blocks * SIZE - self.window + 1) // SIZE
            complete = all(block in self.kept.companions for block in blocks[first:])
            found += [num_blocks * SIZE] if node in self.state_memory.checkpoints and complete else []
        return found

    def path(self, tokens):
        return self.tree.path(key_of(tokens[: len(tokens) // SIZE * SIZE]), None)


def texts(chance):
    stem = FAMILIES[chance.randrange(2)][: chance.randrange(1, 50)]
    return stem + chance.choices(range(3), k=chance.randrange(6))


FAMILIES = [random.Random(seed).choices(range(3), k=60) for seed in range(2)]


@pytest.mark.parametrize("seed", range(40))
def test_requests_resume_only_where_state_and_window_are_both_there(seed):
    chance = random.Random(seed)
    kv = Both(window=chance.choice([2, 6, 9, 17]), num_blocks=chance.choice([41, 71]), track=chance.choice([1, 3, 8]))
    alive, found = {}, 0
    for index in range(150):
        tokens, name = texts(chance), f"r{index}"
        cost = kv.cost(tokens, len(tokens))
        promised = sum(kv.missing_blocks(one, len(text)) for one, text in alive.items())
        if kv.both.has_room and cost.num_blocks <= kv.num_free_blocks - promised:
            want, free = max(kv.places(tokens[: (len(tokens) - 1) // SIZE * SIZE])), kv.num_free_blocks
            assert kv.allocate(name, tokens) == want, f"{tokens}: the longest prefix that both can resume from"
            taken = free - kv.num_free_blocks + kv.missing_blocks(name, len(tokens))
            assert taken == cost.num_blocks, "an admission must take exactly what `cost` returned"
            alive[name], found = tokens, found + want
        for one in list(alive):
            if kv.compute(one, alive[one], chance.randrange(1, MOST + 1)) and chance.random() < 0.5:
                kv.free(one, alive.pop(one))
            elif chance.random() < 0.03:
                kv.free(one, alive.pop(one)[: kv.hold(one).num_computed])
            elif kv.hold(one).num_computed == len(alive[one]):
                if kv.missing_blocks(one, len(alive[one]) + 1) <= kv.num_free_blocks - sum(
                    kv.missing_blocks(other, len(text)) for other, text in alive.items()
                ):
                    alive[one].append(chance.randrange(3))
                else:
                    kv.free(one, alive.pop(one))
        check_tree(kv.tree)
    assert found, "nothing was ever found: the test shows nothing"
    for one in list(alive):
        kv.free(one, ())
    kv.coordinator.clear()
    assert kv.allocator.num_free == kv.allocator.num_blocks - 1, "blocks are lost"
    assert len(kv.state_memory.free_slots) == kv.states.max_reqs and not kv.states.held_track_slots, "slots are lost"
    assert not kv.kept.companions and not kv.memory.holds


def test_no_request_begins_while_one_of_them_is_full():
    kv = Both(slots=1)
    kv.allocate("a", [1, 2, 3])
    assert not kv.both.has_room
    with pytest.raises(OutOfBlocks):
        kv.allocate("b", [1, 2, 3])
    assert "b" not in kv.memory.holds


def test_a_state_is_kept_with_the_window_before_it():
    kv, tokens = Both(window=9), list(range(40))
    kv.allocate("a", tokens)
    while not kv.compute("a", tokens, MOST):
        pass
    kv.free("a", tokens)
    kv.both.trim(1000)
    assert kv.allocate("b", [*tokens[:24], 99]) == 24, (
        "a checkpoint after 24 tokens is of no use once its window has been given up: they are kept together"
    )
