"""Lesson 20. Events over real sockets: vLLM's documented subscribers read them, and what was missed is sent again."""

import gc
import sys
import threading
import time
from contextlib import closing, contextmanager
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from mini_engine import LLM, EngineConfig, SamplingParams
from mini_engine.agents.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, EventLog, short_hash
from mini_engine.agents.index import BlockIndex, hashes_of
from mini_engine.agents.publisher import END, TOPIC, Publisher, Sender
from mini_engine.agents.subscriber import PATIENCE, Subscriber
from mini_engine.agents.wire import as_array, as_map, decode, encode, libraries
from mini_engine.base.errors import UserError
from mini_engine.cli import serve
from mini_engine.cli.parser import OneLineParser
from mini_engine.distributed.routing.keys import block_keys
from mini_engine.kv.prefixes import Stored
from mini_engine.kv.radix_node import key_of

SIZE = 4
ANY = "tcp://127.0.0.1:*"
LONG = 20.0  # seconds until a test gives up


def structs(array_like):
    """Return the type that vLLM's example decodes, with its fields: arrays in 0.10 to 0.23, maps in 0.24 to 0.33."""
    options = dict(array_like=array_like, omit_defaults=True, gc=False, tag=True)
    stored = msgspec.defstruct(
        "BlockStored",
        [
            ("block_hashes", list[bytes | int]),
            ("parent_block_hash", bytes | int | None),
            ("token_ids", list[int]),
            ("block_size", int),
            ("lora_id", int | None),
            ("medium", str | None),
            ("lora_name", str | None),
            ("extra_keys", list | None, None),
            ("group_idx", int | None, None),
        ],
        **options,
    )
    removed = msgspec.defstruct(
        "BlockRemoved",
        [("block_hashes", list[bytes | int]), ("medium", str | None), ("group_idx", int | None, None)],
        **options,
    )
    cleared = msgspec.defstruct("AllBlocksCleared", [], **options)
    return msgspec.defstruct(
        "KVEventBatch",
        [("ts", float), ("events", list[stored | removed | cleared]), ("data_parallel_rank", int | None, None)],
        array_like=True,
        omit_defaults=True,
        gc=False,
    )


def store(watcher, *names, start=0, first_block=1):
    """Tell a watcher of a text, a block per name."""
    tokens = [name for name in names for _ in range(SIZE)]
    watcher.stored(Stored(key_of(tokens), None, list(range(first_block, first_block + len(names))), start))


@contextmanager
def sending(replay=True, heartbeat=float("inf"), **options):
    """Run a sender with its log; its thread and sockets end with the block."""
    events = EventLog(SIZE)
    sender = Sender(events, ANY, ANY if replay else None, heartbeat=heartbeat, **options)
    sender.thread.start()
    try:
        yield sender
    finally:
        sender.close()
    assert not sender.thread.is_alive() and sender.context.closed


@contextmanager
def socket_of(kind, endpoint):
    """Open a client's socket."""
    context = zmq.Context()
    socket = context.socket(kind)
    if kind == zmq.SUB:
        socket.subscribe("kv-events")
    socket.connect(endpoint)
    try:
        yield socket
    finally:
        context.destroy(linger=0)


def until(condition, read=lambda: time.sleep(0.005)):
    """Read until a condition holds."""
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, "the other side never got there"
        read()


def received(socket):
    assert socket.poll(LONG * 1000), "nothing came"
    return socket.recv_multipart()


def replayed(socket, start):
    """Return the answers to a request, by number, as a DEALER gets them."""
    socket.send_multipart([b"", start.to_bytes(8, "big")])
    answers = []
    while True:
        delimiter, topic, number, payload = received(socket)
        assert delimiter == b""
        if not payload:
            assert number == END, "an empty payload ends a replay, under the number -1"
            return answers
        assert topic == TOPIC, "an answer has the frames of a live message"
        answers.append((int.from_bytes(number, "big"), decode(payload)))


