"""Course machinery. For suite `tiers`: what saving a prompt's blocks costs its steps, within them or beside them."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from statistics import mean

from scripts.bench.tiers_engine import BLOCK, Row, make_engine, prompt_of, row, row_of, store_of
from scripts.bench.turns import Timing, gather_turns, seconds_of, synchronized, take_turns

from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.kv.cache_coordinator import cache_of
from mini_engine.kv.connector import NO_CONNECTOR, KvConnector
from mini_engine.tiers.background import Background
from mini_engine.tiers.blocks import BlockBytes
from mini_engine.tiers.copies import BesideSteps
from mini_engine.tiers.store import Blocks, Keep, Reader

CHUNK, CHUNKS = 512, 4  # tokens of a step, and steps of a prompt


class InThread(Reader):
    """Reads blocks beside the steps on a CPU. That is right only as long as none of them is handed out again."""

    def __init__(self, blocks: Blocks) -> None:
        super().__init__(blocks)
        self.copier: Background[Callable[[], None]] = Background("bench-copier", lambda work: work(), 4 * CHUNKS)

    def read(self, blocks: Sequence[int], keep: Keep) -> None:
        """Leave it to the thread."""
        blocks = list(blocks)
        self.copier.offer(lambda: keep(self.blocks.read(blocks)))


class Timed(Reader):
    """Reads blocks within the step. seconds: what each call took."""

    def __init__(self, blocks: Blocks) -> None:
        super().__init__(blocks)
        self.seconds: list[float] = []

    def read(self, blocks: Sequence[int], keep: Keep) -> None:
        """Read blocks and hand their payloads to `keep`."""
        self.seconds.append(seconds_of(partial(super().read, blocks, keep)))


def save_rows(args: Namespace, folder: Path) -> list[Row]:
    """Return the time of a prompt's steps without tiers, with blocks read within the steps, and beside them.

    On a GPU that is what the engine does. On a CPU it is a thread.
    """
    engine = make_engine(args, 2 * CHUNKS * CHUNK, None, 2**31)
    cache, store = cache_of(engine.scheduler.manager), store_of(engine)
    connector = cache.connector
    timed, opened = Timed(store.blocks), store.reader
    beside = opened if isinstance(opened, BesideSteps) else InThread(store.blocks)
    ways: dict[str, tuple[KvConnector, Reader]] = {
        "without tiers": (NO_CONNECTOR, timed),
        "read within the step": (connector, timed),
        "read beside the steps": (connector, beside),
    }
    rounds, seeds = args.rounds or (1 if args.quick else 10), count()

    def seconds_a_step(way: tuple[KvConnector, Reader]) -> float:
        cache.connector, store.reader = way
        engine.add_request("prompt", prompt_of(engine, CHUNK * CHUNKS, next(seeds)), SamplingParams(max_tokens=1))
        seconds = []
        while engine.has_unfinished:
            seconds.append(seconds_of(engine.step))
        beside.copier.flush(60.0)
        cache.prefixes.clear()
        store.tiers.host.clear()
        return mean(seconds)  # on a GPU only the last one waits for the others

    steps = gather_turns({name: partial(seconds_a_step, way) for name, way in ways.items()}, rounds, "saves")
    beside.copier.close(0.0)
    store.tiers.close()
    reads = Timing(timed.seconds)
    return [
        *[row_of(f"{CHUNK} tokens, {name}", timing, steps["without tiers"]) for name, timing in steps.items()],
        row(f"{CHUNK // BLOCK} blocks, read in that step", 1e3 * reads.median, None, f"± {100 * reads.spread:.0f} %"),
    ]


def copy_rows(args: Namespace, folder: Path) -> list[Row]:
    """Return the time of copies of a step's blocks: one by one, with one gather of all, and back into the pool."""
    engine = make_engine(args, 2 * CHUNK, None, 2**30)
    blocks, chosen = store_of(engine).blocks, list(range(CHUNK // BLOCK, 0, -1))
    assert isinstance(blocks, BlockBytes)
    payloads = blocks.read(chosen)
    contenders = {
        "gathered": lambda: blocks.gather(chosen, blocks.empty(len(chosen))),
        "read one by one": partial(blocks.read, chosen),
        "written back": partial(blocks.write, chosen, payloads),
    }
    contenders = {name: synchronized(run, args.device) for name, run in contenders.items()}
    timings = take_turns(contenders, 3 if args.quick else 50, "copies")
    store_of(engine).tiers.close()
    return [row_of(f"{len(chosen)} blocks, {name}", timing, timings["gathered"]) for name, timing in timings.items()]
