"""Lesson 5. The manager: tables by request id, refused calls that change nothing, correct copies."""

import random
from array import array
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.errors import EngineDead, OutOfBlocks, UserError
from mini_engine.kv.block_tensor import KvPool
from mini_engine.kv.manager import BlocksByState, KvCacheManager, RequestTable, blocks_in_budget
from mini_engine.kv.seams import NoPrefixes, Stored
from tests.support import refused


def manager_with(blocks=8, block_size=4, **tables):
    """Return a manager with hand-made tables: name=(blocks, num_tokens)."""
    manager = KvCacheManager(blocks + 1, block_size)
    for name, (held, num_tokens) in tables.items():
        table = RequestTable(manager.allocator)
        table.blocks, table.num_tokens = list(held), num_tokens
        table.row.fromlist(table.blocks)
        manager.tables[name] = table
        manager.allocator.held |= set(held)
        manager.allocator.free_blocks = [b for b in manager.allocator.free_blocks if b not in held]
    return manager


def listed(row):
    """Return the blocks that `grow` answered as a list."""
    assert isinstance(row, array) and row.typecode == "i", (
        f"grow returned {row!r}: it returns the blocks as an int32 array, the table's row, from which plans are built"
    )
    return row.tolist()


def books(manager):
    tables = {name: (list(t.blocks), t.num_tokens, t.row.tolist()) for name, t in manager.tables.items()}
    return tables, list(manager.allocator.free_blocks), set(manager.allocator.held)


def test_a_new_request_has_no_kv_and_holds_nothing():
    manager = manager_with()
    assert manager.allocate("a", [1, 2, 3]) == 0, "this manager caches no prefixes: no token has KV yet"
    assert manager.tables["a"].blocks == [] and manager.num_free_blocks == 8


@pytest.mark.parametrize("tokens, blocks", [(1, 1), (4, 1), (5, 2), (13, 4)])
def test_the_cost_of_a_request_is_the_blocks_it_is_promised(tokens, blocks):
    manager = manager_with(a=([3, 5], 7))
    before = books(manager)
    assert manager.cost([1], tokens) == (blocks, False), "this manager caches no prefixes: there is nothing to wait for"
    assert books(manager) == before, "asking for the cost must change nothing"


def test_a_second_table_for_a_request_is_refused():
    manager = manager_with(a=([3], 2))
    before = books(manager)
    with refused(ValueError, "'a'"):
        manager.allocate("a", [1])
    assert books(manager) == before


@pytest.mark.task(1)
def test_grow_takes_a_block_only_when_the_held_ones_are_full():
    manager = manager_with(a=([3], 2))
    assert listed(manager.grow("a", 4)) == [3], "four tokens fit in the block that is held"
    assert manager.tables["a"].num_tokens == 4, "two tokens were in use, now it is four: num_tokens rises with them"
    assert len(listed(manager.grow("a", 5))) == 2, "the fifth token needs a second block"
    assert manager.tables["a"].num_tokens == 5, "num_tokens rises to the total that grow was given"
    assert manager.num_free_blocks == 6, "of 8 blocks a holds two"
    assert manager.tables["a"].blocks == manager.tables["a"].row.tolist(), "blocks and row list the same blocks"


@pytest.mark.task(1)
def test_grow_takes_the_total_length_not_the_additional_tokens():
    manager = manager_with(a=([3, 5], 7))
    assert listed(manager.grow("a", 7)) == [3, 5], "grow takes the total length, and 7 tokens have slots already"
    assert listed(manager.grow("a", 3)) == [3, 5], "grow never shrinks a table: 3 tokens have slots, and so have 7"
    assert manager.tables["a"].num_tokens == 7, "grow never shrinks a table: it has 7 tokens, and 3 were asked for"
    assert len(listed(manager.grow("a", 9))) == 3, "9 tokens in total need 3 blocks of 4, and two are held"


@pytest.mark.task(1)
def test_grow_that_fails_changes_nothing():
    manager = manager_with(blocks=4, a=([1], 4), b=([2], 3))
    before = books(manager)
    with pytest.raises(OutOfBlocks):
        manager.grow("a", 13)
    assert books(manager) == before, "a request that cannot grow must keep what it holds"