BATCH = EventBatch(
    12.5,
    [
        BlockStored([1, 2**64 - 1], 7, [5, 6, 7, 8], 2),
        BlockRemoved([3]),
        AllBlocksCleared(),
        BlockStored([4], None, [9], 1),
    ],
    0,
    b"0123456789abcdef",
)


@pytest.mark.parametrize("form", ["map", "array"])
def test_a_batch_survives_the_wire(form):
    assert decode(encode(BATCH, form)) == BATCH


@pytest.mark.parametrize("form", ["map", "array"])
def test_vllms_example_decodes_a_batch(form):
    batch = msgspec.msgpack.Decoder(type=structs(form == "array")).decode(encode(BATCH, form))
    stored, removed, cleared, first = batch.events
    assert (batch.ts, batch.data_parallel_rank) == (12.5, 0)
    assert stored.block_hashes == [1, 2**64 - 1] and stored.parent_block_hash == 7
    assert stored.token_ids == [5, 6, 7, 8] and stored.block_size == 2 and stored.medium == "GPU"
    assert stored.lora_id is None and stored.lora_name is None
    assert removed.block_hashes == [3] and removed.medium == "GPU"
    assert type(cleared).__name__ == "AllBlocksCleared" and first.parent_block_hash is None


@pytest.mark.parametrize("form", ["map", "array"])
def test_what_vllm_publishes_is_read(form):
    """Also with whole keys as hashes, fields that came later, and events of a kind that this engine does not know."""
    write = as_map if form == "map" else as_array
    event = write(BATCH.events[0])
    key = bytes(24) + (77).to_bytes(8, "big")
    if form == "map":
        event |= {"block_hashes": [key], "parent_block_hash": key, "extra_keys": [None], "group_idx": 0}
        unknown = {"type": "BlockMoved", "block_hashes": [1]}
    else:
        event[1:3] = [key], key
        event += [[None], 0, "full_attention", None]
        unknown = ["BlockMoved", [1]]
    payload = msgspec.msgpack.encode([1.0, [unknown, event]])
    assert decode(payload) == EventBatch(1.0, [BlockStored([77], 77, [5, 6, 7, 8], 2)]), (
        "by its last 8 bytes, a key is the same block however its publisher is set up"
    )


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x01", msgspec.msgpack.encode([1.0, [{"type": "BlockStored"}]]), b"\x92\x01\x91\x90"]
)
def test_what_is_no_batch_is_refused_in_one_sentence(payload):
    with pytest.raises(ValueError, match="no batch of events"):
        decode(payload)


def test_every_batch_can_be_had_again_from_a_number_on():
    with sending() as sender, socket_of(zmq.DEALER, sender.replay_endpoint) as ask:
        store(sender.events, 1)
        until(lambda: sender.number == 2)
        sender.events.removed([1])
        until(lambda: sender.number == 3)
        assert [number for number, _ in replayed(ask, 0)] == [0, 1, 2]
        [(number, batch)] = replayed(ask, 2)
        assert number == 2 and isinstance(batch.events[0], BlockRemoved)
        assert replayed(ask, 3) == [], "nothing is missing: the end comes at once"


@pytest.mark.parametrize("start", [0, 1000])
def test_what_is_no_longer_kept_is_replaced_by_a_snapshot(start):
    """Too old, or from before a restart: either way the subscriber must begin again with the whole tree."""
    with sending(keep=2) as sender, socket_of(zmq.DEALER, sender.replay_endpoint) as ask:
        for name in range(1, 5):
            store(sender.events, name, first_block=name)
            until(lambda name=name: sender.number == name + 1)
        [(number, batch)] = replayed(ask, start)
        assert number == sender.number - 1, "live batches go on behind it"
        assert batch.events[0] == AllBlocksCleared(), "a subscriber must drop what it had"
        assert len(batch.events) == 5


@pytest.fixture
def idle():
    """A sender whose thread is not started, with room for one batch."""
    sender = Sender(EventLog(SIZE), ANY, ANY, keep=1)
    yield sender
    sender.context.destroy(linger=0)


