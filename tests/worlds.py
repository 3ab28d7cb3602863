"""Course machinery. Outlines of random tests: managers and their requests through any order of calls.

What a slot of the pool, a state or a record holds are the tokens that it stands for, so whatever reads another text's
is noticed at once. A lesson's test adds what its own memory must hold.
"""

import random
from collections import Counter

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from mini_engine.hybrid.track_slots import TrackSlots

FAMILIES = [random.Random(seed).choices(range(3), k=80) for seed in range(3)]
SEEDS = st.integers(0, 2**32)


class Ledger(TrackSlots):
    """A state pool without tensors: the state of a slot is the tuple of tokens that it has seen.

    Attributes:
        seen: slot -> tokens; a slot that was never written has none.
        log: what was asked for, such as ("copy", 1, 4) and ("reset", 1).
        checkpoints: whose they are, if anyone keeps some.
    """

    checkpoints = None

    def __init__(self, max_reqs, max_track_slots=0):
        super().__init__(max_reqs, max_track_slots)
        self.seen = {}
        self.log = []
        self.written = {}  # checkpoint slot -> the node that owned it when it was written

    def alloc_track_slot(self):
        slot = super().alloc_track_slot()
        self.written.pop(slot, None)
        return slot

    def free_track_slot(self, slot):
        super().free_track_slot(slot)
        self.seen.pop(slot, None)

    def reset_states(self, slots):
        for slot in slots:
            self.check_writable(slot)
            self.seen[slot] = ()
            self.log.append(("reset", slot))

    def copy_states(self, src_index, dst_index):
        self.check_writable(dst_index)
        self.seen[dst_index] = self.seen[src_index]
        self.log.append(("copy", src_index, dst_index))

    def check_writable(self, slot):
        assert 0 < slot < self.num_slots, f"slot {slot} is not in the pool, or it is the padding slot"
        if slot > self.max_reqs:
            assert slot in self.held_track_slots, f"checkpoint {slot} is written but not handed out"
            owner = self.owner(slot)
            is_new = slot not in self.written or self.written[slot] is not owner  # another node may take a slot over
            assert is_new, f"checkpoint {slot} is written again: a checkpoint never changes"
            self.written[slot] = owner

    def owner(self, slot):
        """Return the node whose checkpoint is in `slot`."""
        owners = self.checkpoints.slots.items() if self.checkpoints else ()
        return next((node for node, held in owners if held == slot), None)

    def advance(self, slot, tokens):
        """Do to a working slot what the model does: its state now has seen these tokens too."""
        assert 0 < slot <= self.max_reqs, f"a request writes into slot {slot}, which is not a working slot"
        self.seen[slot] = (*self.seen[slot], *tokens)


