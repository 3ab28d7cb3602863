"""Lesson 8. Shared by the tests: trees built by hand, the invariants of every tree, and games of a state machine."""

from contextlib import contextmanager

from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from mini_engine.kv.radix import RadixTree
from mini_engine.kv.radix_node import Node, key_of

SIZE = 4


class Contended:
    """A mutex that another thread holds when it is first asked for; before releasing it, that thread does `meanwhile`.

    `is_held` says whether the code under test holds the mutex.
    """

    def __init__(self, meanwhile=lambda: None):
        self.meanwhile, self.depth = meanwhile, 0

    @property
    def is_held(self):
        return self.depth > 0

    def acquire(self, *_, **__):
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        self.depth += 1
        return True

    def release(self):
        self.depth -= 1

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *_):
        self.release()


@contextmanager
def refused(why):
    """Assert that the block raises ValueError; otherwise fail with `why`."""
    try:
        yield
    except ValueError:
        return
    raise AssertionError(why)


def tokens(*names):
    """Return four tokens per name: 1 stands for 10 11 12 13."""
    return [10 * name + offset for name in names for offset in range(SIZE)]


def hang(tree, parent, names, blocks, namespace=None, locks=0, used=0, hits=0):
    """Add a node below `parent` by hand: the tokens of `names` in `blocks`."""
    key = key_of(tokens(*names))
    node = Node(parent, (namespace, key[: tree.width]), key, list(blocks), used)
    node.locks, node.last_used, node.num_hits = locks, used, hits
    parent.children[node.label] = node
    tree.num_blocks += len(blocks)
    tree.num_protected += len(blocks) if locks else 0
    tree.now = max(tree.now, used)
    return node


def small_tree(**options):
    """Build root - [1 2 3 in blocks 5 6 7], with the children [4 in 8] and [9 in 2]."""
    tree = RadixTree(SIZE, **options)
    trunk = hang(tree, tree.root, (1, 2, 3), (5, 6, 7), used=3)
    return tree, trunk, hang(tree, trunk, (4,), (8,), used=3), hang(tree, trunk, (9,), (2,), used=2)


def nodes(tree):
    """Return all nodes except the root."""
    found, open_ = [], list(tree.root.children.values())
    while open_:
        node = open_.pop()
        found.append(node)
        open_ += node.children.values()
    return found


def holders(manager):
    """Return how many tables and nodes of the tree hold each block, by its number."""
    found = [0] * manager.allocator.num_blocks
    for holder in (*manager.tables.values(), *nodes(manager.coordinator.prefixes.tree)):
        for block in holder.blocks:
            found[block] += 1
    return found


def contents(tree):
    """Return {(namespace, all tokens up to the end of a block): block}, by walking the whole tree."""
    found = {}

    def visit(node, before):
        for index, block in enumerate(node.blocks):
            prefix = before + bytes(node.key[: (index + 1) * tree.width])
            found[node.label[0], prefix] = block
        for child in node.children.values():
            visit(child, before + bytes(node.key))

    visit(tree.root, b"")
    return found


def check_tree(tree):
    """Assert what holds for every tree after every call."""
    sizes = {True: 0, False: 0}
    for node in nodes(tree):
        assert node.blocks and len(node.key) == len(node.blocks) * tree.width, "an edge must hold whole blocks"
        assert node.parent.children[node.label] is node, "a node must be in its parent's children under its label"
        assert node.label[1] == node.key[: tree.width], "a node's label must be its first block's tokens"
        below = sum(child.locks for child in node.children.values())
        assert node.locks >= below, f"{below} locks below a node with {node.locks}: a lock counts on the whole path"
        assert node.queued is not None or not node.is_evictable, "an unlocked leaf must be in the eviction queue"
        sizes[node.locks > 0] += len(node.blocks)
    assert tree.num_protected == sizes[True], "num_protected must count the blocks of locked nodes"
    assert tree.num_evictable == sizes[False], "num_evictable must count the blocks of unlocked nodes"
    assert tree.num_blocks == sum(sizes.values()), "evictable and protected must add up to all blocks of the tree"
    held = [block for node in nodes(tree) for block in node.blocks]
    assert len(held) == len(set(held)), "a block must be in the tree at most once"


def played(machine, examples, steps):
    """Let hypothesis play so many games of a machine, which has a `world`; return their worlds."""
    worlds = []

    class Machine(machine):
        def teardown(self):
            super().teardown()
            worlds.append(self.world)

    plan = settings(max_examples=examples, stateful_step_count=steps, deadline=None, phases=[Phase.generate])
    run_state_machine_as_test(Machine, settings=plan)
    return worlds
