"""Lesson 15. Shared by the tests: tiers behind a manager with windows, whose pool's bytes are the tokens themselves."""

from mini_engine.tiers.connector import TierConnector
from mini_engine.tiers.keys import Identity
from mini_engine.tiers.store import BlockStore
from mini_engine.windows.companion import WindowCompanion
from tests.shared.window_ledger import Windows

SIZE, W, GROUPS, MOST, POOL = 4, 6, 2, 80, 70


class Cells:
    """A pool's blocks as bytes: of each slot its group, and the tokens up to its own."""

    payload_bytes = SIZE * (2 + MOST)

    def __init__(self, slots):
        self.slots = slots

    def read(self, blocks):
        return [b"".join(self.cell(*self.slots.get((block, i), (0, ()))) for i in range(SIZE)) for block in blocks]

    def cell(self, group, tokens):
        return bytes([group, len(tokens), *tokens]).ljust(2 + MOST, b"\0")

    def write(self, blocks, payloads):
        for block, payload in zip(blocks, payloads, strict=True):
            assert len(payload) == self.payload_bytes and block, "whole blocks, and none of them a hole"
            for i in range(SIZE):
                group, count, *tokens = bytes(payload[i * (2 + MOST) : (i + 1) * (2 + MOST)])
                self.slots[block, i] = (group, tuple(tokens[:count]))


def connected(tiers, window=W):
    """Return a manager with windows over these tiers."""

    def connector(kv):
        store = BlockStore(tiers, Cells(kv.slots), Identity("w", "c", "f", SIZE))
        return TierConnector(store, [WindowCompanion(store.blocks, kv.memory)])

    return Windows(window, GROUPS, POOL, SIZE, max_step=8, connector=connector)
