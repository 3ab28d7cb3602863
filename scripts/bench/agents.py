"""Lesson 20. Suite `agents`: hits and first tokens of eviction policies under agents; most of it simulated.

    sessions     by the number of agents that work at the same time, in one pool
    collapse     where each policy finds half of what the oracle finds
    knowledge    what the queue brings, and what references do
    mooncake     on a recorded trace (--trace FILE)
    neighbours   what a client can take from others that never closes its sessions, or opens any number of them
    engine       turns beside a crowd on the running engine, with the pocket model
    cost         microseconds a block, on the real tree
    routing      routers that follow events, and routers that guess
    events       microseconds a block of an event

A part is a function in one of this folder's modules `agents_*.py`; `PARTS` lists them. `--keep` writes the figures
of the parts that ran to the lesson's agents.json, from which its page has its tables.
"""

import argparse
import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from scripts import ROOT
from scripts.bench.agents_cost import cost
from scripts.bench.agents_engine import engine
from scripts.bench.agents_events import events, routing
from scripts.bench.agents_knowledge import knowledge
from scripts.bench.agents_load import collapse, sessions
from scripts.bench.agents_mooncake import mooncake
from scripts.bench.agents_neighbours import neighbours
from scripts.bench.common import Report, save_text

from lessons.l20_agents.compare import Row

KEPT = ROOT / "lessons" / "l20_agents" / "agents.json"
Part = Callable[[Namespace], tuple[list[Row], str]]  # returns its rows, and a sentence about what was measured
PARTS: dict[str, Part] = {
    "sessions": sessions,
    "collapse": collapse,
    "knowledge": knowledge,
    "mooncake": mooncake,
    "neighbours": neighbours,
    "engine": engine,
    "cost": cost,
    "routing": routing,
    "events": events,
}


def add_arguments(parser) -> None:
    """Add this suite's options."""
    parser.add_argument(
        "--parts", type=parts, default=list(PARTS), metavar="PART,…", help=f"some of {','.join(PARTS)} (default: all)"
    )
    parser.add_argument("--trace", type=Path, nargs="+", metavar="FILE", help="traces as Mooncake's JSON lines")
    parser.add_argument("--keep", action="store_true", help=f"write the figures to {KEPT.relative_to(ROOT)}")


def parts(text: str) -> list[str]:
    """Parse names of parts (an argparse type)."""
    names = text.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not a part; give some of {','.join(PARTS)}")
    return names


def run(args: Namespace) -> Report:
    """Run the chosen parts, one after another."""
    args.seeds = 1 if args.quick else 3
    args.found = {name: PARTS[name](args) for name in args.parts}
    rows = [{"part": name} | row for name, (rows, _) in args.found.items() for row in rows]
    return Report("agents", rows, [f"{name}: {said}" for name, (_, said) in args.found.items()])


def finish(report: Report, args: Namespace) -> int:
    """Keep the figures of the parts that ran, beside those of the others."""
    if args.keep:
        kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.is_file() else {}
        for name, (rows, said) in args.found.items():
            kept[name] = {"rows": rows, "note": said, "machine": report.machine}
        save_text(KEPT, json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    return 0
