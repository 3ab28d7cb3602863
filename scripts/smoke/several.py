"""Course machinery. Compares the paths of one lesson with Hugging Face: other layers, chunks, caches, processes."""

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from scripts.smoke.arguments import with_prompts
from scripts.smoke.report import Report
from scripts.smoke.run import LeftOut, Outcome, Path, compare, quiet_hugging_face, tell
from scripts.smoke.trial import Opened, Trial

from mini_engine.cli.parser import guard

FIGURES = ("restored_tokens", "speculation")  # reported for each path


def run_paths(
    lesson: int,
    trial: type[Trial],
    paths: Mapping[str, Path],
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None = None,
    prompts: Sequence[str] = (),
    more: Mapping[str, Path] | None = None,
) -> int:
    """Run every path on the same prompts and report. Return 0 if all tokens are equal, otherwise 1.

    Args:
        trial: the lesson's own, which makes its engines.
        paths: by name. The first is reported in full; the others return a LeftOut if this machine cannot run them.
        prompts: by default. more: the paths that `--all` adds.
    """

    def work(args: argparse.Namespace) -> int:
        (first, path), *others = {**paths, **(more if more and args.all else {})}.items()
        with ExitStack() as stack:
            opened = Opened(stack)

            def generate(model, prompts, args) -> Any:  # the first path is never left out
                return path(trial(first, args, prompts, opened, model))

            report = compare(lesson, generate, args)
            report.kv |= {figure: {first: report.kv[figure]} for figure in FIGURES if figure in report.kv}
            report.kv |= {"equal": {first: sum(request.match for request in report.requests)}, "left_out": {}}
            ids = [request.prompt_ids for request in report.requests]
            for name, other in others:
                add_path(report, name, other(trial(name, args, ids, opened)), args.dtype)
        report.match = report.match and not report.faults
        return tell(report, args)

    quiet_hugging_face()
    return guard(parser, work, with_prompts(argv, parser, prompts))


def add_path(report: Report, name: str, outcome: Outcome | LeftOut, dtype: str) -> None:
    """Add one path's result to the report."""
    if isinstance(outcome, str):
        report.kv["left_out"][name] = outcome
        return
    expected = outcome.expected or [request.hf for request in report.requests]
    unequal = [i for i, answer in enumerate(expected) if outcome.outputs[i] != answer]
    report.kv["equal"][name] = len(report.requests) - len(unequal)
    for figure in FIGURES:
        if figure in outcome.kv:
            report.kv.setdefault(figure, {})[name] = outcome.kv[figure]
    report.faults += [f"{name}: {error}" for error in outcome.faults]
    report.not_exercised += [f"{name}: {line}" for line in outcome.not_exercised]
    if unequal and dtype == "float32":  # in half precision another order of additions may decide a near-tie
        whose = "those expected" if outcome.expected else "Hugging Face's"
        report.faults.append(f"{name}: answers {unequal} differ from {whose}")