def test_what_a_snapshot_includes_is_sent_to_the_others_as_well(idle, monkeypatch):
    """Its number is that of a live batch: whoever asks continues there, and all others must get the same events."""
    answers = []
    monkeypatch.setattr(idle, "_answer", lambda client, *frames: answers.append(frames))
    for name in (1, 2):
        store(idle.events, name, first_block=name)
        idle._send(idle.events.take())
    store(idle.events, 3, first_block=3)
    idle._replay([b"client", b"", (0).to_bytes(8, "big")])
    (_, number, payload), _ = answers
    assert len(decode(payload).events) == 4, "the snapshot has all three blocks"
    assert (idle.number, int.from_bytes(number, "big")) == (3, 2), "the third block was sent to all, as batch 2"
    assert decode(idle.sent[-1][1]).events == idle.events.take_all()[1][-1:]


def test_a_malformed_request_is_ignored():
    with sending() as sender, socket_of(zmq.DEALER, sender.replay_endpoint) as ask:
        for frames in ([b""], [b"", b"12"], [b"", b"", b"12345678"], [b"x"]):
            ask.send_multipart(frames)
        assert replayed(ask, 0)[0][0] == 0


def test_a_subscriber_that_comes_late_knows_all_blocks():
    index = BlockIndex()
    with sending(keep=1, heartbeat=0.03) as sender:
        store(sender.events, 1, 2)
        until(lambda: sender.number >= 2)
        sender.events.removed([2])
        store(sender.events, 1, 3, start=1)
        until(lambda: sender.number >= 4)
        with closing(Subscriber(index, "a", sender.endpoint, sender.replay_endpoint)) as subscriber:
            until(lambda: index.num_blocks("a") == 2, lambda: subscriber.read(0.01))
            assert index.replicas["a"].blocks == {short_hash(one.key) for one in sender.events.blocks.values()}
            sender.events.removed([2])
            until(lambda: index.num_blocks("a") == 1, lambda: subscriber.read(0.01))


class Sockets:
    """The subscriber's messages, made by hand, with a clock that stands still."""

    def __init__(self, replay="tcp://127.0.0.1:1"):
        self.index, self.now = BlockIndex(), 0.0
        self.subscriber = Subscriber(self.index, "a", "tcp://127.0.0.1:1", replay, clock=lambda: self.now)
        self.subscriber._settle()

    def live(self, number, *events, source=b"s" * 16, is_replay=False):
        payload = encode(EventBatch(1.0, list(events), 0, source))
        self.subscriber._receive([TOPIC, number.to_bytes(8, "big"), payload], is_replay)

    def answer(self, number, *events):
        self.live(number, *events, is_replay=True)

    def end(self):
        self.subscriber._receive([b"", b"", END, b""], True)

    def blocks(self):
        return self.index.replicas["a"].blocks


@pytest.fixture
def sockets():
    made = Sockets()
    with closing(made.subscriber):
        yield made


def test_what_comes_during_a_replay_waits_for_its_end(sockets, monkeypatch):
    asked = []
    monkeypatch.setattr(sockets.subscriber, "dealer", SimpleNamespace(send_multipart=asked.append))
    sockets.live(0, BlockStored([1], None, [1], 1))
    sockets.live(2, BlockStored([3], None, [1], 1))
    assert asked == [[b"", (1).to_bytes(8, "big")]], "the first one that is missing, and what follows"
    sockets.live(3, BlockRemoved([3]))
    assert sockets.blocks() == {1}, "batch 1 is missing: nothing may overtake it"
    sockets.answer(1, BlockStored([2], None, [1], 1))
    sockets.answer(2, BlockStored([3], None, [1], 1))
    sockets.end()
    assert sockets.blocks() == {1, 2}, "held batches come last; those that the replay had already count once"


