"""Course machinery. Suite `ladder`: what each lesson bought, all on the same work and with the same tokens.

    python scripts/bench.py ladder                    # a table
    python scripts/bench.py ladder --plot mine.svg    # and a picture
    python scripts/bench.py ladder --write            # update page, picture and figures in lessons/ladder

Lessons 4, 6 and 7 are not about speed: a second table shows what they cost.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts import ROOT
from scripts.bench.common import Report, Timing, take_turns
from scripts.smoke.arguments import pick_device, pocket_dir

from mini_engine.errors import UserError

FOLDER = ROOT / "lessons" / "ladder"
RUNGS = {
    0: "no cache",
    1: "contiguous",
    2: "token-flat",
    3: "paged, packed",
    5: "continuous batching",
    8: "prefix sharing",
    9: "fast layers",
}
REQUESTS, COMMON, OWN, ANSWER, SHARE = 24, 192, 160, 64, 0.4
GREEDY, SAMPLED, STREAMED, OVER_HTTP = (
    "5 greedy tokens",
    "4 sampling, top-p 0.9",
    "6 text, streamed",
    "7 over HTTP, streamed",
)
QUICK = dict(requests=6, common=32, own=32, answer=12)


def add_arguments(parser) -> None:
    """Add this suite's options."""
    from mini_engine.cli.parser import whole_number

    parser.add_argument("--model", metavar="DIR_OR_HUB_ID", help="a Qwen3 checkpoint (default: the pocket model)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: float32")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--lessons", type=lesson_list, metavar="0,1,…", help="default: all that run here")
    parser.add_argument("--requests", type=whole_number(1), metavar="N", help=f"default: {REQUESTS}")
    parser.add_argument("--write", action="store_true", help="update page, picture and figures in lessons/ladder")


def lesson_list(text: str) -> list[int]:
    """Parse comma-separated lessons of the ladder, in its order (an argparse type)."""
    try:
        lessons = sorted({int(part) for part in text.split(",")})
    except ValueError:
        lessons = []
    if not lessons or not set(lessons) <= set(RUNGS):
        known = ",".join(map(str, RUNGS))
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of the ladder's lessons; give some of {known}")
    return lessons


def resolved(args) -> Path:
    """Return the checkpoint's directory."""
    from mini_engine.checkpoint.weights import resolve_checkpoint

    return resolve_checkpoint(args.model or pocket_dir())


def load_of(args, vocab_size: int):
    """Return the load, a smaller one with --quick."""
    from scripts.bench.rungs import make_load

    sizes = dict(requests=REQUESTS, common=COMMON, own=OWN, answer=ANSWER) | (QUICK if args.quick else {})
    if args.requests:
        sizes["requests"] = args.requests
    return make_load(vocab_size=vocab_size, share=SHARE, **sizes)


def build(lesson: int, model, reload: Callable[[], Any], load) -> Callable[[], Any]:
    """Return a function that runs the load as that lesson does.

    Raises:
        UserError: the lesson is not available or cannot run here.
    """
    from scripts.bench import rungs

    if lesson < 5:
        simple = {0: lambda: rungs.lesson_0(model), 1: lambda: rungs.lesson_1(model, load)}
        simple |= {2: lambda: rungs.lesson_2(model, load), 3: lambda: rungs.lesson_3(model, load)}
        run = simple[lesson]()
    elif lesson == 5:
        from mini_engine.kv.manager import KvCacheManager

        run = rungs.engine_rung(model, load, KvCacheManager)
    else:
        from mini_engine.kv.prefix_cache import caching_manager

        run = rungs.engine_rung(model if lesson == 8 else sped_up(reload()), load, caching_manager)
    return lambda: run(load)


def sped_up(model):
    """Return the model with lesson 9's layers."""
    try:
        from mini_engine.layers import speed_up
    except ImportError as error:
        raise UserError(f"lesson 9 is not available ({error})") from None
    return speed_up(model)


def ready_rungs(args, model, reload, load) -> dict[int, Callable[[], Any]]:
    """Return the lessons that run here. A lesson named on the command line must run."""
    ready = {}
    for lesson in args.lessons or RUNGS:
        try:
            ready[lesson] = build(lesson, model, reload, load)
        except UserError as why:
            if args.lessons:
                raise
            sys.stderr.write(f"left out: lesson {lesson}; {why}\n")
    return ready


