"""Lesson 12. A pool's blocks in the tiers: saves whole blocks under their keys, and finds them again."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import NamedTuple, Protocol

from mini_engine.tiers.blocks import BlockBytes
from mini_engine.tiers.keys import Identity, chain
from mini_engine.tiers.records import Record, Wanted
from mini_engine.tiers.tiers import Tiers

RECENT_TEXTS = 64


class Judge(Protocol):
    """Decides whether bringing back tokens pays: a BreakEven, or `Always`."""

    def pays(self, num_tokens: int) -> bool: ...


class Always:
    """Bring back whatever is found."""

    def pays(self, num_tokens: int) -> bool:
        """Return True for at least one token."""
        return num_tokens > 0


class Judges(NamedTuple):
    """What pays: bringing tokens back from host memory, and from the disk."""

    host: Judge = Always()
    disk: Judge = Always()


@dataclass
class Traffic:
    """Tokens that went from the pool to the tiers, and back."""

    saved_tokens: int = 0
    restored_tokens: int = 0


class Prefix:
    """The whole blocks of a text: their tokens, and their keys.

    Args:
        tokens: whole blocks of `width` bytes each.
        root: the key that the chain starts from.
    """

    def __init__(self, root: bytes, tokens: bytes, width: int) -> None:
        self.tokens, self.width = tokens, width
        self.keys = [root, *chain(root, tokens, width)]

    def __len__(self) -> int:
        return len(self.keys) - 1

    def part(self, index: int) -> tuple[bytes, bytes, bytes]:
        """Return the key, the parent's key and the tokens of block `index`."""
        tokens = self.tokens[index * self.width : (index + 1) * self.width]
        return self.keys[index + 1], self.keys[index], tokens


class BlockStore:
    """The tiers, as a manager of blocks sees them.

    Args:
        tiers: where records are kept. blocks: copies the pool's blocks. identity: what the keys are bound to.
        judges: decide whether bringing back tokens pays.
    """

    def __init__(self, tiers: Tiers, blocks: BlockBytes, identity: Identity, judges: Judges | None = None) -> None:
        self.tiers, self.blocks, self.identity = tiers, blocks, identity
        self.judges = judges or Judges()
        self.traffic = Traffic()
        self._recent = lru_cache(RECENT_TEXTS, typed=True)(self._new_prefix)

    def prefix(self, tokens: bytes, namespace: Hashable, width: int) -> Prefix:
        """Return the keys of a text's whole blocks. A namespace that has no bytes to hash shares nothing: no keys.

        A request asks for the same keys at every step: those of recent texts are remembered.
        """
        return self._recent(namespace, tokens[: len(tokens) // width * width], width)

    def save(self, prefix: Prefix, blocks: Sequence[int], start: int) -> None:
        """Copy the blocks of a prefix from index `start` on, unless host memory has them already.

        Args:
            blocks: the prefix's first blocks, whose KV is complete.
        """
        stop = min(len(blocks), len(prefix))
        new = [index for index in range(start, stop) if prefix.keys[index + 1] not in self.tiers.host]
        if not new:
            return
        payloads = self.blocks.read([blocks[index] for index in new])
        for index, payload in zip(new, payloads, strict=True):
            self.tiers.put(Record(*prefix.part(index), payload))
        self.traffic.saved_tokens += len(new) * self.identity.block_size

    def wanted(self, prefix: Prefix, start: int, stop: int) -> list[Wanted]:
        """Return what to ask for, of blocks start … stop - 1: as many as the tiers seem to have, as far as it pays.

        The blocks up to the first one that is only on the disk need no disk. Those from there on, whichever tier has
        them, are left out unless `judges.disk` says that their tokens pay; then `judges.host` is asked about the rest.
        """
        hosted = start
        while hosted < stop and prefix.keys[hosted + 1] in self.tiers.host:
            hosted += 1
        end = hosted
        while end < stop and prefix.keys[end + 1] in self.tiers:
            end += 1
        size = self.identity.block_size
        if not self.judges.disk.pays((end - hosted) * size):
            end = hosted
        if not self.judges.host.pays((end - start) * size):
            return []
        return self.asked(prefix, start, end)

    def asked(self, prefix: Prefix, start: int, stop: int) -> list[Wanted]:
        """Return what to ask for to get blocks start … stop - 1."""
        size = self.blocks.payload_bytes
        return [Wanted(*prefix.part(index), payload_bytes=size) for index in range(start, stop)]

    def find(self, wanted: Sequence[Wanted], read_disk: bool) -> list[Record]:
        """Return the records up to the first one that turns out to be missing or unusable."""
        found = (self.tiers.get(one, read_disk) for one in wanted)
        return [record for record in takewhile(lambda record: record is not None, found) if record]

    def restore(self, records: Sequence[Record], blocks: Sequence[int]) -> None:
        """Copy records into blocks."""
        self.blocks.write(blocks, [record.payload for record in records])
        self.traffic.restored_tokens += len(blocks) * self.identity.block_size

    def _new_prefix(self, namespace: Hashable, tokens: bytes, width: int) -> Prefix:
        try:
            return Prefix(self.identity.root(namespace), tokens, width)
        except TypeError:
            return Prefix(b"", b"", width)
