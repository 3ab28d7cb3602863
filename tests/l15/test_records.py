"""Lesson 15. What a record of windows brings back, and into which blocks."""

from tests.shared.window_ledger import serve

TEXT = list(range(42))


def test_windows_come_back_into_the_groups_that_they_left(kv):
    serve(kv, "a", TEXT)
    kv.coordinator.clear()
    kv.slots.clear()
    assert kv.allocate("b", TEXT) == 40, "ten blocks, and the last window of each group, come back"
    assert kv.findable(TEXT) == 40, "the tree has them again, for the next request"
    kv.check_reads("b", TEXT, 40, 40)
