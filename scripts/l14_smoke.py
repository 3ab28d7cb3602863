"""Lesson 14. Runs prompts with speculation, at several k and with every kind of step."""

import sys
from functools import partial

from scripts.l9_smoke import if_it_runs
from scripts.pocket.chats import TURN_END, ask
from scripts.pocket.prompts import COURSE_PROMPTS, RECITED
from scripts.smoke.arguments import make_parser
from scripts.smoke.paths import alone, batched, if_possible, preempted
from scripts.smoke.run import Outcome
from scripts.smoke.several import run_paths
from scripts.smoke.trial import Trial

from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.speculation.options import Speculation

SMALL = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=12, chunked_prefill_size=5)


def asked_twice(question: str) -> str:
    """Return a conversation that repeats a question whose answer the pocket model knows by heart."""
    return f"{ask(question)}{RECITED[question]}{TURN_END}\n{ask(question)}"


PROMPTS = (  # their answers repeat something, but for the last one, a story
    *map(asked_twice, RECITED),
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12.\n1, 2, 3, 4, 5,",
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday. Monday, Tuesday,",
    "1 times 7 is 7. 2 times 7 is 14. 3 times 7 is 21. 4 times 7 is 28.",
    COURSE_PROMPTS[20],
)


class Guessing(Trial):
    """An engine that guesses up to k tokens. Each path reports what became of them, counted for each request."""

    room = 1

    def engine(self, k: int = 8, use_tree: bool = False, **options):
        guess = Speculation(k, max_rows=2**20, use_tree=use_tree)  # however many requests decode
        return super().engine(speculate=guess, **options)

    def outcome(self, engine, requests) -> Outcome:
        done, steps = super().outcome(engine, requests), self.summary
        figures = {"drafts": steps.num_drafted, "accepted": steps.num_accepted, "decode_steps": steps.decode_tokens}
        done.kv["speculation"] = figures | {"steps_saved": steps.num_accepted}
        return done.exercising(steps.num_accepted, "no guess was accepted")


def cached(trial: Guessing) -> Outcome:
    """Run all prompts twice: the second time after cached prefixes, with the tree's continuations as guesses."""
    engine = trial.engine(use_tree=True)
    trial.ask(engine)
    before, done = trial.summary.num_accepted, trial.run(engine)
    return done.exercising(trial.summary.num_accepted >= before, "guesses from the tree saved fewer steps than none")


PATHS = {"batched": batched, **{f"k={k}": partial(batched, k=k) for k in (1, 2, 3, 5, 8)}}
PATHS |= {"alone": alone, "chunked": partial(batched, scheduler_config=SMALL)}
TIGHT = dict(tight=True, enable_prefix_caching=False, scheduler_config=SchedulerConfig(watermark=0.0))
PATHS |= {"preempted": partial(preempted, preempt=False, **TIGHT), "cached": cached}
PATHS |= {f"layers {name}": partial(if_it_runs, name, backend=name) for name in ("torch", "packed")}
PATHS |= {f"kernel {name}": partial(if_possible, kernel=name) for name in ("reference", "torch")}
PATHS["kernel cpu"] = partial(if_it_runs, "packed", kernel="cpu")
arguments = partial(make_parser, __doc__, block_size=8)


def main(argv=None) -> int:
    return run_paths(14, Guessing, PATHS, arguments(), argv, PROMPTS)


if __name__ == "__main__":
    sys.exit(main())
