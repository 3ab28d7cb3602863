"""Lesson 15. A pool that is full: what it still holds of a text is found, and what could not be found is evicted."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.kv.radix_node import TOKEN_BYTES
from tests.shared.trees import check_tree
from tests.shared.window_ledger import Windows, compute, serve

SHAPES = [(6, 2, 4, 45), (2, 1, 4, 45), (9, 3, 4, 50), (5, 2, 1, 120), (17, 1, 16, 12)]  # W, groups, size, blocks
FAMILIES = [random.Random(seed).choices(range(3), k=90) for seed in range(3)]
NUM_PROMPTS = 25


def texts_of(kv):
    """Return the tokens of each text that the tree holds, from the beginning to a leaf, but for running requests' own.

    Those are in use, found or not: of their windows, what nothing reads is the last that the pool gives up.
    """
    texts, leaves = [], [kv.tree.root]
    for node in leaves:
        leaves += node.children.values()
        if node.is_evictable:
            key = b"".join(bytes(part.key) for part in reversed(list(node.path())))
            texts.append(
                [int.from_bytes(key[at : at + TOKEN_BYTES], "little") for at in range(0, len(key), TOKEN_BYTES)]
            )
    return texts


def check_all_is_found(kv, when):
    for tokens in texts_of(kv):
        found = kv.coordinator.prefixes.peek([*tokens, 99], None, {}).num_tokens
        assert found == len(tokens), f"{when}: the pool holds {len(tokens)} tokens of a text, and {found} are found"
    check_tree(kv.tree)


def test_the_hit_becomes_shorter_and_then_the_whole_text_goes():
    """One text fills the pool, 10 blocks in each of 3 groups; prompts like it begin behind 36 tokens, others behind 40.

    The windows of these two ends are in blocks 7 to 9. Without them nothing of the text is found.
    """
    kv, tokens = Windows(6, 2, 31, 4, max_step=40), list(range(40))
    serve(kv, "first", tokens, most=40)
    seen = []
    for num_free in (14, 15, 18):
        kv.coordinator.prefixes._make_free(num_free)
        seen.append((kv.allocator.num_free, kv.findable(tokens)))
    assert seen == [(14, 40), (17, 36), (30, 0)], "spare windows go first, then the last block, then everything"


def pressed(shape):
    """Return a manager with room for two or three texts."""
    window, num_groups, size, usable = shape
    return Windows(window, num_groups, usable + 1, size, max_step=8)


def ask(kv, chance, name, running):
    """Serve a request, or one that keeps its blocks, until there is no room; then end all that are running."""
    tokens = FAMILIES[chance.randrange(3)][: chance.randrange(1, 90)] + chance.choices(range(3), k=chance.randrange(4))
    if chance.random() < 0.1:
        kv.tree.evict(chance.randrange(1, 6))
    prompt = tokens[: chance.randint(1, len(tokens))]  # what is behind it is an answer
    if kv.cost(prompt, len(tokens)).num_blocks > kv.num_free_blocks:
        while running:
            kv.free(*running.pop())
    else:
        kv.allocate(name, prompt)
        compute(kv, name, tokens)
        running.append((name, tokens))
        if chance.random() < 0.8:
            kv.free(*running.pop())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_whatever_the_pool_holds_of_a_text_is_found(shape, seed):
    kv, chance, running = pressed(shape), random.Random(seed), []
    for number in range(NUM_PROMPTS):
        ask(kv, chance, f"r{number}", running)
        check_all_is_found(kv, f"after {number} prompts")