def test_a_replay_that_never_comes_costs_what_was_known(sockets):
    sockets.live(0, BlockStored([1], None, [1], 1))
    sockets.live(2, BlockStored([3], None, [1], 1))
    sockets.now += PATIENCE + 1
    sockets.subscriber.read(0)
    assert sockets.blocks() == {3} and sockets.subscriber.num_forgotten == 1
    sockets.live(3, BlockStored([4], None, [1], 1))
    assert sockets.blocks() == {3, 4}


def test_a_replay_with_a_gap_costs_what_was_known(sockets):
    """vLLM's replay leaves out what it has not kept, and sends no snapshot."""
    sockets.live(0, BlockStored([1], None, [1], 1))
    sockets.live(9, BlockStored([9], None, [1], 1))
    sockets.answer(8, BlockStored([8], None, [1], 1))
    sockets.end()
    assert sockets.blocks() == {8, 9} and sockets.subscriber.num_forgotten == 1


def test_without_a_replay_a_gap_costs_what_was_known():
    made = Sockets(replay=None)
    with closing(made.subscriber):
        made.live(0, BlockStored([1], None, [1], 1))
        made.live(2, BlockStored([3], None, [1], 1))
        assert made.blocks() == {3}, "block 1 may be gone since: too little is believed rather than too much"


def test_a_subscriber_that_is_left_to_the_collector_closes_its_sockets_first():
    """As after a failed test: a context that goes before its sockets waits for them for ever."""
    subscriber = Subscriber(BlockIndex(), "a", "tcp://127.0.0.1:1", "tcp://127.0.0.1:1")
    context, circle = subscriber.context, [subscriber]
    circle.append(circle)
    del subscriber, circle
    gc.collect()
    assert context.closed


def test_a_message_that_cannot_be_read_shows_as_a_gap(sockets):
    sockets.live(0, BlockStored([1], None, [1], 1))
    sockets.subscriber._receive([TOPIC, (1).to_bytes(8, "big"), b"\xc1"], False)
    sockets.subscriber._receive([b"one frame"], False)
    sockets.live(2, BlockStored([3], None, [1], 1))
    assert sockets.subscriber.asked_at is not None and sockets.blocks() == {1}


@pytest.mark.ci
def test_a_subscriber_that_does_not_read_stops_nothing():
    """Its messages are dropped; it finds a gap in the numbers when it reads again. The engine only appends."""
    with sending(replay=False, mark=1) as sender, socket_of(zmq.SUB, sender.endpoint) as sub:
        sub.set_hwm(1)
        count = 0
        until(
            lambda: sub.poll(10), lambda: store(sender.events, 10**6 + sender.number, first_block=10**6 + sender.number)
        )
        for count in range(20):
            before = sender.number
            store(sender.events, *range(count * 30_000, (count + 1) * 30_000), first_block=1 + count * 30_000)
            until(lambda before=before: sender.number > before)
        assert sender.number > count, "the sender went on"
        numbers = []
        while sub.poll(300):
            numbers.append(int.from_bytes(sub.recv_multipart()[1], "big"))
        assert len(numbers) < sender.number - numbers[0], "something was dropped, and the numbers show it"


def test_a_failed_batch_is_a_gap_and_not_the_end(monkeypatch):
    with sending() as sender, socket_of(zmq.DEALER, sender.replay_endpoint) as ask:
        failed = threading.Event()

        def fails(*_):
            failed.set()
            monkeypatch.undo()
            raise RuntimeError("no payload")

        replayed(ask, 0)
        monkeypatch.setattr("mini_engine.agents.publisher.encode", fails)
        store(sender.events, 1)
        assert failed.wait(LONG)
        answers = replayed(ask, 1)
        assert answers[-1][1].events[0] == AllBlocksCleared(), "batch 1 was lost: whoever asks for it gets a snapshot"
        assert len(answers[-1][1].events) == 2


def test_a_publishers_thread_ends_with_it():
    publisher = Publisher(SIZE, ANY, ANY)
    thread, context = publisher.sender.thread, publisher.sender.context
    store(publisher, 1, 2)
    publisher.removed([2])
    publisher.cleared()
    assert len(publisher.events.blocks) == 0
    del publisher
    gc.collect()
    assert not thread.is_alive() and context.closed, "an engine that is dropped must not leave a port behind"


