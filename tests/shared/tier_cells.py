"""Lesson 12. Shared by the tests: a pool of one number per slot, and what each token's number must be."""

from array import array

SIZE, BLOCKS = 4, 16
PROMPTS = [[(7 * i * start + i) % 500 + 20 for i in range(40)] for start in (1, 2, 3)]


class Cells:
    """A pool of one number per slot; as `BlockBytes`, it copies whole blocks."""

    payload_bytes = SIZE * 8

    def __init__(self):
        self.slots = array("q", [0]) * (BLOCKS * SIZE)

    def read(self, blocks):
        return [memoryview(self.slots[block * SIZE : (block + 1) * SIZE].tobytes()) for block in blocks]

    def write(self, blocks, payloads):
        for block, payload in zip(blocks, payloads, strict=True):
            self.slots[block * SIZE : (block + 1) * SIZE] = array("q", bytes(payload))

    def copy(self, sources, targets):
        self.write(targets, self.read(sources))


def digests(namespace, tokens):
    """Return what each token's KV must be: it depends on every token before it, and on the namespace."""
    found = [hash((str(namespace), 17))]
    for token in tokens:
        found.append(hash((found[-1], token)))
    return found[1:]
