"""Lesson 5. Runs a few requests through a small pool and draws who computed what in which step, as an SVG file.

Answers have fixed lengths here, so the picture depends on the scheduler alone and is the same on every machine.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from smoke_common import REPO, OneLineParser, guard

PICTURE = REPO / "lessons" / "l5_scheduler" / "timeline.svg"
BLOCKS, BLOCK_SIZE, BUDGET = 9, 4, 8


@dataclass(frozen=True)
class Job:
    """A request of the picture: when it comes, how long its prompt is, how many tokens it wants."""

    name: str
    arrival: int
    prompt: int
    answer: int


JOBS = (Job("A", 0, 6, 11), Job("B", 0, 3, 9), Job("C", 2, 15, 4), Job("D", 3, 4, 5), Job("E", 9, 5, 4))


@dataclass(frozen=True)
class Cell:
    """What a request did in a step. kind: prefill, decode, again (after a preemption), waits, out (just preempted)."""

    kind: str
    tokens: int = 0


@dataclass(frozen=True)
class Column:
    """One step: each request's cell, and the blocks that were held and free in it."""

    cells: dict[str, Cell]
    held: int


class Recorder:
    """A runner that notes each step it is asked to run."""

    def __init__(self, engine) -> None:
        self.engine, self.runner = engine, engine.runner
        self.columns: list[Column] = []
        self.preempted: dict[str, int] = {}

    def run(self, chunks):
        scheduler = self.engine.scheduler
        cells = {}
        for request in scheduler.waiting:
            out = request.num_preemptions > self.preempted.get(request.id, 0)
            cells[request.id] = Cell("out" if out else "waits")
            self.preempted[request.id] = request.num_preemptions
        for chunk in chunks:
            prefill = "again" if chunk.request.num_preemptions else "prefill"
            kind = prefill if chunk.request.is_prefilling else "decode"
            cells[chunk.request.id] = Cell(kind, chunk.stop - chunk.start)
        self.columns.append(Column(cells, scheduler.manager.blocks_by_state.held))
        return self.runner.run(chunks)


def record() -> list[Column]:
    """Run the jobs on the pocket model and note each step."""
    from mini_engine.engine.engine import Engine
    from mini_engine.engine.sampling_params import SamplingParams
    from mini_engine.engine.scheduler import SchedulerConfig
    from mini_engine.kv.manager import KvCacheManager
    from mini_engine.pocket import POCKET_DIR
    from mini_engine.weights import load_model

    limits = SchedulerConfig(max_running=4, max_batch_tokens=BUDGET, headroom=0)
    engine = Engine.for_model(
        load_model(POCKET_DIR),
        num_blocks=BLOCKS + 1,
        block_size=BLOCK_SIZE,
        kernel="torch",
        limits=limits,
        manager=KvCacheManager,
    )
    recorder = engine.runner = Recorder(engine)
    coming = sorted(JOBS, key=lambda job: job.arrival)
    while engine.has_unfinished or coming:
        while coming and coming[0].arrival == len(recorder.columns):
            job = coming.pop(0)
            params = SamplingParams(temperature=0, max_tokens=job.answer, ignore_eos=True)
            engine.add_request(job.name, [65 + i for i in range(job.prompt)], params)
        engine.step()
    return recorder.columns


LEFT, TOP, WIDE, HIGH = 96, 62, 36, 34
STYLE = """
    .prefill { fill: #cfe3ff; stroke: #3b7ddd } .decode { fill: #ffe0bd; stroke: #d9822b }
    .again { fill: #e4d7f7; stroke: #8250c4 } .waits { fill: none; stroke: #b9c1cc; stroke-dasharray: 3 3 }
    .out { fill: none; stroke: #c2185b; stroke-width: 2 } .held { fill: #9fb0cd } .pool { fill: #e6ecf7 }
    .ink { fill: #1d2633 } .soft { fill: #59667a } .mark { fill: #c2185b } .page { fill: #ffffff }
    @media (prefers-color-scheme: dark) {
      .prefill { fill: #173a68; stroke: #6aa5f5 } .decode { fill: #5c3711; stroke: #efa34f }
      .again { fill: #3d2a5c; stroke: #b794f0 } .waits { stroke: #566272 } .out { stroke: #ff7eb0 }
      .held { fill: #4d6285 } .pool { fill: #1f2630 } .ink { fill: #e8edf4 } .soft { fill: #9eabbd }
      .mark { fill: #ff7eb0 } .page { fill: #161b22 }
    }"""
