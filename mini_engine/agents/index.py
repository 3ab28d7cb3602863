"""Lesson 20. Routing by what replicas have, instead of by a guess: an index of their blocks, kept by their events.

A router that guesses (lesson 13's) believes that a replica has what was sent there. It does not see what the replica
evicts, that it was restarted, or what another router sent. Events say all of it.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, cast

from mini_engine.agents.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch, short_hash
from mini_engine.distributed.routing.policy import Keys, PrefixScore, ReplicaT


class Known:
    """What the index knows of one replica.

    blocks: hashes. next: the number of its next batch. source: the publisher that numbers them.
    """

    def __init__(self, source: bytes | None = None) -> None:
        self.blocks: set[int] = set()
        self.next = 0
        self.source = source
        self.ts = float("-inf")

    def update(self, events: Iterable[Event]) -> None:
        """Apply events in order."""
        for event in events:
            if isinstance(event, BlockStored):
                self.blocks.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.blocks.difference_update(event.block_hashes)
            else:
                self.blocks.clear()

    def restarted(self, number: int, batch: EventBatch) -> bool:
        """Return True if a batch is from a new start of the replica, whose cache was empty and which counts from 0.

        A publisher without an id gives itself away by an old number in a newer batch.
        """
        if batch.publisher_id != self.source:
            return True
        return batch.publisher_id is None and number < self.next and batch.ts > self.ts


class BlockIndex(Generic[ReplicaT]):
    """Which blocks each replica has, by its events. One thread applies them; others may read meanwhile."""

    def __init__(self) -> None:
        self.replicas: dict[ReplicaT, Known] = {}

    def apply(self, replica: ReplicaT, number: int, batch: EventBatch) -> int | None:
        """Apply a batch with this sequence number. Batches that were applied before are ignored.

        One that begins with AllBlocksCleared may follow any: what came before no longer matters.

        Returns:
            None; or the number of the first missing batch, and nothing was applied. Ask the publisher to replay from
            there, or `forget` the replica.
        """
        known = self.replicas.get(replica)
        if known is None or known.restarted(number, batch):
            known = self.replicas[replica] = Known(batch.publisher_id)
        if number < known.next:
            return None
        begins_empty = bool(batch.events) and isinstance(batch.events[0], AllBlocksCleared)
        if number > known.next and not begins_empty:
            return known.next
        known.update(batch.events)
        known.next, known.ts = number + 1, batch.ts
        return None

    def forget(self, replica: ReplicaT, number: int = 0, source: bytes | None = None) -> None:
        """Believe that the replica has nothing, and go on with the batch of this number.

        Its blocks stay unknown until it stores them again: too few are believed, never too many.
        """
        known = self.replicas[replica] = Known(source)
        known.next = number

    def matched(self, replica: ReplicaT, hashes: Sequence[int]) -> int:
        """Return the length in blocks of the longest prefix of a prompt that the replica has."""
        known = self.replicas.get(replica)
        if known is None:
            return 0
        return next((index for index, one in enumerate(hashes) if one not in known.blocks), len(hashes))

    def num_blocks(self, replica: ReplicaT) -> int:
        """Return how many blocks the replica has."""
        known = self.replicas.get(replica)
        return len(known.blocks) if known else 0


class SeenExactly(Generic[ReplicaT]):
    """One replica, in the form of lesson 13's SeenBlocks: its blocks by the index, and those on their way there.

    Args:
        coming: hashes of prompts that were sent there and have not been computed yet, with their number.
    """

    def __init__(self, index: BlockIndex[ReplicaT], replica: ReplicaT, coming: Counter[int]) -> None:
        self.index, self.replica, self.coming = index, replica, coming

    def matched(self, hashes: Sequence[int]) -> int:
        """Return the longest prefix of a prompt that the replica has, or will have before it computes this one."""
        found = self.index.matched(self.replica, hashes)
        while found < len(hashes) and hashes[found] in self.coming:
            found += 1
        return found

    def __len__(self) -> int:
        return self.index.num_blocks(self.replica)


class ExactScore(Generic[ReplicaT]):
    """Lesson 13's policy, with its score, over an index instead of guesses. A Policy, in the sense of that lesson.

    Args:
        index: kept up to date by a subscriber. beta: as for PrefixScore.

    Events report a prompt when it has been computed. Until then, `sent` stands in for them: prompts that arrive
    together would otherwise each miss the prefix that the first of them is about to store.
    """

    def __init__(self, index: BlockIndex[ReplicaT], beta: float = 1.0) -> None:
        self.index, self.score = index, PrefixScore[ReplicaT](beta)
        self.coming: defaultdict[ReplicaT, Counter[int]] = defaultdict(Counter)

    def choose(self, keys: Keys, loads: Mapping[ReplicaT, float]) -> ReplicaT:
        """Return the replica with the best score, by lesson 13's rules.

        A replica without a load is gone: what was on its way there is forgotten. The index is its subscriber's to keep.

        Raises:
            ValueError: `loads` is empty; nothing was changed.
        """
        views = {one: SeenExactly(self.index, one, self.coming[one]) for one in loads}
        self.score.seen = cast(Any, views)
        chosen = self.score.choose(hashes_of(keys), loads)
        for gone in [one for one in self.coming if one not in loads]:
            del self.coming[gone]
        return chosen

    def sent(self, replica: ReplicaT, keys: Keys) -> None:
        """Note that the replica will have computed this prompt."""
        self.coming[replica].update(hashes_of(keys))

    def found(self, replica: ReplicaT, keys: Keys, num_found: int) -> None:
        """Note that the replica has computed the prompt: events know better from now on."""
        coming = self.coming[replica]
        coming.subtract(hashes_of(keys))
        for one in [one for one in hashes_of(keys) if coming[one] <= 0]:
            del coming[one]


def hashes_of(keys: Sequence[Hashable]) -> list[int]:
    """Return the hashes of a prompt's blocks, from lesson 13's keys."""
    return [short_hash(cast(bytes, key)) for key in keys]
