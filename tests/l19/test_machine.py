"""Lesson 19. A hypothesis machine drives both ends: whatever is handed over is what a cold run would compute.

Messages travel over a wire that delivers them as late as hypothesis likes, each direction in its order. Senders are
real SendingConnectors over pools of numbers; they copy when they like, also into buffers of cancelled requests, until
they have said `Ended`; and they die at any moment, also between a copy and the word about it.
"""

import random
from array import array
from collections import Counter, deque
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mini_engine.base.errors import OutOfBlocks
from mini_engine.handover.extras import ExtraBuffers
from mini_engine.handover.protocol import Ask, Cancel, Filled
from mini_engine.handover.receiver import ReceivingConnector
from mini_engine.handover.sender import SendingConnector
from mini_engine.handover.stage import State
from mini_engine.handover.transfers import Transfers
from mini_engine.kv.cache_coordinator import coordinated
from mini_engine.kv.prefix_cache import PrefixCache
from mini_engine.kv.prefixes import Stored
from mini_engine.kv.radix_node import key_of
from tests.l19.parts import StateOfText, stage_of
from tests.shared.tier_cells import BLOCKS, SIZE, Cells, digests
from tests.support import OneOf

FAMILIES = [random.Random(seed).choices(range(2), k=40) for seed in range(3)]
MOST_TOKENS = 30
OFTEN = ["step_once", "sender_hears", "sender_computes", "receiver_hears"]
EVENTS = [*OFTEN, *OFTEN, *OFTEN, "sender_preempts", "one_is_preempted", "one_is_aborted", "tree_shrinks"]


class Wide(Cells):
    """A sender's pool: large enough for every prompt that it is asked for."""

    def __init__(self):
        self.slots = array("q", [0]) * (400 * SIZE)
        self.next = 0

    def take(self, num_blocks):
        """Return blocks that no recent prompt has."""
        start = self.next if self.next + num_blocks <= 400 else 0
        self.next = start + num_blocks
        return list(range(start, self.next))


