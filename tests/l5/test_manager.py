"""Lesson 5. The manager: tables by request id, refused calls that change nothing."""

from array import array

import pytest

from mini_engine.base.errors import EngineDead, OutOfBlocks, UserError
from mini_engine.kv.coordinator import KvCoordinator
from mini_engine.kv.manager import BlocksByState, KvCacheManager, RequestTable, blocks_in_budget
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


class Watching(KvCoordinator):
    """Notes the table's tokens and blocks at each call of `prepare`; refuses from `full` tokens on."""

    full, seen = 99, ()

    def prepare(self, request_id, table, num_tokens):
        self.seen = (*self.seen, (request_id, table.num_tokens, len(table.blocks), num_tokens))
        if num_tokens >= self.full:
            raise OutOfBlocks("need 1 blocks, 0 free of 8")


@pytest.mark.task(1)
def test_the_coordinator_prepares_before_a_table_grows():
    manager = KvCacheManager(9, 4, coordinator=Watching)
    manager.allocate("a", [1, 2, 3])
    manager.grow("a", 3)
    manager.grow("a", 6)
    assert manager.coordinator.seen == (("a", 0, 0, 3), ("a", 3, 1, 6)), (
        "the coordinator makes room first, while the table is as it was: it may have to evict"
    )
    manager.coordinator.full = 9
    with pytest.raises(OutOfBlocks):
        manager.grow("a", 9)
    table = manager.tables["a"]
    assert (table.num_tokens, len(table.blocks)) == (6, 2), "a coordinator that finds no room stops the growth"


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


class Failing(KvCoordinator):
    """A coordinator that cannot release what a request holds."""

    error = None

    def end(self, request_id, table, computed_ids):
        super().end(request_id, table, computed_ids)
        if self.error:
            raise self.error


@pytest.mark.parametrize(
    "error", [RuntimeError("on fire"), KeyboardInterrupt(), EngineDead("rank 1 has ended")], ids=repr
)
def test_what_cannot_be_released_is_a_fault(error, caplog):
    manager = KvCacheManager(9, 4, coordinator=Failing)
    manager.allocate("a", [1, 2, 3])
    manager.grow("a", 3)
    manager.coordinator.error = error
    with pytest.raises(EngineDead if isinstance(error, Exception) else KeyboardInterrupt):
        manager.free("a")
    assert not manager.tables and manager.fault
    assert ("Traceback" in caplog.text) != isinstance(error, EngineDead), "the end of a process is told elsewhere"
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


def test_a_memory_budget_buys_whole_blocks_including_the_null_block():
    assert blocks_in_budget(10_000, bytes_per_token=64, block_size=16) == 9
    assert blocks_in_budget(1e4, bytes_per_token=64, block_size=16) == 9, "a float such as 2e9 is a valid budget"
    assert type(blocks_in_budget(1e4, bytes_per_token=64, block_size=16)) is int
    with refused(OutOfBlocks, "2048"):
        blocks_in_budget(2047, bytes_per_token=64, block_size=16)
    with refused(UserError, "block_size 0 1"):
        blocks_in_budget(2048, bytes_per_token=64, block_size=0)
