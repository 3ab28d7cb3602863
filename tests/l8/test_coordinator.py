"""Lesson 8. The coordinator: parts that find nothing add nothing; when a request ends, each part releases its share."""

import random
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from mini_engine.base.errors import EngineDead, OutOfBlocks
from mini_engine.kv.cache_coordinator import coordinated
from mini_engine.kv.connector import KvConnector, Load
from mini_engine.kv.manager import KvCacheManager
from mini_engine.kv.memory import CacheMemory
from mini_engine.kv.prefix_cache import PrefixCache
from mini_engine.kv.prefixes import Stored
from mini_engine.kv.request_table import RequestTable


class Parts(PrefixCache):
    """The parts of a coordinator, of which `broken` raises. `told` has the calls of all."""

    def __init__(self, broken, error):
        super().__init__(9, 4)
        self.broken, self.error, self.told = broken, error, []
        self.allocator.free = lambda blocks: self.called("table")
        self.memory: Any = SimpleNamespace(free=lambda request_id: self.called("memory"))
        connector = SimpleNamespace(request_finished=lambda _: self.called("finished"), save_kv=self.save_kv)
        self.manager = coordinated(9, 4, prefixes=lambda *_: self, connector=connector)
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
        part for part in ("finished", "release", "save", "memory", "table") if (part, broken) != ("save", "release")
    ]
    assert not manager.tables and bool(manager.fault) != is_copy
    assert ("Traceback" in caplog.text) != isinstance(error, EngineDead), "the end of a rank is told elsewhere"
    if isinstance(error, EngineDead):
        assert manager.fault == "rank 1 has ended"


def test_parts_that_find_nothing_add_nothing():
    """Lesson 5's manager and one whose parts have nothing, called alike 3,000 times, hold the same blocks."""
    nothing_cached = coordinated(41, 4, prefixes=partial(PrefixCache, capacity=0))
    managers, chance = (KvCacheManager(41, 4), nothing_cached), random.Random(0)
    for _ in range(3000):
        name, length = f"r{chance.randrange(8)}", chance.randrange(60)
        call, arguments = chance.choice(
            [
                ("cost", ([1] * length, length + 3)),
                ("allocate", (name, [1] * length)),
                ("grow", (name, length)),
                ("grow", (name, length)),
                ("missing_blocks", (name, length)),
                ("most_blocks", (length,)),
                ("truncate", (name, length)),
                ("free", (name,)),
            ]
        )
        answers = []
        for manager in managers:
            try:
                answers.append(getattr(manager, call)(*arguments))
            except (KeyError, ValueError, OutOfBlocks) as error:
                answers.append(type(error))
        assert answers[0] == answers[1], f"{call}{arguments}"
        held = [{name: (t.blocks, t.num_tokens) for name, t in m.tables.items()} for m in managers]
        assert held[0] == held[1] and managers[0].blocks_by_state == managers[1].blocks_by_state


TEXT = list(range(20))


def explode(request_id):
    raise RuntimeError("the slot is lost")


class Failing(KvConnector, Load):
    """A connector that finds a block and cannot load it."""

    num_tokens = 4

    def start_load_kv(self, *_):
        return self

    def into(self, request_id, blocks):
        raise RuntimeError("half written")


def test_a_failed_load_whose_clean_up_fails_too_unlocks_no_one_else_s_prefix():
    memory = CacheMemory()
    manager = coordinated(20, 4, prefixes=partial(PrefixCache, memory=memory), connector=Failing())
    manager.allocate("a", TEXT)
    manager.grow("a", 20)
    manager.commit("a", TEXT, 12)
    node, memory.free = manager.tables["a"].shared.node, explode
    with pytest.raises(RuntimeError):
        manager.allocate("b", TEXT)
    del memory.free
    manager.free("b")
    assert "b" not in manager.tables and node.locks == 1, "a still uses its prefix, and only a"
    manager.free("a")
    assert not manager.fault and manager.blocks_by_state.held == 0