@pytest.mark.task(1)
def test_grow_of_a_request_without_a_table_is_a_key_error():
    with pytest.raises(KeyError):
        manager_with().grow("unknown", 1)


@pytest.mark.parametrize("tokens, missing", [(0, 0), (5, 0), (8, 0), (9, 1), (12, 1), (13, 2)])
def test_missing_blocks_are_those_beyond_what_is_held(tokens, missing):
    assert manager_with(a=([3, 5], 5)).missing_blocks("a", tokens) == missing


def test_free_gives_everything_back_and_is_idempotent():
    manager = manager_with(a=([3, 5], 7), b=([1], 1))
    manager.free("a", [1, 2, 3])
    manager.free("a")
    manager.free("unknown")
    assert set(manager.tables) == {"b"} and manager.num_free_blocks == 7


class Parts(NoPrefixes):
    """The parts of a manager, of which `broken` raises. `told` has the calls of all."""

    def __init__(self, broken, error):
        super().__init__(9, 4)
        self.broken, self.error, self.told = broken, error, []
        self.allocator.free = lambda blocks: self.called("table")
        memory = SimpleNamespace(free=lambda request_id: self.called("memory"))
        connector = SimpleNamespace(request_finished=lambda _: self.called("finished"), save_kv=self.save_kv)
        self.manager = KvCacheManager(9, 4, prefixes=lambda *_: self, memories=[memory, memory], connector=connector)
        self.manager.tables["a"] = RequestTable(self.allocator)

    def called(self, what):
        self.told.append(what)
        if what == self.broken:
            raise self.error

    def release(self, table, computed_ids):
        self.called("release")
        return Stored(b"", None, [3], 0)

    def save_kv(self, request_id, stored, is_kept):
        self.called("save")


@pytest.mark.reference
@pytest.mark.parametrize(
    "error", [RuntimeError("on fire"), KeyboardInterrupt(), EngineDead("rank 1 has ended")], ids=repr
)
@pytest.mark.parametrize("broken", ["finished", "release", "save", "memory", "table"])
def test_each_part_releases_its_share_though_another_one_fails(broken, error, caplog):
    parts = Parts(broken, error)
    manager, is_copy = parts.manager, broken in ("finished", "save") and isinstance(error, RuntimeError)
    kind = type(None) if is_copy else EngineDead if isinstance(error, Exception) else KeyboardInterrupt
    with nullcontext() if is_copy else pytest.raises(kind):
        manager.free("a")
    assert parts.told == [
        part
        for part in ("finished", "release", "save", "memory", "memory", "table")
        if (part, broken) != ("save", "release")
    ]
    assert not manager.tables and bool(manager.fault) != is_copy
    assert ("Traceback" in caplog.text) != isinstance(error, EngineDead), "the end of a rank is told elsewhere"
    if isinstance(error, EngineDead):
        assert manager.fault == "rank 1 has ended"


@pytest.mark.parametrize(
    "keep, blocks", [(0, []), (1, [7]), (3, [7]), (4, [7]), (5, [7, 2]), (8, [7, 2]), (9, [7, 2, 5])]
)
def test_truncate_to_nothing_to_mid_block_and_to_a_block_boundary(keep, blocks):
    manager = manager_with(a=([7, 2, 5], 9))
    manager.truncate("a", keep)
    table = manager.tables["a"]
    assert (table.blocks, table.row.tolist(), table.num_tokens) == (blocks, blocks, keep)
    assert manager.num_free_blocks == 8 - len(blocks), "blocks that hold no token any more are freed"


@pytest.mark.parametrize("keep", [-1, 10])
def test_truncate_to_an_invalid_length_changes_nothing(keep):
    manager = manager_with(a=([7, 2, 5], 9))
    before = books(manager)
    with refused(ValueError, f"{keep} 9"):
        manager.truncate("a", keep)
    assert books(manager) == before


def test_blocks_are_counted_by_state():
    manager = manager_with(a=([7, 2, 5], 9), b=([1], 4))
    assert manager.blocks_by_state == BlocksByState(free=4, held=4, cached=0)


