"""Lesson 15. What a record of windows brings back, and into which blocks."""

from mini_engine.tiers.tiers import Tiers
from tests.l15.cells import connected, served

TEXT = list(range(42))


def test_windows_come_back_into_the_groups_that_they_left():
    tiers = Tiers.of_size(None, 10**7, 0)
    kv = connected(tiers)
    served(kv, "a", TEXT)
    kv.prefixes.clear()
    kv.slots.clear()
    assert kv.allocate("b", TEXT) == 40, "ten blocks, and the last window of each group, come back"
    kv.check_reads("b", TEXT, 40, 40)
    tiers.close()
