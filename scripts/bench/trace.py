"""Lesson 12. Suite `trace`: the share of a trace's blocks that is found, by eviction policy and capacity.

No model runs: blocks of 512 tokens pass through lesson 8's tree, with each of its policies, and through lesson 12's
host tier, which has no tree. A block counts as found if all blocks before it are found as well.
"""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from scripts.bench.common import Report
from scripts.bench.traffic import Chats, Requests
from scripts.bench.turns import with_progress

from lessons.l20_agents.traces import TRACE_BLOCK, read_lines
from mini_engine.kv.eviction import POLICIES
from mini_engine.kv.radix import RadixTree
from mini_engine.tiers.host import HostTier
from mini_engine.tiers.records import Record

CAPACITIES = (1_000, 3_000, 10_000, 30_000, 100_000)
TIER = "tier"


def add_arguments(parser) -> None:
    """Add this suite's options."""
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="a trace as JSON lines (default: generated requests)"
    )


def run(args: Namespace) -> Report:
    """Return one row per capacity, one column per policy."""
    requests = [line["hash_ids"] for line in read_lines(args.trace)] if args.trace else Chats().generate()
    if args.quick:
        requests = requests[:2_000]
    total = sum(map(len, requests))
    rows = []
    for capacity in with_progress([*CAPACITIES, None], "capacities"):
        found = {name: 100 * caches(capacity)[name](requests) / total for name in (*POLICIES, TIER)}
        rows.append({"blocks": f"{capacity:,}" if capacity else "no limit"} | {f"{n} %": f for n, f in found.items()})
    note = (
        f"{args.trace.name if args.trace else 'generated requests'}: {len(requests):,} requests, {total:,} blocks of "
        f"{TRACE_BLOCK} tokens, {len(set().union(*requests)):,} different ones"
    )
    return Report("trace", rows, [note])


def caches(capacity: int | None) -> dict[str, Callable[[Requests], int]]:
    """Return a run for each policy of the tree, and one for the tier; each counts the blocks that it finds."""
    found = {name: lambda requests, make=make: in_tree(requests, capacity, make()) for name, make in POLICIES.items()}
    return found | {TIER: lambda requests: in_tier(requests, capacity)}


def in_tree(requests: Requests, capacity: int | None, policy) -> int:
    """Count the blocks that lesson 8's tree finds. A block's id stands for its tokens."""
    tree, found = RadixTree(1, None, capacity, policy), 0
    for ids in requests:
        found += tree.match(ids).num_tokens
        tree.insert(ids, ids)
    return found


def in_tier(requests: Requests, capacity: int | None) -> int:
    """Count the blocks that lesson 12's host tier finds."""
    tier, found = HostTier((capacity or 10**9) * record(0).num_bytes), 0
    for ids in requests:
        keys = [key_of(one) for one in ids]
        held = next((index for index, key in enumerate(keys) if tier.get(key) is None), len(keys))
        found += held
        for one in ids[held:]:
            tier.put(record(one))
    return found


def record(block: int) -> Record:
    return Record(key_of(block), b"", b"", b"")


def key_of(block: int) -> bytes:
    return block.to_bytes(32, "little")
