"""Lesson 12. Copies beside the steps: whatever is evicted, handed out or written meanwhile, what is saved is right."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from mini_engine.kv.radix_node import TOKEN_BYTES, key_of
from mini_engine.tiers.background import Background
from mini_engine.tiers.blocks import BlockBytes
from mini_engine.tiers.copies import BesideSteps, Copy, beside_steps
from mini_engine.tiers.records import Kind, Record
from tests.l12.device import DeviceCells, HeldCopier, SlowStream
from tests.l12.test_manager import Machine, World, evict_all
from tests.shared.tier_cells import SIZE
from tests.support import thorough

TEXT = list(range(3 * SIZE + 2))
OTHER = list(range(100, 100 + 3 * SIZE))


class SlowWorld(World):
    """A world on a device, whose blocks are read beside its steps."""

    def __init__(self, directory=None, host_bytes=10**6, eager=False, num_room=10**6, streams=None):
        self.main, self.side = SlowStream(), SlowStream(eager)
        super().__init__(directory, host_bytes, cells=DeviceCells(self.main))
        self.copier = HeldCopier(num_room)
        self.tiers.feeders.append(self.copier)
        both = streams(self.main, self.side) if streams else (self.main, self.side)
        self.store.reader = BesideSteps(self.cells, lambda: both, self.copier)

    def arrive(self):
        """Let all copies arrive."""
        self.copier.close(0.0)


@pytest.fixture
def world(opened):
    return opened(SlowWorld())


RIGHT = {
    "a side stream that is slow": lambda compute, side: (compute, SlowStream()),
    "a side stream that is fast": lambda compute, side: (compute, SlowStream(eager=True)),
}


def saved(world, namespace):
    """Save a text's blocks, hand them to another text while the copy runs; return what host memory has of the first."""
    world.begin("a", TEXT, namespace)
    world.end("a")
    held = world.manager.allocator.alloc_blocks(world.manager.allocator.num_free)
    evict_all(world)
    assert world.begin("b", OTHER) == 0, "it has the first text's blocks"
    world.manager.allocator.free(held)
    world.copier.finish_one()
    return [bytes(record.payload) for record in world.tiers.host.records.values()]


def right(namespace):
    """Return what host memory has of the text if blocks are read within the step."""
    world = World()
    world.begin("a", TEXT, namespace)
    payloads = [bytes(record.payload) for record in world.tiers.host.records.values()]
    world.close()
    return payloads


@pytest.mark.parametrize("name", RIGHT)
def test_blocks_that_are_written_again_meanwhile_are_saved_as_they_were(opened, name):
    world = opened(SlowWorld(streams=RIGHT[name]))
    found = saved(world, name)
    assert found == right(name), "what is saved is not what the blocks held when they were handed over"


def test_a_block_is_not_found_before_its_copy_has_arrived(world):
    world.begin("a", TEXT)
    world.end("a")
    evict_all(world)
    assert world.begin("b", TEXT) == 0, "neither the pool nor host memory has it: it is computed again"
    assert world.store.saved_tokens == 0
    world.end("b")
    world.arrive()
    evict_all(world)
    assert world.store.saved_tokens > 0 and world.begin("c", TEXT) == 12
    assert world.store.restored_tokens == 12


def test_with_too_many_copies_on_their_way_a_step_reads_blocks_itself():
    world = SlowWorld(num_room=1)
    world.begin("a", TEXT)
    assert len(world.tiers.host) == 0 and not world.copier.has_room
    world.begin("b", OTHER)
    assert len(world.tiers.host) == 3, "a block that is not copied later is copied now: none is lost"
    world.close()
    assert len(world.tiers.host) == 6


def test_a_copy_that_fails_saves_nothing_and_ends_no_other(opened, caplog):
    world = opened(SlowWorld())
    world.tiers.feeders.remove(world.copier)
    world.store.reader.copier = copier = Background("copier", Copy.finish, 4)
    world.tiers.feeders.append(copier)

    def broken():
        raise RuntimeError("an illegal memory access was encountered")

    world.side.submit(broken)
    world.begin("a", TEXT)
    assert world.tiers.flush() and len(world.tiers.host) == 0
    world.begin("b", OTHER)
    assert world.tiers.flush() and len(world.tiers.host) == 3
    world.end("a")
    world.end("b")
    evict_all(world)
    assert (world.begin("c", TEXT), world.begin("d", OTHER)) == (0, 8)
    assert "copier failed" in caplog.text


