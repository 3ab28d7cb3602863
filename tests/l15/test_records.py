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


def test_windows_come_back_behind_those_that_the_request_has(kv):
    """The tree has three blocks and the window at their end; a tier has the fourth."""
    serve(kv, "a", TEXT)
    kv.coordinator.clear()
    kv.slots.clear()
    serve(kv, "b", TEXT[:14])
    assert kv.allocate("c", TEXT[:18]) == 16
    assert kv.coordinator.prefixes.stats.found_tokens == 12 + 16, (
        "12 tokens from a tier for b, which c finds in the tree, and 4 more"
    )
    kv.check_reads("c", TEXT, 16, 16)
