"""Lesson 19. What goes with blocks: windows for the places that still lack them, and workers that have any states."""

import pytest

from mini_engine.assembly.engine_config import EngineConfig
from mini_engine.handover.extras import ExtraBuffers
from mini_engine.handover.opening import worker_config
from mini_engine.windows.companion import WindowCompanion
from tests.shared.tier_items import both
from tests.shared.window_cells import Cells
from tests.shared.window_ledger import Windows, compute, serve

WINDOW, GROUPS, SIZE = 6, 2, 4
TEXT = list(range(25))


def end_of_a_transfer():
    """Return a manager with windows and what copies them."""
    kv = Windows(WINDOW, GROUPS, 70, SIZE, max_step=8)
    return kv, ExtraBuffers([WindowCompanion(Cells(kv.slots), kv.memory)], Cells.payload_bytes)


@pytest.mark.parametrize("num_there", [0, 4, 5])
def test_of_the_windows_that_come_the_last_ones_are_used(num_there):
    """Six blocks were asked for, with the windows of the last two. Meanwhile the receiver has some blocks itself."""
    sender, theirs = end_of_a_transfer()
    sender.allocate("a", TEXT)
    compute(sender, "a", TEXT[:24])
    buffers = theirs.read("a", 0, 6)
    assert len(buffers) == theirs.num_buffers(0, 6) == 2 * GROUPS
    receiver, ours = end_of_a_transfer()
    if num_there:
        serve(receiver, "before", TEXT[: num_there * SIZE])
    assert receiver.allocate("b", TEXT) == num_there * SIZE
    assert ours.num_buffers(num_there, 6) == GROUPS * (6 - max(4, num_there)), "the others it shares, and has already"
    receiver.memory.expect("b", 24)
    receiver.grow("b", 24)
    ours.write("b", num_there, 6, buffers)
    for group, row in list(enumerate(receiver.rows("b")))[1:]:
        for position in range(19, 24):  # what token 24 sees
            found = receiver.slots[row[position // SIZE], position % SIZE]
            assert found == (group, tuple(TEXT[: position + 1])), f"token {position}, group {group}"


@pytest.mark.parametrize("buffer_bytes", [1, 3, 5, 100])
@pytest.mark.parametrize("start", [2, 6, 7, 8])
def test_items_of_several_companions_are_handed_over_in_buffers_of_any_size(buffer_bytes, start):
    """The receiver has blocks 0 … start - 1 by now; the sender was asked from block 2 on."""
    sender, companions = ExtraBuffers(both(), buffer_bytes), both()
    buffers = sender.read("a", 2, 9)
    assert len(buffers) == sender.num_buffers(2, 9) and max(map(len, buffers)) <= buffer_bytes
    padded = [bytes(buffer).ljust(buffer_bytes, b"\0") for buffer in buffers]  # a buffer has one size
    ExtraBuffers(companions, buffer_bytes).write("b", start, 9, padded)
    for one, indices in zip(companions, ([8], range(max(start, 6), 9)), strict=True):
        one.check(indices)


def test_a_state_among_several_companions_decides_when_they_are_read():
    companions = both()
    assert ExtraBuffers(companions, 4).num_bytes == 7 + 5 and not ExtraBuffers(companions, 4).only_at_end
    companions[0].only_at_end = True
    assert ExtraBuffers(companions, 4).only_at_end and not ExtraBuffers((), 4).only_at_end


@pytest.mark.parametrize(("ours", "workers"), [(None, None), (0, None), (5, 5)])
def test_a_worker_has_checkpoints_though_the_engine_has_none(ours, workers):
    """A state is read where a checkpoint is kept: a worker without any would have none to hand over."""
    config = worker_config(EngineConfig(max_track_slots=ours, enable_prefix_caching=False))
    assert (config.max_track_slots, config.enable_prefix_caching) == (workers, True)
    assert config.scheduler_config.policy == "fcfs", "one prompt after another: none has a turn"


def test_a_worker_only_computes_prompts():
    """It guesses nothing, has no tiers and no workers or ranks of its own, whatever the engine has."""
    more = dict(speculate=4, kv_host_bytes=10**6, kv_always=True, prefill_workers=2, handover_min_tokens=5)
    asked = EngineConfig(num_blocks=9, block_size=8, kv_dtype="int8", **more)
    assert worker_config(asked) == worker_config(EngineConfig(num_blocks=9, block_size=8, kv_dtype="int8"))
    assert (worker_config(asked).speculate, worker_config(asked).prefill_workers) == (None, 0)
