"""Lesson 12. A pool's blocks in the tiers: saves whole blocks under their keys, and finds them again."""

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from itertools import takewhile
from threading import Lock
from typing import NamedTuple, Protocol

from mini_engine.tiers.keys import Identity, chain
from mini_engine.tiers.records import Bytes, Record, Wanted
from mini_engine.tiers.tiers import Tiers

RECENT_TEXTS = 64

Keep = Callable[[Sequence[Bytes]], None]


class Blocks(Protocol):
    """Copies whole blocks between a pool and payloads: `BlockBytes`."""

    @property
    def payload_bytes(self) -> int: ...

    def read(self, blocks: Sequence[int]) -> Sequence[Bytes]: ...

    def write(self, blocks: Sequence[int], payloads: Sequence[Bytes]) -> None: ...


class Reader:
    """Reads blocks that are to be saved, within the step: right where the pool is in host memory."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks

    def read(self, blocks: Sequence[int], keep: Keep) -> None:
        """Read blocks as they are now, and hand their payloads to `keep`: before this returns, or later in a thread."""
        keep(self.blocks.read(blocks))


class MinTokens(NamedTuple):
    """From how many tokens on bringing them back pays: from host memory, and from the disk. Infinity: never."""

    host: float = 1
    disk: float = 1


ALWAYS = MinTokens()


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
        min_tokens: from how many on it pays to bring tokens back; by default always.
        reader: reads blocks that are to be saved; by default within the step.

    Attributes:
        saved_tokens, restored_tokens: tokens that went from the pool to the tiers, and back.
    """

    def __init__(
        self,
        tiers: Tiers,
        blocks: Blocks,
        identity: Identity,
        min_tokens: MinTokens = ALWAYS,
        reader: Reader | None = None,
    ) -> None:
        self.tiers, self.blocks, self.identity, self.min_tokens = tiers, blocks, identity, min_tokens
        self.reader = reader or Reader(blocks)
        self.saved_tokens, self.restored_tokens, self.counting = 0, 0, Lock()
        self._recent = lru_cache(RECENT_TEXTS, typed=True)(self._new_prefix)

    def prefix(self, tokens: bytes, namespace: Hashable, width: int) -> Prefix:
        """Return the keys of a text's whole blocks. A namespace that has no bytes to hash shares nothing: no keys.

        A request asks for the same keys at every step: those of recent texts are remembered.
        """
        return self._recent(namespace, tokens[: len(tokens) // width * width], width)

    def save(self, prefix: Prefix, blocks: Sequence[int], start: int, more: Sequence[tuple[int, Record]] = ()) -> None:
        """Have the blocks of a prefix copied from index `start` on, unless host memory has them already.

        What is written to them from now on does not change the copies, even if these are not complete yet.

        Args:
            blocks: the prefix's first blocks, whose KV is complete.
            more: records that go with blocks, each with its block's index. A new block's are queued right
                after it, so a partly written queue is still usable.
        """
        stop = min(len(blocks), len(prefix))
        new = [index for index in range(start, stop) if prefix.keys[index + 1] not in self.tiers.host]
        if new:
            self.reader.read([blocks[index] for index in new], partial(self._keep, prefix, new, more))
        else:
            self._keep(prefix, new, more, ())

    def wanted(self, prefix: Prefix, start: int, stop: int) -> list[Wanted]:
        """Return the records to ask for, of blocks start … stop - 1: those in the tiers without a gap, if it pays.

            start … hosted - 1      host memory has every one of them: they need no disk
            hosted … end - 1        it lacks block hosted, and either tier has every one of these, up to a gap or stop

        First, the second part is left out if it has fewer than `min_tokens.disk` tokens. Then all that is left counts:
        if these are fewer than `min_tokens.host` tokens, nothing is asked for.

        The key of block i is `prefix.keys[i + 1]`, and it has `identity.block_size` tokens. `asked` makes the result.
        """
        hosted = start
        while hosted < stop and prefix.keys[hosted + 1] in self.tiers.host:
            hosted += 1
        end = hosted
        while end < stop and prefix.keys[end + 1] in self.tiers:
            end += 1
        size = self.identity.block_size
        if (end - hosted) * size < self.min_tokens.disk:
            end = hosted
        if (end - start) * size < self.min_tokens.host:
            return []
        return self.asked(prefix, start, end)

    def asked(self, prefix: Prefix, start: int, stop: int) -> list[Wanted]:
        """Return the records to ask for: blocks start … stop - 1."""
        size = self.blocks.payload_bytes
        return [Wanted(*prefix.part(index), payload_bytes=size) for index in range(start, stop)]

    def find(self, wanted: Sequence[Wanted], read_disk: bool) -> list[Record]:
        """Return the records up to the first one that turns out to be missing or unusable."""
        found = (self.tiers.get(one, read_disk) for one in wanted)
        return [record for record in takewhile(lambda record: record is not None, found) if record]

    def restore(self, records: Sequence[Record], blocks: Sequence[int]) -> None:
        """Copy records into blocks."""
        self.blocks.write(blocks, [record.payload for record in records])
        self.restored_tokens += len(blocks) * self.identity.block_size

    def _keep(
        self, prefix: Prefix, indices: Sequence[int], more: Sequence[tuple[int, Record]], payloads: Sequence[Bytes]
    ) -> None:
        """Hand what was read of a prefix's blocks to the tiers, and the records that go with them."""
        blocks = zip(indices, payloads, strict=True)
        records = [(index, Record(*prefix.part(index), payload)) for index, payload in blocks]
        for _, record in sorted([*records, *more], key=lambda both: both[0]):
            self.tiers.put(record)
        with self.counting:  # the engine's thread and a copier's
            self.saved_tokens += len(records) * self.identity.block_size

    def _new_prefix(self, namespace: Hashable, tokens: bytes, width: int) -> Prefix:
        try:
            return Prefix(self.identity.root(namespace), tokens, width)
        except TypeError:
            return Prefix(b"", b"", width)