def run(args) -> Report:
    """Measure every lesson on the same work.

    Raises:
        UserError: two lessons gave different tokens, so their figures are not comparable.
    """
    from mini_engine.checkpoint.config import DTYPES
    from mini_engine.checkpoint.weights import load_model

    if args.write and (args.quick or args.lessons):
        raise UserError("--write updates the page from a full run; leave out --quick and --lessons")

    def reload():
        return load_model(resolved(args), DTYPES[args.dtype], pick_device(args.device))

    model = reload()
    load = load_of(args, model.config.vocab_size)
    ready = ready_rungs(args, model, reload, load) | (costing(args, model, load) if not args.lessons else {})
    rounds = args.rounds or (1 if args.quick else 3)
    passes = {rung: [] for rung in ready}
    contenders = {rung: lambda rung=rung: passes[rung].append(ready[rung]()) for rung in ready}
    timings = take_turns(contenders, rounds, "ladder")
    check_equal({rung: found for rung, found in passes.items() if rung != SAMPLED})
    per_token = model.config.kv_bytes_per_token(model.dtype)
    rows, before = [], None
    for lesson in [rung for rung in timings if rung in RUNGS]:
        rows.append(row(lesson, timings[lesson], before, passes[lesson][1:], load, per_token))
        before = timings[lesson]
    notes = [
        f"{args.model or 'the pocket model'}, {args.dtype} on {pick_device(args.device)}: {len(load.jobs)} requests "
        f"arriving at once, {load.prompt_tokens} prompt tokens, {load.new_tokens} new tokens; "
        f"a pool of {load.pool_blocks} blocks of 16",
        f"all lessons gave the same {load.new_tokens} tokens; medians of {rounds} interleaved rounds",
    ]
    return Report("ladder", rows, notes, drawn="new tokens/s", more=costs(timings, load, args))


def costing(args, model, load) -> dict[str, Callable[[], Any]]:
    """Return the runs of lessons 4 and 6 on lesson 5's engine, and its greedy run to compare with."""
    from scripts.bench.rungs import offline_rung, text_rung

    from mini_engine.engine.sampling_params import SamplingParams
    from mini_engine.text.tokenizer import Tokenizer

    drawn = SamplingParams(temperature=0.8, top_p=0.9, seed=0)
    ways = {GREEDY: offline_rung(model, load), SAMPLED: offline_rung(model, load, drawn)}
    try:
        ways[STREAMED] = text_rung(model, load, Tokenizer(resolved(args)))
    except UserError as why:
        sys.stderr.write(f"left out: lesson 6; {why}\n")
    return {name: lambda way=way: way(load) for name, way in ways.items()}


def costs(timings: dict, load, args) -> list[dict[str, Any]]:
    """Return the second table, relative to lesson 5's greedy run in the same rounds. HTTP has its own load."""
    rows = [
        {"lesson": name, "new tokens/s": rounded(load.new_tokens / timing.median), "± %": rounded(timing.spread * 100)}
        | {"% left": rounded(100 * timings[GREEDY].median / timing.median)}
        for name, timing in timings.items()
        if name not in RUNGS
    ]
    if rows and not args.quick and args.device == "cpu":
        rows += http_costs(args)
    return rows


def http_costs(args) -> list[dict[str, Any]]:
    """Measure lesson 7 on its own load, as scripts/l7_load.py does."""
    from scripts import l7_load

    try:
        speed, _ = l7_load.measure(argparse.Namespace(model=args.model, requests=50, max_new_tokens=64, rounds=3))
    except ImportError as error:
        sys.stderr.write(f"left out: lesson 7; {error}\n")
        return []
    streamed, offline = speed["HTTP, streamed"], speed["LLM.generate"]
    share = rounded(100 * streamed / offline)
    return [{"lesson": OVER_HTTP, "new tokens/s": rounded(streamed), "± %": None, "% left": share}]


def check_equal(passes: dict[int | str, list]) -> None:
    """Check that all lessons gave the same tokens."""
    first, *others = passes
    for lesson in others:
        for done in passes[lesson]:
            if done.answers != passes[first][0].answers:
                wrong = sum(a != b for a, b in zip(done.answers, passes[first][0].answers, strict=True))
                raise UserError(
                    f"lesson {lesson} answers {wrong} of {len(done.answers)} requests differently from lesson {first}; "
                    "only equal answers are compared (in bfloat16 a near-tie may cause the difference)"
                )


def row(lesson: int, timing: Timing, before: Timing | None, passes: list, load, per_token: int) -> dict[str, Any]:
    """Return a lesson's row: medians over the rounds; figures that do not depend on time come from the last round."""
    from statistics import median

    found = [done.figures(load, per_token) for done in passes]
    last = found[-1]
    return {
        "lesson": f"{lesson} {RUNGS[lesson]}",
        "new tokens/s": rounded(load.new_tokens / timing.median),
        "± %": rounded(timing.spread * 100),
        "× before": rounded(before.median / timing.median) if before else None,
        "first token, s": rounded(median(each["first_token_s"] for each in found)),
        "at once": rounded(last["running"]),
        "KV held, MiB": rounded(last["kv_mib"]),
        "KiB a request": rounded(last["kv_kib_a_request"]),
        "waste %": None if last["waste"] is None else rounded(last["waste"] * 100),
        "prefill tokens": last["prefill_tokens"],
    }


def rounded(value: float) -> float:
    """Round to four significant figures; the rest is noise."""
    return float(f"{value:.4g}")


def draw(report: Report, path: Path) -> None:
    """Draw the ladder as a picture."""
    from scripts.pages.ladder import draw_ladder

    draw_ladder(report.rows, path)


def finish(report: Report, args) -> int:
    """With --write, update the page, the picture and the figures."""
    if args.write:
        from scripts.pages.ladder import write_page

        write_page(report, FOLDER)
        print(f"updated {FOLDER.relative_to(ROOT)}: README.md, ladder.svg, ladder.json")
    return 0
