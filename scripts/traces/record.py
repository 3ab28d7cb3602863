"""Course machinery. Runs the engine on the pocket model and records the traces that the website's players replay.

Each trace is a script in a lesson's folder, with a picture beside it for places where scripts do not run. The players'
own views draw the pictures, in Chromium; without it the pictures stay unchanged.
"""

import sys
from importlib import import_module
from pathlib import Path

import scripts.smoke  # noqa: F401 (before torch, so that its threads sleep while they wait)
from scripts import ROOT
from scripts.traces.tape import Tape

from mini_engine.cli.parser import OneLineParser, guard

LESSONS = ROOT / "lessons"
RECORDERS = {  # a trace's name to its module and class
    "l0-work": "work.Work",
    "l1-reserved": "reserved.Reserved",
    "l2-pool": "pool.Pool",
    "l3-tables": "tables.Tables",
    "l3-walk": "walk.Walk",
    "l4-logits": "logits.Logits",
    "l5-timeline": "timeline.Timeline",
    "l6-bytes": "text_bytes.TextBytes",
    "l7-mailboxes": "mailboxes.Mailboxes",
    "l8-tree": "tree.Chats",
    "l8-prompts": "prompts.Prompts",
    "l9-packing": "packing.Packing",
    "l9-gaps": "gaps.Gaps",
    "l10-capture": "capture.Captured",
    "l11-states": "states.States",
    "l12-tiers": "tiers.Tiers",
    "l13-replicas": "replicas.Replicas",
    "l14-guesses": "guesses.Guesses",
    "l15-windows": "windows.Windows",
    "l16-latents": "latents.Latents",
    "l17-bits": "bits.Bits",
    "l18-ranks": "ranks.Ranks",
    "l19-handover": "handover.Handover",
    "l20-agents": "agents.Agents",
    "engine": "engine_walk.EngineWalk",
}


def new_tape(name: str) -> Tape:
    """Return the recorder of a trace, an empty tape. Only its own module is imported: one may need an extra."""
    module, _, recorder = RECORDERS[name].partition(".")
    return getattr(import_module(f"scripts.traces.{module}"), recorder)()


def record(name: str) -> Tape:
    """Run the engine and record a trace."""
    tape = new_tape(name)
    tape.record()
    return tape


def record_whatever_happens(name: str) -> Tape:
    """Record code that may be wrong. If it fails, the trace ends there and says why.

    Raises:
        Exception: it failed before the first frame.
    """
    tape = new_tape(name)
    try:
        tape.record()
    except Exception as error:
        if not tape.frames:
            raise
        tape.stopped(error)
    return tape


def path_of(tape: Tape) -> Path:
    return LESSONS / tape.file


def run(args) -> int:
    from scripts.traces.pictures import draw_all, is_current

    names = args.only or list(RECORDERS)
    if args.to:
        for tape in map(record_whatever_happens, names):
            (args.to / Path(tape.file).name).write_text(tape.text, encoding="utf-8", newline="\n")
        return 0
    tapes = [record(name) for name in names]
    if args.check:
        old = [path_of(tape).name for tape in tapes if not is_current(path_of(tape), tape)]
        print(
            f"out of date: {', '.join(old)}; record again"
            if old
            else f"{len(tapes)} traces match what this engine does"
        )
        return 1 if old else 0
    for tape in tapes:
        path_of(tape).write_text(tape.text, encoding="utf-8", newline="\n")
        print(f"wrote {path_of(tape).relative_to(ROOT)}: {len(tape.frames)} frames, {len(tape.text.encode())} bytes")
    return draw_all(tapes, LESSONS)


def main(argv=None) -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=list(RECORDERS), metavar="NAME", help=", ".join(RECORDERS))
    parser.add_argument(
        "--to", type=Path, metavar="DIR", help="write only the traces, to DIR, even if the recorded code fails"
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if a trace or picture is out of date"
    )
    return guard(parser, run, argv)


if __name__ == "__main__":
    sys.exit(main())
