"""Course machinery. Suite `scoreboard`: what pages 7, 9, 15 to 17, 19 and *What models keep* measure, into kept files.

    python scripts/bench.py scoreboard --vllm-python PYTHON --llama-cpp DIR --openvino-python PYTHON
    python scripts/bench.py scoreboard --only 9 serving      pages, suites or files
    python scripts/bench.py scoreboard --quick               some minutes; writes to build/scoreboard
    python -m scripts.pages.check --write                    then puts the tables into the pages

Each suite runs in a process of its own, as its own command does. A file is replaced only by a complete run, at once,
and never by one that lacks an engine of the kept one: such a run goes to build/scoreboard, too. Ctrl-C ends the running
suite and keeps what is complete.
"""

import json
import signal
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Any

from scripts import ROOT
from scripts.bench.common import Report, save_text
from scripts.bench.peer_places import add_places, places_given
from scripts.bench.scoreboard_parts import PARTS, Part, chosen, options_of

BENCH, PAGES, ASIDE = ROOT / "scripts" / "bench.py", ROOT / "lessons", ROOT / "build" / "scoreboard"
KEPT, LACKS, FAILED, STOPPED = "kept", "not kept", "failed", "stopped"
ENDING_SECONDS = 60  # for a suite to end its servers after Ctrl-C
Row = dict[str, Any]


def add_arguments(parser) -> None:
    """Add this suite's options."""
    known = list(dict.fromkeys(name for part in PARTS for name in (str(part.page), part.name, part.suite)))
    parser.add_argument("--only", nargs="+", choices=known, default=[], metavar="PAGE", help=", ".join(known))
    where = "of the files (default: lessons, beside the pages; quick: build/scoreboard)"
    parser.add_argument("--out", type=Path, metavar="DIR", help=where)
    add_places(parser)


def run(args: Namespace) -> Report:
    """Run every part and keep its figures; report the ratios, and what became of each file."""
    parts, out = chosen(args.only, args.quick), (args.out or (ASIDE if args.quick else PAGES)).resolve()
    seconds = sum(part.quick_seconds if args.quick else 60 * part.minutes for part in parts)
    say(f"{len(parts)} runs, some {max(1, round(seconds / 60))} minutes on two cores; files go to {shown(out)}")
    rows: list[Row] = []
    done: list[Row] = []
    for number, part in enumerate(parts, 1):
        where = f"[{number}/{len(parts)}] page {part.page}, {part.name}"
        say(f"{where}: bench.py {' '.join([part.suite, *options_of(part, args.quick)])}")
        begun = time.perf_counter()
        found, state = measured(part, args)
        if found:
            rows += ratios(part, found)
            state = kept(found, out / part.file)
        done.append({"file": part.file, "seconds": round(time.perf_counter() - begun), "what became of it": state})
        say(f"{where}: {state}, {done[-1]['seconds']} s")
        if state == STOPPED:
            break
    note = "quick: fewer rounds and smaller loads, for a first impression" if args.quick else "complete runs"
    return Report("scoreboard", rows, [f"{note}; ÷: ours over the other, in tokens/s"], more=done)


def say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def measured(part: Part, args: Namespace) -> tuple[Row | None, str]:
    """Run a part's suite. Return its report, or None and why there is none."""
    with tempfile.TemporaryDirectory(prefix="scoreboard-") as folder:
        file = Path(folder) / "report.json"
        options = [*options_of(part, args.quick), "--json", str(file)]
        options += ["--rounds", str(args.rounds)] if args.rounds else []
        options += places_for(part, args)
        code = run_to_its_end([sys.executable, str(BENCH), part.suite, *options])
        if code == STOPPED:
            return None, STOPPED
        if code or not file.is_file():
            return None, f"{FAILED} with exit code {code}; its last words are above"
        return json.loads(file.read_text(encoding="utf-8")), KEPT


def places_for(part: Part, args: Namespace) -> list[str]:
    """Return the options that tell a suite where the other engines are."""
    given = places_given(args)
    if part.suite == "serving":
        return given[given.index("--vllm-python") :][:2] if "--vllm-python" in given else []
    return given if part.suite == "peers" else []


def run_to_its_end(command: Sequence[str]) -> int | str:
    """Run a command in a session of its own and return its exit code; or STOPPED after Ctrl-C, once it has ended."""
    process = Popen(command, cwd=ROOT, stdout=DEVNULL, start_new_session=True)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)  # the terminal's own reaches only this process
        try:
            process.wait(ENDING_SECONDS)
        except (TimeoutExpired, KeyboardInterrupt):
            process.kill()
        return STOPPED


# ---------------------------------------------------------------- what is kept


def kept(report: Row, path: Path) -> str:
    """Write a report to its place at once, or aside if it lacks what the kept one has. Return what became of it."""
    text, state = json.dumps(report, indent=1, ensure_ascii=False) + "\n", KEPT
    if why := lacking(report, path):
        path, state = ASIDE / path.parent.name / path.name, f"{LACKS}, {why}; see {shown(ASIDE)}"
    elif not path.is_relative_to(PAGES):
        state = "written"
    partial = path.with_suffix(".partial")
    save_text(partial, text)
    partial.replace(path)
    return state


def lacking(report: Row, path: Path) -> str:
    """Return what a report lacks that the kept one has; "" if nothing."""
    failed = [note for note in report["notes"] if note.startswith("left out from here on")]
    before = contenders(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else set()
    missing = sorted(before - contenders(report))
    return failed[0] if failed else f"without {', '.join(missing)}" if missing else ""


def contenders(report: Row) -> set[str]:
    """Return the names of the engines or servers in a report."""
    return {row[key] for row in report["rows"] for key in ("engine", "server") if key in row}


def ratios(part: Part, report: Row) -> list[Row]:
    """Return a row for each load: our speed, and how many times the others' it is."""
    loads: dict[str, Row] = {}
    for row in report["rows"]:
        if "ours is ×" not in row:
            continue
        name = row.get("engine", row.get("server")).casefold()
        found = loads.setdefault(row["load"], {"load": f"{part.page}: {row['load']}", "ours": None})
        if name == "ours":
            found["ours"] = row["tokens/s"]
        found |= {f"÷ {other}": found.get(f"÷ {other}") for other in ("vllm", "llama.cpp", "openvino")}
        if f"÷ {name}" in found:
            found[f"÷ {name}"] = row["ours is ×"]
    return list(loads.values())


def finish(report: Report, args: Namespace) -> int:
    """Return 130 after Ctrl-C, 1 if a run failed, 0 otherwise."""
    states = [row["what became of it"] for row in report.more]
    return 130 if STOPPED in states else int(any(state.startswith(FAILED) for state in states))
