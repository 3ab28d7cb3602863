"""Course machinery. Runs a lesson and Hugging Face on the same prompts, compares the tokens and reports.

A smoke script provides its number and one function `generate(model, prompts, args) -> Outcome`, the lesson's own way of
generating. `run_smoke` does the rest. Exit codes: 0 for equal tokens, 1 for a difference, 2 for bad input.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

from scripts.smoke.arguments import load_ours, tokenizer_of
from scripts.smoke.divergence import explain
from scripts.smoke.hugging_face import hf_generate, load_hf
from scripts.smoke.report import Divergence, Report, RequestReport, equal_prefix, print_json, show

from mini_engine.cli.parser import guard
from mini_engine.model.kinds import Latent, State


class Answered(Protocol):
    """A request that has ended: lesson 5's, which earlier lessons do without."""

    output_ids: list[int]


@dataclass
class Outcome:
    """A lesson's result: new token ids for each prompt, and facts about its KV.

    faults: failures of the lesson's additional checks, a sentence each. One is enough to fail.
    not_exercised: features that this run was meant to show but these prompts did not need, a sentence each. Not a
        failure: the tokens are equal. The script's own prompts and options exercise everything.
    expected: the expected outputs of a further path if not Hugging Face's answers, since it computes less exactly.
    prompts: those that were answered, if not the given ones.
    more, lines: further keys of the JSON object, and further lines for people.
    """

    outputs: list[list[int]]
    kv: dict[str, Any]
    faults: list[str] = field(default_factory=list)
    not_exercised: list[str] = field(default_factory=list)
    expected: list[list[int]] | None = None
    prompts: list[list[int]] | None = None
    more: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def exercising(self, has_happened: object, otherwise: str) -> "Outcome":
        """Note `otherwise` as not exercised unless it has happened. Return this outcome."""
        self.not_exercised += [] if has_happened else [otherwise]
        return self

    def requiring(self, holds: object, otherwise: str) -> "Outcome":
        """Add `otherwise` to the faults unless this holds. Return this outcome."""
        self.faults += [] if holds else [otherwise]
        return self

    def repeating(self, earlier: Iterable[Answered], otherwise: str) -> "Outcome":
        """Add `otherwise` to the faults unless these requests were given the same answers. Return this outcome."""
        return self.requiring(self.outputs == [request.output_ids for request in earlier], otherwise)

    def take_notes(self, name: str, other: "Outcome") -> None:
        """Add the faults of another run, and what it did not exercise, under its name."""
        self.faults += [f"{name}: {line}" for line in other.faults]
        self.not_exercised += [f"{name}: {line}" for line in other.not_exercised]


Generate = Callable[[Any, list[list[int]], argparse.Namespace], Outcome]
LeftOut = str  # the reason a path cannot run on this machine
Path = Callable[..., Outcome | LeftOut]


def run_smoke(
    lesson: int,
    generate: Generate,
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None = None,
    one_alone: Generate | None = None,
) -> int:
    """Run a lesson and Hugging Face, and report. Return the exit code. one_alone: as for `compare`."""
    quiet_hugging_face()
    return guard(parser, lambda args: tell(compare(lesson, generate, args, one_alone), args), argv)


def tell(report: Report, args: argparse.Namespace) -> int:
    """Print the report for people or, with --json, for programs. Return the exit code."""
    if args.json:
        print_json(report.as_json())
    else:
        show(report, tokenizer_of(args))
    return 0 if report.match else 1


def quiet_hugging_face() -> None:
    """Silence transformers' warnings and progress bars, whether or not it is imported already."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if "transformers" in sys.modules:
        from transformers.utils import logging

        logging.set_verbosity_error()


def compare(lesson: int, generate: Generate, args: argparse.Namespace, one_alone: Generate | None = None) -> Report:
    """Generate with the lesson's engine and with Hugging Face, and find where they diverge.

    Args:
        one_alone: answers one prompt, to find where; by default `generate`.
    """
    started = time.perf_counter()
    model, prompts = load_ours(args)
    ready = time.perf_counter()
    with redirect_stdout(sys.stderr if args.json else sys.stdout):  # a student's code may print
        outcome = generate(model, prompts, args)
    done = time.perf_counter()
    hf_model = load_hf(args.hf_model or args.model, args)
    hf_ready = time.perf_counter()
    requests, answer = [], cache(lambda ids: hf_generate(hf_model, [*ids], args.max_new_tokens, stop_ids))
    stop_ids = model.config.eos_token_ids
    for ids, ours in zip(outcome.prompts or prompts, outcome.outputs, strict=True):
        hf = answer(tuple(ids))
        requests.append(RequestReport(ids, ours, hf, ours == hf))
    seconds = {"load": ready - started, "ours": done - ready, "hf": time.perf_counter() - hf_ready}
    for request in requests:
        if not request.match:
            request.first_divergence = find_divergence(model, hf_model, one_alone or generate, request, args)
    match = all(request.match for request in requests) and not outcome.faults
    notes = outcome.faults, outcome.not_exercised, outcome.more, outcome.lines
    return Report(lesson, args.model, args.dtype, args.device, match, requests, outcome.kv, seconds, *notes)


def find_divergence(model, hf_model, generate: Generate, request: RequestReport, args) -> Divergence:
    """Return where two answers diverge, how close the choice was, and where the values first differ."""
    import torch

    position = equal_prefix(request.ours, request.hf)
    context = torch.tensor([request.prompt_ids + request.hf[:position]], device=hf_model.device)
    with torch.inference_mode():
        best = hf_model(context).logits[0, -1].float().topk(2).values
    gap = float(best[0] - best[1])
    where = "the layers of this kind of model are not compared one by one"
    if not any(isinstance(kind, State | Latent) for kind in model.config.layers):
        where = explain(model, hf_model, generate, request.prompt_ids, position + 1, args)
    expected, got = (ids[position] if position < len(ids) else None for ids in (request.hf, request.ours))
    return Divergence(position, expected, got, gap, is_near_tie(gap, float(best[0]), args.dtype), str(where))


def is_near_tie(gap: float, best: float, dtype: str) -> bool:
    """Return True if rounding alone may decide: never in float32; in half precision, within 4 rounding steps."""
    from mini_engine.checkpoint.config import DTYPES

    if dtype == "float32":
        return False
    import torch

    return gap <= 4 * torch.finfo(DTYPES[dtype]).eps * max(1.0, abs(best))