class ModelSender:
    """A prefill worker without a process: what it has heard, what it computes, and what it says.

    jobs: transfer id to the Ask, the blocks in its pool and how many tokens it has computed.
    inbox, outbox: messages that are on their way.
    """

    def __init__(self, number, stage, has_state):
        self.number, self.cells = number, Wide()
        self.extras = StateOfText() if has_state else ExtraBuffers((), Cells.payload_bytes)
        self.inbox, self.outbox, self.jobs = deque(), deque(), {}
        self.connector = SendingConnector(stage, self.cells, SIZE, self.extras, self.outbox.append)
        self.is_alive = True

    def hear(self):
        message = self.inbox.popleft()
        if isinstance(message, Cancel):
            self.jobs.pop(message.id, None)
            self.connector.end(message.id, "cancelled")
            return
        self.connector.begin(message)
        self.jobs[message.id] = SimpleNamespace(ask=message, blocks=[], done=0)
        self.restart(message.id, 0)

    def restart(self, transfer_id, num_cached):
        """Begin a prompt, or begin it again after a preemption, behind blocks that its cache had."""
        job = self.jobs[transfer_id]
        job.blocks, job.done = self.cells.take(job.ask.stop + 1), num_cached * SIZE
        self.write(job, 0, job.done)
        self.connector.update_state_after_alloc(str(transfer_id), SimpleNamespace(blocks=job.blocks), job.done)

    def compute(self, transfer_id, num_tokens):
        """Compute the next chunk of a prompt; end its transfer behind the last one."""
        job = self.jobs[transfer_id]
        start, stop = job.done, min(len(job.ask.tokens), job.done + num_tokens)
        if start < job.ask.stop * SIZE < stop and self.number % 3:
            stop = job.ask.stop * SIZE  # as lesson 11's chunks do, if they can: a state is kept where it can be used
        self.write(job, start, stop)
        job.done = stop
        if stop // SIZE > start // SIZE:
            stored = Stored(b"", job.ask.namespace, job.blocks[: stop // SIZE], start // SIZE)
            self.connector.save_kv(str(transfer_id), stored, stop % SIZE == 0)
        if stop == len(job.ask.tokens):
            self.end(transfer_id)

    def end(self, transfer_id, error=""):
        del self.jobs[transfer_id]
        self.connector.end(transfer_id, error)

    def write(self, job, start, stop):
        numbers = digests(job.ask.namespace, list(job.ask.tokens))
        for index in range(start, stop):
            self.cells.slots[job.blocks[index // SIZE] * SIZE + index % SIZE] = numbers[index]
        if isinstance(self.extras, StateOfText) and stop:
            self.extras.states[str(job.ask.id)] = numbers[stop - 1]

    @property
    def may_write(self):
        """Buffers that it may write from now on: of all it was asked for and has not ended."""
        if not self.is_alive:
            return []
        heard = [s.ask.buffers[s.num_filled :] for s in self.connector.sendings.values()]
        coming = [message.buffers for message in self.inbox if isinstance(message, Ask)]
        return [buffer for buffers in [*heard, *coming] for buffer in buffers]


class Senders:
    """The receiver's view of model senders, as PrefillWorkers has it of processes."""

    def __init__(self, stage, has_state):
        self.stage, self.has_state = stage, has_state
        self.of_number, self.num_losses, self.last, self.turn = {}, 0, 0, 0
        self.transfers: Transfers

    def add(self):
        self.last += 1
        self.of_number[self.last] = ModelSender(self.last, self.stage, self.has_state)

    def choose(self, tokens, namespace):
        if not self.of_number:
            return None
        self.turn += 1
        return sorted(self.of_number)[self.turn % len(self.of_number)]

    def send(self, sender, message):
        if sender in self.of_number:
            self.of_number[sender].inbox.append(message)
        else:
            self.transfers.lose(sender, "the worker is gone")

    @property
    def num_away(self):
        return 0

    def close(self):
        self.of_number.clear()


class Request:
    """A request of the model scheduler: lesson 5's, as far as a connector and a manager know it."""

    def __init__(self, name, tokens, namespace):
        self.id, self.token_ids, self.namespace, self.num_computed = name, tokens, namespace, 0
        self.last = len(tokens) + 3


class HandOver(RuleBasedStateMachine):
    @initialize(num_buffers=st.integers(2, 12), has_state=st.booleans(), min_tokens=st.sampled_from([0, 0, 0, 9]))
    def open(self, num_buffers, has_state, min_tokens):
        self.stage = stage_of(num_buffers)
        self.cells, self.extras = Cells(), StateOfText() if has_state else ExtraBuffers((), Cells.payload_bytes)
        self.transfers = Transfers(num_buffers)
        self.transfers.wait = lambda seconds: None
        self.senders = Senders(self.stage, has_state)
        self.senders.transfers = self.transfers
        for _ in range(3):
            self.senders.add()
        self.connector = ReceivingConnector(
            self.senders, self.transfers, self.stage, self.cells, SIZE, self.extras, min_tokens
        )
        self.manager = coordinated(BLOCKS, SIZE, self.cells.copy, prefixes=PrefixCache, connector=self.connector)
        self.waiting, self.running, self.names = [], [], 0

    # ---------------------------------------------------------------- the receiver's engine

    @precondition(lambda self: len(self.waiting) < 4)
    @rule(
        family=st.sampled_from(range(2)),
        length=st.sampled_from([1, 8, 9, *range(11, MOST_TOKENS)]),
        namespace=st.sampled_from([None, "a"]),
    )
    def add(self, family, length, namespace):
        self.names += 1
        request = Request(f"r{self.names}", FAMILIES[family][:length], namespace)
        self.waiting.append(request)
        self.connector.request_added(request)

    def step(self, num_chunk):
        """Run a step, as lesson 5's scheduler does: admit what can begin, compute a chunk of what runs."""
        spare, held = self.manager.num_free_blocks, 0
        while held < len(self.waiting):
            request = self.waiting[held]
            cost = self.manager.cost(request.token_ids, len(request.token_ids), request.namespace)
            if cost.num_blocks > spare:
                break
            spare -= cost.num_blocks
            if cost.should_wait:
                held += 1
                continue
            self.admit(request)
        for request in list(self.running):
            self.compute(request, num_chunk)

    def admit(self, request):
        self.waiting.remove(request)
        request.num_computed = self.manager.allocate(request.id, request.token_ids, request.namespace)
        assert request.num_computed < len(request.token_ids), "one token at least must be left to compute"
        self.running.append(request)
        self.check(request)
        for name, start, stop, _ in getattr(self.extras, "writes", ()):
            assert name == request.id, "extras are written for the request that is admitted"
            assert stop * SIZE == request.num_computed > start * SIZE, "a state behind the last block that was loaded"
            expected = digests(request.namespace, request.token_ids)[stop * SIZE - 1]
            assert self.extras.states[name] == expected, "the state is of another token"
        getattr(self.extras, "writes", []).clear()

    def compute(self, request, num_tokens):
        start, stop = request.num_computed, min(len(request.token_ids), request.num_computed + num_tokens)
        try:
            self.manager.grow(request.id, stop)
        except OutOfBlocks:
            return self.preempt(request)
        blocks = self.manager.tables[request.id].blocks
        for index, number in enumerate(digests(request.namespace, request.token_ids)[:stop]):
            if index >= start:
                self.cells.slots[blocks[index // SIZE] * SIZE + index % SIZE] = number
        request.num_computed = stop
        self.manager.commit(request.id, request.token_ids, stop)
        if stop == len(request.token_ids):
            request.token_ids = [*request.token_ids, stop % 2]  # a new token
            if len(request.token_ids) >= request.last:
                self.end(request)

    def one_is_preempted(self, number, amount):
        if self.running:
            self.preempt(self.running[number % len(self.running)])

    def preempt(self, request):
        self.running.remove(request)
        self.manager.free(request.id, request.token_ids[: request.num_computed])
        request.num_computed = 0
        self.waiting.insert(0, request)

    def one_is_aborted(self, number, amount):
        if some := [*self.waiting, *self.running]:
            self.end(some[number % len(some)])

    def end(self, request):
        (self.running if request in self.running else self.waiting).remove(request)
        self.manager.free(request.id, request.token_ids[: request.num_computed])

    @property
    def half_way(self):
        """Requests of whose prompts some blocks have arrived, and others have not."""
        keys = {key for key, transfer in self.connector.asked.items() if transfer and transfer.is_open}
        part = {key for key in keys if self.connector.asked[key].num_filled}
        return [request for request in self.waiting if (request.namespace, key_of(request.token_ids)) in part]

    @precondition(lambda self: self.half_way)
    @rule()
    def one_is_aborted_half_way(self):
        self.end(self.half_way[0])

    def tree_shrinks(self, number, amount):
        """Whatever has been asked for behind what it gives up."""
        self.manager.coordinator.prefixes.tree.evict(min(amount, self.manager.coordinator.prefixes.num_evictable))

    # ---------------------------------------------------------------- the senders

    def pick(self, number, has):
        """Return one of the living senders that have something; None if none has."""
        some = [one for one in self.senders.of_number.values() if one.is_alive and has(one)]
        return some[number % len(some)] if some else None

    @rule(
        events=st.lists(
            st.tuples(st.sampled_from(EVENTS), st.integers(0, 5), st.integers(1, MOST_TOKENS)), min_size=1, max_size=15
        )
    )
    def time_passes(self, events):
        """Whatever runs by itself runs, each a little: the receiver's steps, senders, and messages in both ways."""
        for event, number, amount in events:
            getattr(self, event)(number, amount)

    def step_once(self, number, amount):
        self.step(amount)

    def sender_hears(self, number, amount):
        if sender := self.pick(number, lambda one: one.inbox):
            sender.hear()

    def sender_computes(self, number, amount):
        if sender := self.pick(number, lambda one: one.jobs):
            sender.compute(sorted(sender.jobs)[number % len(sender.jobs)], 1 + amount % 12)

    def sender_preempts(self, number, amount):
        if sender := self.pick(number, lambda one: one.jobs):
            job = sorted(sender.jobs)[number % len(sender.jobs)]
            sender.restart(job, min(amount // SIZE, sender.jobs[job].ask.stop))

    def receiver_hears(self, number, amount):
        some = [sender for sender in self.senders.of_number.values() if sender.outbox]
        if some:
            self.hear(some[number % len(some)])

    @precondition(lambda self: any(one.jobs and one.is_alive for one in self.senders.of_number.values()))
    @rule(number=st.integers(0, 5))
    def sender_fails(self, number):
        if sender := self.pick(number, lambda one: one.jobs):
            sender.end(sorted(sender.jobs)[number % len(sender.jobs)], "out of blocks")

    @precondition(lambda self: self.transfers.of_id)
    @rule(number=st.integers(0, 5), num_unsaid=st.integers(0, 4))
    def sender_dies(self, number, num_unsaid):
        """Its last words may not have been said, though it has copied."""
        if sender := self.pick(number, lambda one: True):
            sender.is_alive = False
            for _ in range(min(num_unsaid, len(sender.outbox))):
                sender.outbox.pop()

    # ---------------------------------------------------------------- the receiver's ears

    def hear(self, sender):
        message = sender.outbox.popleft()
        if isinstance(message, Filled):
            self.transfers.fill(sender.number, message.id, message.num_buffers)
        else:
            self.transfers.end(sender.number, message.id, message.error)

    @precondition(lambda self: any(not one.is_alive for one in self.senders.of_number.values()))
    @rule(is_replaced=st.sampled_from([True] * 4 + [False]))
    def a_death_is_noticed(self, is_replaced):
        for number, sender in list(self.senders.of_number.items()):
            if not sender.is_alive and not sender.outbox:
                del self.senders.of_number[number]
                self.transfers.lose(number, "has ended")
                self.senders.num_losses += 1
                if is_replaced:
                    self.senders.add()

    @rule(num_chunk=st.integers(1, 20))
    def all_goes_well(self, num_chunk):
        """Everything that is on its way arrives, and what was asked for is computed; then a step."""
        for sender in [one for one in self.senders.of_number.values() if one.is_alive]:
            while sender.inbox:
                sender.hear()
            for number in list(sender.jobs):
                while number in sender.jobs:
                    sender.compute(number, num_chunk)
            while sender.outbox:
                self.hear(sender)
        self.step(num_chunk)

    # ---------------------------------------------------------------- what must be true

    def check(self, request):
        """What a request reads is what a cold run computes."""
        blocks = self.manager.tables[request.id].blocks
        seen = [self.cells.slots[blocks[i // SIZE] * SIZE + i % SIZE] for i in range(request.num_computed)]
        expected = digests(request.namespace, request.token_ids)[: request.num_computed]
        assert seen == expected, f"{request.id} reads K and V that a cold run would not compute"

    @invariant()
    def every_request_reads_what_it_would_compute(self):
        for request in self.running:
            self.check(request)

    @invariant()
    def every_buffer_has_one_owner(self):
        buffers = self.transfers.buffers
        free = [number for number, state in enumerate(buffers.states) if state is State.FREE]
        assert sorted(buffers.free) == free, "a buffer is in the free list if it is free, once"
        owners = Counter()
        for transfer in self.transfers.of_id.values():
            mine = transfer.buffers[: transfer.num_filled] if transfer.has_ended else transfer.buffers
            owners.update(transfer.owed or mine)
        assert all(count == 1 for count in owners.values()), f"a buffer belongs to two transfers: {owners}"
        assert sorted(owners) == [n for n, state in enumerate(buffers.states) if state is not State.FREE], (
            "a buffer that is not free belongs to a transfer"
        )

    @invariant()
    def what_a_sender_may_write_is_the_sender_s(self):
        writers = Counter(buffer for one in self.senders.of_number.values() for buffer in one.may_write)
        for buffer, count in writers.items():
            state = self.transfers.buffers.states[buffer].value
            assert state == OneOf("lent", "owed"), f"buffer {buffer} is {state}, and a sender may write into it"
            assert count == 1, f"{count} senders may write into buffer {buffer}"

    @invariant()
    def nothing_is_kept_between_two_calls(self):
        assert not self.connector.taken, "a transfer is taken within one allocate"
        assert len(self.connector.asked) <= len(self.waiting), "what was asked for belongs to what waits"

    def teardown(self):
        if not hasattr(self, "connector"):
            return
        for request in [*self.running, *self.waiting]:
            self.end(request)
        for sender in self.senders.of_number.values():
            while sender.is_alive and (sender.inbox or sender.jobs):
                if sender.inbox:
                    sender.hear()
                else:
                    sender.compute(min(sender.jobs), MOST_TOKENS)
            while sender.outbox:
                self.hear(sender)
        self.a_death_is_noticed(is_replaced=False)
        assert not self.connector.asked and not self.connector.taken and not self.transfers.of_id
        assert set(self.transfers.buffers.states) == {State.FREE}, "a buffer is lost"
        assert self.manager.allocator.num_free + self.manager.coordinator.prefixes.num_evictable == BLOCKS - 1, (
            "a block is lost"
        )


@pytest.mark.parametrize("examples", [40, pytest.param(300, marks=pytest.mark.nightly)])
def test_any_order_of_events_loses_nothing(examples):
    run_state_machine_as_test(HandOver, settings=settings(max_examples=examples, stateful_step_count=60))
