"""Lesson 11. The states of running requests, a memory beside the blocks of lesson 5's manager.

A state cannot be shared while it changes, and cannot be taken back to an earlier token. So a request gets a copy of the
deepest checkpoint in its prefix, and its chunks end where a checkpoint is worth having: there the state is copied into
the tree. Those places are

    every `interval` tokens,
    the last whole block of a prompt, before its last token, so that the same prompt finds it,
    and where a prompt was seen to leave a stored prefix, because the next one will leave it there too.

Guessed tokens (lesson 14) may have to be taken back, so a step leaves the state behind each of them in a slot of its
own, and the one behind the last right token becomes the request's.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from mini_engine.base.errors import UserError
from mini_engine.hybrid.checkpoints import Checkpoints
from mini_engine.hybrid.track_slots import TrackSlots
from mini_engine.kv.memory import CacheMemory, Lookup
from mini_engine.kv.radix_node import TOKEN_BYTES, Node
from mini_engine.kv.request_table import RequestTable


@dataclass
class StateHold:
    """The slots that a request holds in the pool.

    slots: its working slot, and behind it those of drafts that have not been committed, in order.
    num_computed: the tokens that the state of the request has seen.
    ends: where its prompt should be checkpointed besides every interval, ascending.
    num_fed: with drafts, the tokens that the first slot's state has seen after the step.
    """

    slots: list[int]
    num_computed: int
    ends: list[int] = field(default_factory=list)
    num_fed: int = 0


class StateMemory(CacheMemory):
    """Hands out working slots, and keeps copies of their states at places in the prefix cache.

    Args:
        states: the pool of states: its numbers alone, or a GdnPool.
        block_size: of the prefix cache.
        interval: tokens between two checkpoints of a text; a multiple of the block size. Without checkpoint slots
            nothing is ever shared.
        num_spare: working slots that are kept for drafts: as many as a step may have.
        waiting: returns where texts end whose next turn is expected (lesson 20); here there are none.

    Attributes:
        free_slots: working slots that no request holds; the last one is handed out next.
    """

    begins_everywhere = False

    def __init__(
        self,
        states: TrackSlots,
        block_size: int = 16,
        interval: int = 256,
        num_spare: int = 0,
        waiting: Callable[[], Sequence[Node]] = tuple,
    ) -> None:
        if interval < block_size or interval % block_size:
            raise UserError(
                f"checkpoint_interval is {interval}; give a multiple of the block size, {block_size}: a state is found "
                "only where a block ends",
                param="checkpoint_interval",
            )
        self.states, self.block_size, self.interval, self.num_spare = states, block_size, interval, num_spare
        self.checkpoints, self.waiting = Checkpoints(states), waiting
        self.free_slots = list(range(states.max_reqs, 0, -1))
        self.holds: dict[str, StateHold] = {}

    def slots_of(self, request_id: str) -> list[int]:
        """Return a request's slots: the one with its state, and one more for each of its drafts."""
        return self.holds[request_id].slots

    @property
    def has_room(self) -> bool:
        """True if there is a slot for one more request."""
        return len(self.free_slots) > self.num_spare

    def begin(self, request_id: str, num_tokens: int, table: RequestTable, num_known: int) -> None:
        """Give a request a slot, with a copy of the state where its table's prefix ends, or with zeros.

        That state is the checkpoint of `table.shared.node`, which `checkpoints.use` names; without one the request
        begins at the root, before its first token. The request's StateHold, in `holds`, has the slot, one of
        `free_slots`; the number of tokens that its state has seen, which is the table's; and as `ends` the `_ends` of
        the prompt.

        Args:
            num_tokens: of the prompt. num_known: how many of them the tree has, with or without a state there.
        """
        slot, checkpoint = self.free_slots.pop(), self.checkpoints.use(table.shared.node)
        ends = self._ends(num_tokens, table.num_tokens, num_known)
        self.holds[request_id] = StateHold([slot], table.num_tokens, ends)  # first, so that `free` finds the slot
        if checkpoint is None:
            self.states.reset_states([slot])
        else:
            self.states.copy_states(checkpoint, slot)

    def resume(self, request_id: str, table: RequestTable) -> None:
        """Go on behind the table's tokens, whose state has just come back, and keep it as a checkpoint again."""
        hold = self.holds[request_id]
        hold.num_computed = table.num_tokens
        hold.ends = [end for end in hold.ends if end > table.num_tokens]
        if table.shared.num_stored * self.block_size == table.num_tokens:
            self.keep(request_id, table)

    def chunk_end(self, request_id: str, start: int, stop: int) -> int:
        """Return the end of a chunk from `start`: the first place to checkpoint, or `stop`.

        Places are multiples of `interval`, counted from the text's beginning, and the request's `ends`. `start` itself
        is none: a chunk has at least one token. Without checkpoint slots there are no places.
        """
        if not self.states.max_track_slots:
            return stop
        boundary = (start // self.interval + 1) * self.interval
        return min([stop, boundary, *(end for end in self.holds[request_id].ends if end > start)])

    def announce_drafts(self, request_id: str, num_drafts: int) -> None:
        """Take a slot for each draft of the next step."""
        hold = self.holds[request_id]
        hold.slots += [self.free_slots.pop() for _ in range(num_drafts)]
        hold.num_fed = hold.num_computed + 1

    def commit(self, request_id: str, num_computed: int) -> bool:
        """Go on to the state behind `num_computed` tokens. Return whether it is worth a checkpoint.

        Of the states that a step with drafts has left, the first is behind one more token than the request had.
        """
        hold = self.holds[request_id]
        if len(hold.slots) > 1:
            ahead = num_computed - hold.num_fed
            self.free_slots += hold.slots[:ahead]
            hold.slots, hold.num_fed = hold.slots[ahead:], num_computed
        hold.num_computed = num_computed
        is_place = num_computed in hold.ends or num_computed % self.interval == 0
        return is_place and self.states.max_track_slots > 0

    def keep(self, request_id: str, table: RequestTable) -> None:
        """Copy the request's state into a checkpoint of the node where its stored blocks end.

        If another one has to go, those that a next turn begins with count as used now: they go last.
        """
        if len(self.checkpoints.slots) == self.states.max_track_slots:
            self.checkpoints.use_nearest(self.waiting()[-self.states.max_track_slots :])
        slot = self.checkpoints.new_checkpoint(table.shared.node)
        if slot is not None:
            self.states.copy_states(self.holds[request_id].slots[0], slot)

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Forget the states behind more tokens. The request's own state cannot forget a token that it has seen.

        Raises:
            ValueError: fewer tokens than have been computed; nothing was changed.
        """
        hold = self.holds[request_id]
        if num_tokens < hold.num_computed:
            raise ValueError(
                f"cannot keep {num_tokens} of {hold.num_computed} computed tokens: a recurrent state cannot be rolled "
                "back; free the request and compute it again"
            )
        kept = max(1, num_tokens + 1 - hold.num_fed)  # the first state is behind num_fed tokens
        self.free_slots += hold.slots[kept:]
        hold.slots = hold.slots[:kept]

    def free(self, request_id: str) -> None:
        """Zero the request's state; its slots are free again, even if that fails. A request without any is ignored."""
        hold = self.holds.pop(request_id, None)
        if hold is None:
            return
        try:
            self.states.reset_states(hold.slots[:1])
        finally:
            self.free_slots += reversed(hold.slots)

    def last(self, tree: Lookup, key: bytes, namespace: Hashable) -> int:
        """Return how many tokens of `key` lie before the deepest checkpoint within it."""
        path = tree.path(key, namespace)
        num_blocks = sum(len(node.blocks) for node in path)
        for node in path:
            if node in self.checkpoints:
                return num_blocks * self.block_size
            num_blocks -= len(node.blocks)
        return 0

    def coming(self, request_id: str, table: RequestTable, num_found: int) -> Iterable[int]:
        """Return the places at which the request's prompt will still be checkpointed."""
        if not self.states.max_track_slots:
            return []
        hold = self.holds[request_id]
        first = (hold.num_computed // self.interval + 1) * self.interval
        whole = len(table.shared.key) // TOKEN_BYTES
        return [*range(first, whole + 1, self.interval), *(end for end in hold.ends if end > hold.num_computed)]

    def drop(self, node: Node, blocks: Sequence[int]) -> None:
        """Drop the node's checkpoint: a node that has lost blocks ends elsewhere.

        The blocks that are left stay, although no state leads to them: they show where the next prompt leaves them,
        which is worth a checkpoint.
        """
        self.checkpoints.drop(node)

    def _ends(self, num_tokens: int, num_found: int, num_known: int) -> list[int]:
        """Return a prompt's checkpoint places. `num_found` of its tokens were found, `num_known` are in the tree.

        Behind what was found: where the prompt leaves what is stored, and at its last usable block.
        """
        last = (num_tokens - 1) // self.block_size * self.block_size
        return sorted({end for end in (min(num_known, last), last) if end > num_found})
