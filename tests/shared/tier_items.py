"""Lesson 12. Shared by the tests: records by their number, and two companions at once, whose items are a few bytes."""

import hashlib

from mini_engine.tiers.records import Kind, Record, Wanted

PAYLOAD = 1000


def record(number: int, payload_bytes: int = PAYLOAD) -> Record:
    tokens = number.to_bytes(4, "little") * 16
    return Record(hashlib.sha256(tokens).digest(), b"p" * 32, tokens, bytes([number % 256]) * payload_bytes)


def wanted(number: int) -> Wanted:
    one = record(number)
    return Wanted(one.key, one.parent, one.tokens, PAYLOAD)


SIZE = record(0).num_bytes


class Items:
    """A companion that needs the items of the last `reach` blocks; each is a byte of its own and its block's index."""

    only_at_end = False

    def __init__(self, kind, reach, payload_bytes):
        self.kind, self.reach, self.payload_bytes = kind, reach, payload_bytes
        self.written = {}

    def needed(self, start, stop):
        return range(max(start, stop - self.reach), stop)

    def held(self, request_id, start, stop, at_end):
        return range(start, stop)

    def read(self, request_id, indices):
        return [bytes([self.kind, index]).ljust(self.payload_bytes, b".") for index in indices]

    def write(self, request_id, indices, payloads):
        for index, payload in zip(indices, payloads, strict=True):
            self.written[index] = bytes(payload)

    def check(self, indices):
        expected = dict(zip(indices, self.read("a", indices), strict=True))
        assert self.written == expected, f"items of {self.kind.name}"


def both(window=3):
    return [Items(Kind.STATE, 1, 7), Items(Kind.WINDOW, window, 5)]