def test_what_goes_with_a_block_waits_for_its_copy_and_is_handed_over_right_behind_it(world):
    """A state is read within the step: it changes with the next token."""
    prefix = world.store.prefix(key_of(TEXT), None, SIZE * TOKEN_BYTES)
    more = [(index, Record(bytes([index]), b"", b"", b"", Kind.STATE)) for index in (2, 0)]
    world.store.save(prefix, [1, 2, 3], 0, more)
    assert not world.tiers.host.records
    world.arrive()
    assert list(world.tiers.host.records) == [prefix.keys[1], b"\0", *prefix.keys[2:4], b"\2"], (
        "a writer that is behind drops the rest: what it has taken until then is of use"
    )


def test_closing_the_tiers_writes_what_is_on_its_way(tmp_path):
    world = SlowWorld(tmp_path)
    world.begin("a", TEXT)
    assert len(world.tiers.disk) == 0
    world.close()
    assert len(world.tiers.disk) == 3
    second = World(tmp_path)
    assert second.begin("a", TEXT) == 12
    second.close()


class SlowMachine(Machine):
    """All that happens to a manager with tiers happens while copies are on their way, and some of these fail."""

    @initialize(
        host=st.sampled_from([0, 200, 10**6]),
        disk=st.booleans(),
        eager=st.booleans(),
        num_room=st.sampled_from([1, 3, 10**6]),
    )
    def start(self, host, disk, eager, num_room):
        self.device = {"eager": eager, "num_room": num_room}
        super().start(host, disk)

    def new_world(self):
        return SlowWorld(self.directory, self.host, **self.device)

    @rule(side=st.booleans(), count=st.integers(1, 20))
    def run(self, side, count):
        stream = self.world.side if side else self.world.main
        while count and stream.can_run:
            stream.run_one()
            count -= 1

    @precondition(lambda self: self.world.copier.copies)
    @rule(fails=st.booleans())
    def arrive(self, fails):
        if fails:
            self.world.copier.copies.popleft()
        else:
            self.world.copier.finish_one()


TestSlowMachine = SlowMachine.TestCase
TestSlowMachine.settings = settings(max_examples=thorough(40, 12), stateful_step_count=40)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gather_has_the_bytes_of_each_block_in_the_layout_of_a_payload(dtype):
    k, v = ([torch.randn(6, 4, 2, width).to(dtype) for _ in range(3)] for width in (8, 5))
    blocks = BlockBytes(k, v)
    gathered = blocks.gather([4, 1, 4], blocks.empty(3))
    want = [
        b"".join(x[at].view(torch.uint8).numpy().tobytes() for both in zip(k, v, strict=True) for x in both)
        for at in (4, 1, 4)
    ]
    assert [row.numpy().tobytes() for row in gathered] == want == [bytes(one) for one in blocks.read([4, 1, 4])]


# On a GPU


@pytest.mark.gpu
def test_a_gpu_saves_blocks_that_are_overwritten_at_once():
    k, v = ([torch.randint(-9, 9, (64, 16, 8, 128), device="cuda").bfloat16() for _ in range(28)] for _ in range(2))
    blocks, chosen, found = BlockBytes(k, v), list(range(40, 8, -1)), []
    want = [bytes(one) for one in blocks.read(chosen)]
    reader = beside_steps(blocks)
    for _ in range(3):
        reader.read(chosen, found.append)
    for layer in (*k, *v):
        layer.zero_()
    assert reader.copier.flush(60.0)
    assert [[bytes(one) for one in copy] for copy in found] == [want] * 3
    blocks.write(chosen, found[0])
    assert [bytes(one) for one in blocks.read(chosen)] == want
    reader.copier.close(1.0)


@pytest.mark.parametrize("payloads", [[b"1234"], [b"1234", b"123"], []], ids=["one too few", "too short", "none"])
def test_payloads_of_another_size_or_number_are_refused_before_anything_is_written(payloads):
    cells = BlockBytes([torch.zeros(3, 2, dtype=torch.int16)])
    with pytest.raises(ValueError):
        cells.write([1, 2], payloads)
    assert not cells.tensors[0].any(), "half of the blocks would have another text's keys"
