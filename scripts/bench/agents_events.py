"""Lesson 20. Parts `routing` and `events` of the suite `agents`: what a router gains by events, and what they cost."""

from argparse import Namespace
from array import array
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from time import perf_counter

from scripts.bench.turns import with_progress

from lessons.l20_agents.agents import Load
from lessons.l20_agents.compare import Row, percentile
from lessons.l20_agents.routing import POLICIES, RoutedReplay, Setting
from mini_engine.agents.events import EventBatch, EventLog
from mini_engine.agents.index import BlockIndex, hashes_of
from mini_engine.agents.wire import decode, encode
from mini_engine.distributed.routing.keys import block_keys
from mini_engine.kv.prefixes import Stored

AGENTS, BLOCKS = 24, 2048  # of four replicas: each pool holds a fraction of its agents' histories
SETTING = Setting(num_replicas=4, num_blocks=BLOCKS)
CASES = {
    "one router": SETTING,
    "caches lost every 5 minutes": replace(SETTING, restarts=tuple(range(300, 3600, 300))),
    "two routers": replace(SETTING, num_routers=2),
    "four routers": replace(SETTING, num_routers=4),
}
BLOCK_SIZE, CHUNK, NUM_BLOCKS = 16, 32, 4096  # tokens in a block, blocks stored in a step, blocks in all
ROUNDS = 20


def routing(args: Namespace) -> tuple[list[Row], str]:
    """Return a row for each case and policy: medians over the seeds."""
    load = Load(agents=AGENTS, sessions=1 if args.quick else 2)
    todo = [(case, name) for case in CASES for name in POLICIES]
    rows = []
    for case, name in with_progress(todo, "routers"):
        found = [routed(load, case, name, seed) for seed in range(args.seeds)]
        rows.append(
            {"case": case, "router": name} | {column: median(row[column] for row in found) for column in found[0]}
        )
    said = f"{SETTING.num_replicas} replicas of {BLOCKS:,} blocks, {AGENTS} agents and a crowd, beta {SETTING.beta:g}"
    return rows, f"{said}; {args.seeds} generated traces; simulated; hits are those of the agents' turns"


def routed(load: Load, case: str, name: str, seed: int) -> Row:
    """Return the figures of one run."""
    replay = RoutedReplay(load.generate(seed), POLICIES[name], CASES[case])
    outcome = replay.run()
    waits = outcome.waits("agents")
    return {
        "hits %": 100 * outcome.hit_rate("agents"),
        "first token p50 s": percentile(waits, 50),
        "p99 s": percentile(waits, 99),
        "max / mean load": replay.imbalance,
    }


def events(args: Namespace) -> tuple[list[Row], str]:
    """Return microseconds a block of each step of an event's way, the median of several rounds."""
    rounds = [costs() for _ in range(3 if args.quick else ROUNDS)]
    rows = [{"step": step, "µs a block": median(one[step] for one in rounds)} for step in rounds[0]]
    payload = encode(EventBatch(0.0, filled(EventLog(BLOCK_SIZE)).take(), 0, bytes(16)))
    said = f"blocks of {BLOCK_SIZE} tokens, {CHUNK} stored and {CHUNK} removed at a time, {NUM_BLOCKS} in all"
    return rows, f"{said}; {len(payload) / NUM_BLOCKS:.0f} bytes a stored block as msgpack"


def filled(log: EventLog) -> EventLog:
    """Return the log after it was told of a long text, step by step."""
    key = array("I", range(BLOCK_SIZE * NUM_BLOCKS)).tobytes()
    blocks = list(range(1, NUM_BLOCKS + 1))
    for stop in range(CHUNK, NUM_BLOCKS + 1, CHUNK):
        log.stored(Stored(key[: stop * log.width], None, blocks[:stop], stop - CHUNK))
    return log


def costs() -> dict[str, float]:
    """Measure each step once, for NUM_BLOCKS blocks."""
    log, index, taken = EventLog(BLOCK_SIZE), BlockIndex[int](), []
    prompt = list(range(BLOCK_SIZE * NUM_BLOCKS))
    found = {"stored (engine's thread)": timed(lambda: filled(log))}
    stored = EventBatch(0.0, log.take(), 0, bytes(16))
    found["removed (engine's thread)"] = timed(lambda: empty(log))
    removed = EventBatch(0.0, log.take(), 0, bytes(16))
    found["encode (sender's thread)"] = timed(lambda: taken.append(encode(stored)))
    found["decode (router)"] = timed(lambda: taken.append(decode(taken[0])))
    found["apply stored (router)"] = timed(lambda: index.apply(0, 0, taken[1]))
    found["keys of a prompt (router)"] = timed(lambda: taken.append(hashes_of(block_keys(prompt, None, BLOCK_SIZE))))
    found["matched (router, each replica)"] = timed(lambda: index.matched(0, taken[2]))
    found["apply removed (router)"] = timed(lambda: index.apply(0, 1, removed))
    return found


def empty(log: EventLog) -> None:
    """Tell the log that all blocks leave, the end of the text first."""
    for stop in range(NUM_BLOCKS, 0, -CHUNK):
        log.removed(list(range(stop, stop - CHUNK, -1)))


def timed(work: Callable[[], object]) -> float:
    """Return the microseconds a block that `work` takes."""
    begin = perf_counter()
    work()
    return 1e6 * (perf_counter() - begin) / NUM_BLOCKS