def test_each_start_has_an_id_of_its_own(idle):
    """By it, a subscriber knows that batch 0 is not an old one: the cache is empty again."""
    with closing(Publisher(SIZE, ANY)) as publisher:
        assert publisher.sender.publisher_id != idle.publisher_id


def test_closing_twice_is_harmless():
    publisher = Publisher(SIZE, ANY)
    publisher.close()
    publisher.close()
    store(publisher, 1)


@pytest.mark.parametrize("param", ["kv_events", "kv_events_replay"])
def test_a_port_in_use_is_refused_in_one_sentence(param):
    with sending() as sender:
        places = {"kv_events": (sender.endpoint, None), "kv_events_replay": (ANY, sender.endpoint)}[param]
        with pytest.raises(UserError, match=f"{param} is '{sender.endpoint}', which is in use") as raised:
            Publisher(SIZE, *places)
        assert raised.value.param == param


@pytest.mark.parametrize(
    "endpoint", ["", "5557", "tcp://", "http://127.0.0.1:5557", "tcp://127.0.0.1", "tcp://1.2.3.4:99999"]
)
def test_an_endpoint_that_is_none_is_refused_in_one_sentence(endpoint):
    with pytest.raises(UserError, match=r"give an endpoint such as tcp://127.0.0.1:5557"):
        Publisher(SIZE, endpoint)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (dict(kv_events=""), "kv_events is ''; give an endpoint"),
        (dict(kv_events=5557), "kv_events is 5557; give an endpoint"),
        (dict(kv_events_replay=ANY), "but kv_events is None"),
        (dict(kv_events=ANY, kv_events_format="json"), "kv_events_format is 'json'"),
        (dict(kv_events=ANY, enable_prefix_caching=False), "prefix caching is off"),
    ],
)
def test_options_that_cannot_work_are_refused_in_one_sentence(options, why):
    with pytest.raises(UserError, match=why):
        EngineConfig(**options)


@pytest.mark.ci
def test_an_engine_publishes_what_its_tree_holds():
    """From the option to the index of a router: prompts, answers and evictions of a real engine."""
    index = BlockIndex()
    with LLM(num_blocks=40, block_size=SIZE, kv_events=ANY, kv_events_replay=ANY) as llm:
        cache = llm.engine.scheduler.manager.coordinator.prefixes
        sender = cache.watcher.sender
        with closing(Subscriber(index, "a", sender.endpoint, sender.replay_endpoint)) as subscriber:
            params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
            for number in range(8):
                llm.generate([f"Count from {number} to {number + 9}, please."], params, progress=False)
            assert cache.tree.num_evicted, "a small pool, so that events of both kinds are there"
            stored = {short_hash(one.key) for one in cache.watcher.events.blocks.values()}
            assert len(stored) == cache.tree.num_blocks
            until(lambda: "a" in index.replicas and index.replicas["a"].blocks == stored, lambda: subscriber.read(0.05))
            prompt = llm.tokenizer.encode("Count from 7 to 16, please.")
            keys = hashes_of(block_keys(prompt, None, SIZE))
            assert index.matched("a", keys) == len(keys) > 2, "a router finds the latest prompt by its keys"
    assert not sender.thread.is_alive(), "the sockets are closed with the engine"


def test_replicas_do_not_share_an_endpoint():
    parser = OneLineParser(prog="serve")
    serve.add_arguments(parser)
    with pytest.raises(UserError, match="2 replicas cannot publish at one endpoint"):
        serve.run(parser.parse_args(["--port", "0", "--replicas", "2", "--kv-events", ANY]))


def test_a_missing_library_names_the_extra(monkeypatch):
    libraries.cache_clear()
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(UserError, match=r"kv-course\[events\].*\(zmq is missing\)"):
        Publisher(SIZE, ANY)
    monkeypatch.undo()
    assert libraries()[0] is zmq, "a failure is not remembered"
