"""Course machinery. Compares several paths through one lesson with Hugging Face: other layers, replayed steps."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scripts.smoke.arguments import load_ours
from scripts.smoke.report import Report
from scripts.smoke.run import Generate, Outcome, compare, quiet_hugging_face, tell
from scripts.smoke.steps import run_out

from mini_engine.cli.parser import guard
from mini_engine.engine.engine import Engine
from mini_engine.engine.request import Request
from mini_engine.engine.sampling_params import SamplingParams

LeftOut = str  # the reason a path cannot run on this machine
Path = Callable[[Any, list[list[int]], argparse.Namespace], Outcome | LeftOut]


def run_several(
    lesson: int,
    first: tuple[str, Generate],
    others: Mapping[str, Path],
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None = None,
) -> int:
    """Run every path on the same prompts and report. Return 0 if all tokens are equal, otherwise 1.

    Args:
        first: the name and function of the path that is reported in full.
        others: the other paths. Each gets its own model, and returns a LeftOut if this machine cannot run it.
    """

    def work(args: argparse.Namespace) -> int:
        report = compare(lesson, first[1], args)
        report.kv |= {"equal": {first[0]: sum(request.match for request in report.requests)}, "left_out": {}}
        for name, path in others.items():
            add_path(report, name, path(*load_ours(args), args), args.dtype)
        report.match = report.match and not report.faults
        return tell(report, args)

    quiet_hugging_face()
    return guard(parser, work, argv)


def drained(engine: Engine, prompts: list[list[int]], args: argparse.Namespace) -> Outcome:
    """Run an engine until every prompt is answered."""
    requests = add_all(engine, prompts, args)
    run_out(engine)
    kv = {"layout": "block-tensor", "bytes": engine.runner.pool.bytes}
    errors = [f"{request.id} ended with an error: {request.error}" for request in requests if request.error]
    return Outcome([request.output_ids for request in requests], kv, errors)


def add_all(engine: Engine, prompts: list[list[int]], args: argparse.Namespace, name: str = "request") -> list[Request]:
    """Add a request for each prompt to an engine; return the requests."""
    params = SamplingParams(temperature=0, max_tokens=args.max_new_tokens)
    return [engine.add_request(f"{name} {index}", ids, params) for index, ids in enumerate(prompts)]


def answers(
    engine: Engine, prompts: list[list[int]], args: argparse.Namespace, name: str = "request", preempt: bool = False
) -> list[list[int]]:
    """Run the prompts together; return their answers.

    Args:
        preempt: take back the newest request's blocks every few steps.

    Raises:
        RuntimeError: a request ended with an error.
    """
    requests = add_all(engine, prompts, args, name)
    run_out(engine, preempt)
    if errors := [request.error for request in requests if request.error]:
        raise RuntimeError(errors[0])
    return [request.output_ids for request in requests]


def lost_blocks(engine: Engine) -> list[str]:
    """Return the leaks in the blocks of an engine whose requests have ended. Its prefix cache is emptied."""
    manager = engine.scheduler.manager
    held = manager.blocks_by_state.held
    lost = [f"{held} blocks are still held"] if held else []
    manager.coordinator.clear()
    if manager.allocator.num_free != manager.num_usable_blocks:
        lost.append(f"{manager.num_usable_blocks - manager.allocator.num_free} blocks belong to nothing")
    return lost


def add_path(report: Report, name: str, outcome: Outcome | LeftOut, dtype: str) -> None:
    """Add one path's result to the report."""
    if isinstance(outcome, str):
        report.kv["left_out"][name] = outcome
        return
    expected = outcome.expected or [request.hf for request in report.requests]
    unequal = [i for i, answer in enumerate(expected) if outcome.outputs[i] != answer]
    report.kv["equal"][name] = len(report.requests) - len(unequal)
    for figure in ("restored_tokens", "speculation"):
        if figure in outcome.kv:
            report.kv.setdefault(figure, {})[name] = outcome.kv[figure]
    report.faults += [f"{name}: {error}" for error in outcome.faults]
    report.not_exercised += [f"{name}: {line}" for line in outcome.not_exercised]
    if unequal and dtype == "float32":  # in half precision another order of additions may decide a near-tie
        whose = "those expected" if outcome.expected else "Hugging Face's"
        report.faults.append(f"{name}: answers {unequal} differ from {whose}")
