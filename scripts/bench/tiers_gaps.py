"""Course machinery. For suite `tiers`: the time between tokens while tiers are busy, and while they are idle."""

import os
import time
from argparse import Namespace
from pathlib import Path

from scripts.bench.tiers_engine import BLOCK, Row, make_engine, prompt_of, row, store_of
from scripts.bench.turns import percentile, seconds_of

from mini_engine.engine.engine import Engine
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.tiers.keys import chain
from mini_engine.tiers.records import Record, Wanted

DECODING, BEHIND = 4, 256
GAPS = 20  # decode steps in a row, busy or not
QUEUED = 4  # records waiting to be written, and to be read, while the tiers are busy


def gap_rows(args: Namespace, folder: Path) -> list[Row]:
    """Return the median and the 99th percentile of decode steps with busy tiers, and with idle ones."""
    rounds = args.rounds or (2 if args.quick else 20)
    steps = 2 * rounds * GAPS + BLOCK
    engine = make_engine(args, DECODING * (BEHIND + steps + BLOCK), folder, 2**29)
    params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
    requests = [engine.add_request(f"{i}", prompt_of(engine, BEHIND, i), params) for i in range(DECODING)]
    while any(request.is_prefilling for request in requests):
        engine.step()
    feeder, gaps = Feeder(engine), {"idle": [], "busy": []}
    for _ in range(rounds):
        for name, each in gaps.items():
            for _ in range(GAPS):
                if name == "busy":
                    feeder.feed()
                each.append(seconds_of(engine.step))
            feeder.settle()
    store_of(engine).tiers.close()
    idle, busy = ([percentile(each, part) for part in (50, 99)] for each in gaps.values())
    moved = f"{feeder.written / 1e6:.0f} MB/s written and {feeder.read / 1e6:.0f} MB/s read, "
    return [
        row(f"{DECODING} sequences, p99, {name}", 1e3 * last, idle[1] / last, f"{more}median {1e3 * middle:.0f} ms")
        for name, (middle, last), more in zip(gaps, (idle, busy), ("", moved), strict=True)
    ]


class Feeder:
    """Keeps the tiers' threads busy with records to write and others to prefetch.

    Attributes:
        written, read: bytes per second while it was feeding.
    """

    def __init__(self, engine: Engine) -> None:
        self.store = store_of(engine)
        self.payload = os.urandom(self.store.blocks.payload_bytes)
        self.count = self.num_read = 0
        self.seconds = 0.0
        self.begun: float | None = None

    def record(self, number: int) -> Record:
        tokens = number.to_bytes(4, "little") * BLOCK
        (key,) = chain(b"feeder", tokens, len(tokens))
        return Record(key, b"feeder".ljust(32), tokens, self.payload)

    def feed(self) -> None:
        """Fill both queues up to QUEUED."""
        self.begun = self.begun or time.perf_counter()
        tiers = self.store.tiers
        while tiers.writer.items.unfinished_tasks < QUEUED:
            tiers.writer.offer(self.record(self.count))
            self.count += 1
        while self.num_read < self.count and tiers.reader.items.unfinished_tasks < QUEUED:
            one = self.record(self.num_read)
            tiers.host.clear()
            tiers.prefetch([Wanted(one.key, one.parent, one.tokens, len(self.payload))])
            self.num_read += 1

    def settle(self) -> None:
        """Wait until both threads are idle."""
        self.store.tiers.flush()
        self.store.tiers.reader.flush(30.0)
        if self.begun is not None:
            self.seconds += time.perf_counter() - self.begun
            self.begun = None

    @property
    def written(self) -> float:
        return self.count * len(self.payload) / self.seconds

    @property
    def read(self) -> float:
        return self.num_read * len(self.payload) / self.seconds