CONFIG = Qwen3Config(
    vocab_size=9,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
)


def with_pool(**tables):
    """Return a manager and a real pool in which block b is filled with the number b."""
    manager = manager_with(**tables)
    pool = KvPool(CONFIG, 9, 4, kernel=None)
    for layer in (*pool.K, *pool.V):
        layer.copy_(torch.arange(9.0)[:, None, None, None].expand_as(layer))
    manager.copy = pool.copy_blocks
    return manager, pool


def contents(pool, blocks):
    """Return the number that each block contains, the same in every layer."""
    layers = torch.stack([x[:, 0, 0, 0] for x in (*pool.K, *pool.V)])
    assert (layers == layers[0]).all(), "a copy skipped a layer"
    return layers[0, blocks].tolist()


@pytest.mark.parametrize(
    "sources, targets, want",
    [
        ([1], [4], {1: 1, 4: 1}),
        ([1, 2], [2, 3], {1: 1, 2: 1, 3: 2}),  # a chain: 3 gets the old contents of 2
        ([1, 2, 3], [2, 3, 1], {1: 3, 2: 1, 3: 2}),  # a ring
        ([1, 2, 3], [3, 4, 2], {2: 3, 3: 1, 4: 2}),  # overlap: no sequential order of copies works
        ([1, 1], [2, 3], {2: 1, 3: 1}),
        ([4], [4], {4: 4}),
        ([], [], {1: 1}),
    ],
)
def test_copies_read_all_sources_before_they_write(sources, targets, want):
    manager, pool = with_pool(a=([1, 2], 8), b=([3, 4], 8))
    manager.copy_blocks(sources, targets)
    assert contents(pool, list(want)) == list(want.values()), "chains and overlaps must not read what was just written"


@pytest.mark.parametrize(
    "sources, targets, values",
    [
        ([1], [2, 3], "1 2"),
        ([1, 2], [3, 3], "3"),
        ([1], [7], "[7]"),
        ([8], [1], "[8]"),
        ([0], [1], "[0]"),
    ],
)
def test_an_invalid_copy_is_refused_and_copies_nothing(sources, targets, values):
    manager, pool = with_pool(a=([1, 2], 8), b=([3, 4], 8))
    with refused(ValueError, values):
        manager.copy_blocks(sources, targets)
    assert contents(pool, list(range(9))) == list(range(9))


def test_a_memory_budget_buys_whole_blocks_including_the_null_block():
    assert blocks_in_budget(10_000, bytes_per_token=64, block_size=16) == 9
    assert blocks_in_budget(1e4, bytes_per_token=64, block_size=16) == 9, "a float such as 2e9 is a valid budget"
    assert type(blocks_in_budget(1e4, bytes_per_token=64, block_size=16)) is int
    with refused(OutOfBlocks, "2048"):
        blocks_in_budget(2047, bytes_per_token=64, block_size=16)
    with refused(UserError, "block_size 0 1"):
        blocks_in_budget(2048, bytes_per_token=64, block_size=0)


def test_20_000_random_operations_keep_free_and_held_disjoint_and_complete():
    manager, chance = KvCacheManager(41, 4), random.Random(0)
    for step in range(20_000):
        name = f"r{chance.randrange(8)}"
        before = books(manager) if step % 50 == 0 else None
        try:
            action = chance.randrange(6)
            if action == 0:
                manager.allocate(name, [])
            elif action < 4:
                manager.grow(name, chance.randrange(60))
            elif action == 4:
                manager.truncate(name, chance.randrange(60))
            else:
                manager.free(name)
        except (KeyError, ValueError, OutOfBlocks):
            assert before is None or books(manager) == before, f"step {step}: a refused call changed something"
        held = [block for table in manager.tables.values() for block in table.blocks]
        free = manager.allocator.free_blocks
        assert len(held) + len(free) == 40 and set(held).isdisjoint(free), f"step {step}: free + held is not the pool"
        assert len(set(held)) == len(held), f"step {step}: two requests hold the same block"