LEGEND = (
    ("prefill", "prompt, a chunk"),
    ("decode", "decode, one token"),
    ("again", "computed again"),
    ("waits", "waits"),
    ("out", "preempted"),
)


def text(x: float, y: float, words: object, style: str = "ink", anchor: str = "middle", size: int = 13) -> str:
    return f'  <text class="{style}" x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}">{words}</text>'


def box(x: float, y: float, wide: float, high: float, style: str, corner: int = 4) -> str:
    return f'  <rect class="{style}" x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" rx="{corner}"/>'


def draw(columns: list[Column]) -> str:
    """The picture: a row for each request, a column for each step, and below them tokens and blocks of the step."""
    names = [job.name for job in JOBS]
    wide, high = LEFT + WIDE * len(columns) + 14, TOP + HIGH * len(names) + 118
    parts = [box(0, 0, wide, high, "page", 8), text(LEFT - 12, TOP - 10, "step", "soft", "end", 12)]
    for job, y in zip(JOBS, rows(len(names)), strict=True):
        parts.append(text(14, y + 15, job.name, anchor="start", size=15))
        parts.append(text(30, y + 15, f"{job.prompt} + {job.answer}", "soft", "start", 12))
    for step, column in enumerate(columns):
        parts += draw_step(step, column, names)
    bottom = TOP + HIGH * len(names)
    parts.append(text(LEFT - 12, bottom + 18, "tokens", "soft", "end", 12))
    parts.append(text(LEFT - 12, bottom + 50, f"blocks of {BLOCKS}", "soft", "end", 12))
    for i, (kind, words) in enumerate(LEGEND):
        x = LEFT + 146 * i
        parts += [box(x, high - 30, 18, 18, kind), text(x + 25, high - 16, words, "soft", "start", 12)]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {high:g}" font-family="system-ui, sans-serif" '
        f'role="img" aria-label="Which request computes how many tokens in each of {len(columns)} steps">'
    )
    title = text(
        14, 26, f"Five requests, {BUDGET} tokens a step, {BLOCKS} blocks of {BLOCK_SIZE}", anchor="start", size=15
    )
    return "\n".join([head, f"  <style>{STYLE}\n  </style>", *parts[:1], title, *parts[1:], "</svg>", ""])


def rows(count: int) -> list[float]:
    return [TOP + HIGH * i + 4 for i in range(count)]


def draw_step(step: int, column: Column, names: list[str]) -> list[str]:
    """One column."""
    x = LEFT + WIDE * step
    parts = [text(x + WIDE / 2, TOP - 10, step, "soft", size=12)]
    for name, y in zip(names, rows(len(names)), strict=True):
        if cell := column.cells.get(name):
            parts.append(box(x + 2, y, WIDE - 4, HIGH - 8, cell.kind))
            label = cell.tokens or ("×" if cell.kind == "out" else "")
            parts += [text(x + WIDE / 2, y + 18, label, "mark" if cell.kind == "out" else "ink")] if label else []
    bottom = TOP + HIGH * len(names)
    total = sum(cell.tokens for cell in column.cells.values())
    full = 24 * column.held / BLOCKS
    return [
        *parts,
        text(x + WIDE / 2, bottom + 18, total, "soft", size=12),
        box(x + 6, bottom + 32, WIDE - 12, 24, "pool", 2),
        box(x + 6, bottom + 56 - full, WIDE - 12, full, "held", 2),
        text(x + WIDE / 2, bottom + 49, column.held, size=12),
    ]


def run(args) -> int:
    picture = draw(record())
    if args.check:
        same = args.output.is_file() and args.output.read_text(encoding="utf-8") == picture
        print(f"{args.output.name} is {'what this engine does' if same else 'out of date: run this without --check'}")
        return 0 if same else 1
    args.output.write_text(picture, encoding="utf-8", newline="\n")
    print(f"wrote {args.output}")
    return 0


def main(argv=None) -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=PICTURE, metavar="FILE", help="default: the lesson's picture")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the file is out of date")
    return guard(parser, run, argv)


if __name__ == "__main__":
    sys.exit(main())