class World:
    """A manager with a memory beside its blocks, and its requests, through random operations.

    A subclass has `may_begin(tokens, namespace, cost, chance)`; `chunk(name, start, stop, chance)`, the end of a chunk;
    `write(name, tokens, start, stop)` and `write_drafts(name, tokens, start, count)`, what the model does; and
    `check_begin(name, found)` and `check()`, what must be true of a new request, and of everything.

    Attributes:
        kv: the manager, with `hold(name)`, what the memory has of a request. alive: the tokens of each request.
        did: how often something happened, "calls" of all kinds. evictors: what may be called to free so many blocks.
    """

    longest, most_drafts = 60, 3
    has_exact_cost = True
    has_promises = False  # whether the blocks for all tokens of the running requests are never given to others
    actions = ("admit", "step", "guess", "roll_back", "evict")

    def __init__(self, kv, size):
        self.kv, self.size, self.usable = kv, size, kv.num_usable_blocks
        self.alive = {}
        self.did = Counter()
        self.evictors = [kv.tree.evict]

    def has_room(self, name, stop):
        return self.kv.missing_blocks(name, stop) <= self.kv.num_free_blocks

    def grow(self, name, stop):
        self.kv.grow(name, stop)

    def commit(self, name, stop):
        self.kv.commit(name, self.alive[name], stop)

    def promised(self):
        """Return how many blocks the requests still need for the tokens that they have."""
        return sum(self.kv.missing_blocks(name, len(tokens)) for name, tokens in self.alive.items())

    def pick(self, chance):
        return chance.choice(sorted(self.alive))

    def admit(self, chance):
        stem = chance.choice(FAMILIES)[: chance.randrange(1, self.longest)]
        tokens, namespace = stem + chance.choices(range(3), k=chance.randrange(5)), chance.choice([0, 0, 0, 1])
        self.did["calls"] += 1
        cost = self.kv.cost(tokens, len(tokens), namespace)
        if not self.may_begin(tokens, namespace, cost, chance):
            return
        name, free = f"r{self.did['admitted']}", self.kv.num_free_blocks
        found = self.kv.allocate(name, tokens, namespace)
        assert found < len(tokens) and found % self.size == 0
        self.alive[name] = tokens
        self.check_begin(name, found)
        taken = free - self.kv.num_free_blocks + self.kv.missing_blocks(name, len(tokens))
        assert taken == cost.num_blocks or not self.has_exact_cost, (
            "an admission must take exactly what `cost` returned"
        )
        self.did += Counter(admitted=1, found=found)

    def step(self, chance):
        """Compute a chunk of each request that has room, then commit, preempt, abort or end each of them."""
        flying = []
        for name, tokens in list(self.alive.items()):
            start = self.kv.hold(name).num_computed
            if start == len(tokens):
                tokens.append(chance.randrange(3))
            stop = self.chunk(name, start, len(tokens), chance)
            assert start < stop <= len(tokens)
            self.did["calls"] += 1
            if self.has_room(name, stop):
                self.grow(name, stop)
                flying.append((name, start, stop))
            else:
                self.drop(name)
                self.did["preempted"] += 1
        for name, start, stop in flying:
            self.write(name, self.alive[name], start, stop)
        for name, _, stop in flying:
            dice = chance.random()
            if dice < 0.05:
                self.drop(name, computed=dice < 0.03)
                continue
            self.commit(name, stop)
            if dice < 0.25:
                self.drop(name)

    def drop(self, name, computed=True):
        tokens = self.alive.pop(name)
        self.kv.free(name, tokens[: self.kv.hold(name).num_computed] if computed else ())
        self.did["calls"] += 1

    def guess(self, chance):
        """Feed a request's newest token with drafts behind it; some of them stand, the others are truncated."""
        if not self.alive or self.most_drafts < 1:
            return
        name = self.pick(chance)
        tokens, start, count = self.alive[name], self.kv.hold(name).num_computed, chance.randint(1, self.most_drafts)
        if start == len(tokens):
            tokens.append(chance.randrange(3))
        stop = start + 1 + count
        others = self.promised() - self.kv.missing_blocks(name, len(tokens)) if self.has_promises else 0
        if start != len(tokens) - 1 or self.kv.missing_blocks(name, stop) + others > self.kv.num_free_blocks:
            return
        drafts = chance.choices(range(3), k=count)
        self.kv.grow(name, start + 1)
        self.kv.grow(name, stop)
        self.kv.coordinator.announce_truncation(name, count)
        self.write_drafts(name, [*tokens, *drafts], start, count)
        standing, is_first = chance.randrange(count + 1), chance.random() < 0.5
        tokens += [*drafts[:standing], chance.randrange(3)]
        if is_first:  # what does not stand may be cut off before or after the rest is committed
            self.kv.truncate(name, start + 1 + standing)
        for stop in range(start + 1, start + 2 + standing):
            self.kv.commit(name, tokens, stop)
        if not is_first:
            self.kv.truncate(name, stop)
        self.did += Counter(calls=1, taken_back=count - standing)

    def roll_back(self, chance):
        """Ask for fewer tokens than are computed, which cannot be."""
        if self.alive and (done := self.kv.hold(name := self.pick(chance)).num_computed):
            with pytest.raises(ValueError):
                self.kv.truncate(name, chance.randrange(done))
        self.did["calls"] += 1

    def evict(self, chance):
        chance.choice(self.evictors)(chance.randrange(1, 6))
        self.did["calls"] += 1

    def some(self, seed, calls):
        chance, until = random.Random(seed), self.did["calls"] + calls
        while self.did["calls"] < until:
            [action] = chance.choices(self.actions, weights=(35, 35, 21, 4, 5))
            getattr(self, action)(chance)
            self.check_counts()

    def check_counts(self):
        assert sum(self.kv.blocks_by_state) == self.usable and min(self.kv.blocks_by_state) >= 0

    def finish(self):
        for name in list(self.alive):
            self.drop(name)
        self.check()
        assert self.kv.num_free_blocks == self.usable, "with no request, all blocks can be had"
        self.kv.coordinator.clear()
        assert self.kv.allocator.num_free == self.usable, "blocks leaked"


def played(new_world, examples, calls_at_once):
    """Let hypothesis choose what happens to so many worlds; return how often each thing happened.

    calls_at_once: operations of the rule that runs many.
    """
    did = Counter()

    class Machine(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.world = new_world()

        @rule(seed=SEEDS)
        def many(self, seed):
            self.world.some(seed, calls_at_once)

        @rule(seed=SEEDS, action=st.sampled_from(World.actions))
        def one(self, seed, action):
            getattr(self.world, action)(random.Random(seed))

        @invariant()
        def nothing_is_lost(self):
            self.world.check()

        def teardown(self):
            self.world.finish()
            did.update(self.world.did)

    phases = [Phase.generate, Phase.shrink]
    plan = settings(max_examples=examples, stateful_step_count=30, deadline=None, phases=phases)
    run_state_machine_as_test(Machine, settings=plan)
    return did
