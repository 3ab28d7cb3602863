"""Course machinery. What the smoke scripts share: arguments, the Hugging Face side, the comparison, the report.

A smoke script gives its number and one function `generate(model, prompts, args) -> Outcome`, the lesson's own way of
generating. `run_smoke` does the rest. Exit codes: 0 tokens equal, 1 they differ, 2 bad input.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mini_engine.cli.parser import OneLineParser, guard, whole_number

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: threads that spin make a busy machine crawl
REPO = Path(__file__).resolve().parent.parent
DEFAULT_PROMPTS = ["The capital of France is"]


@dataclass
class Outcome:
    """What a lesson's way of generating gives back: new token ids for each prompt, and facts about its KV.

    faults: what the lesson checked besides and found wrong, a sentence each. One is enough to fail.
    """

    outputs: list[list[int]]
    kv: dict[str, Any]
    faults: list[str] = field(default_factory=list)


@dataclass
class Divergence:
    """The first place where two answers differ. `gap` is between the two best reference logits there."""

    position: int
    expected: int | None
    got: int | None
    gap: float
    near_tie: bool
    where: str


@dataclass
class RequestReport:
    prompt_ids: list[int]
    ours: list[int]
    hf: list[int]
    match: bool
    first_divergence: Divergence | None = None


@dataclass
class Report:
    """The object that `--json` prints."""

    lesson: int
    model: str
    dtype: str
    device: str
    match: bool
    requests: list[RequestReport]
    kv: dict[str, Any]
    seconds: dict[str, float]
    faults: list[str] = field(default_factory=list)


Generate = Callable[[Any, list[list[int]], argparse.Namespace], Outcome]


def id_list(text: str) -> list[int]:
    """An argparse type: token ids with commas between."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 1,2,3") from None


def make_parser(description: str) -> argparse.ArgumentParser:
    """The options that every smoke script has."""
    parser = OneLineParser(description=description)
    parser.add_argument("--model", metavar="DIR_OR_HUB_ID", help="a Qwen3 checkpoint (default: the pocket model)")
    parser.add_argument("--hf-model", metavar="DIR_OR_HUB_ID", help="what Hugging Face runs (default: the same)")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="text to continue; may be repeated")
    prompts.add_argument("--prompt-ids", action="append", type=id_list, metavar="1,2,3", help="ids instead of text")
    parser.add_argument("--max-new-tokens", type=whole_number(1), default=20, metavar="N", help="default: 20")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def with_prompts(argv: Sequence[str] | None, parser: argparse.ArgumentParser, prompts: Sequence[str]) -> list[str]:
    """The arguments of a script that has prompts of its own: those, where none are asked for."""
    argv = sys.argv[1:] if argv is None else list(argv)
    asked = parser.parse_args(argv)
    return argv if asked.prompt or asked.prompt_ids else [*argv, *(p for text in prompts for p in ("--prompt", text))]


def run_smoke(
    lesson: int, generate: Generate, parser: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> int:
    """Run a lesson beside Hugging Face and report; the process's exit code."""

    def work(args: argparse.Namespace) -> int:
        report = compare(lesson, generate, args)
        if args.json:
            print_json(asdict(report))
        else:
            show(report, tokenizer_of(args))
        return 0 if report.match else 1

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    return guard(parser, work, argv)


def print_json(data: dict) -> None:
    print(json.dumps(data))


def compare(lesson: int, generate: Generate, args: argparse.Namespace) -> Report:
    """Generate with the lesson's engine and with Hugging Face, and find where they part."""
    started = time.perf_counter()
    model, prompts = load_ours(args)
    ready = time.perf_counter()
    outcome = generate(model, prompts, args)
    done = time.perf_counter()
    hf_model = load_hf(args.hf_model or args.model, args)
    hf_ready = time.perf_counter()
    requests = []
    for ids, ours in zip(prompts, outcome.outputs, strict=True):
        hf = hf_generate(hf_model, ids, args.max_new_tokens, model.config.eos_token_ids)
        requests.append(RequestReport(ids, ours, hf, ours == hf))
    seconds = {"load": ready - started, "ours": done - ready, "hf": time.perf_counter() - hf_ready}
    for request in requests:
        if not request.match:
            request.first_divergence = find_divergence(model, hf_model, generate, request, args)
    match = all(request.match for request in requests) and not outcome.faults
    return Report(lesson, args.model, args.dtype, args.device, match, requests, outcome.kv, seconds, outcome.faults)


def load_ours(args: argparse.Namespace):
    """The model and the prompts that `args` names; device and model are settled in `args` on the way."""
    from mini_engine.config import DTYPES
    from mini_engine.weights import load_model

    args.device = pick_device(args.device)
    args.model = args.model or str(pocket_dir())
    model = load_model(args.model, DTYPES[args.dtype], args.device)
    return model, encode_prompts(args, model.config)


def pick_device(name: str) -> str:
    """The device to run on; asking for a GPU that is not there is a UserError."""
    import torch

    from mini_engine.errors import UserError

    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda was asked for, but this torch sees no CUDA device; use --device cpu")
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def pocket_dir() -> Path:
    """The shipped checkpoint."""
    from mini_engine.pocket import POCKET_DIR

    return POCKET_DIR


def tokenizer_of(args: argparse.Namespace):
    """The checkpoint's tokenizer, or None where it has none (ids need no tokenizer)."""
    from transformers import AutoTokenizer

    from mini_engine.weights import resolve_checkpoint

    directory = resolve_checkpoint(args.model)
    if not any((directory / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        return None
    return AutoTokenizer.from_pretrained(directory)


def encode_prompts(args: argparse.Namespace, config) -> list[list[int]]:
    """The prompts as token ids, checked against the model."""
    from mini_engine.errors import UserError

    prompts = args.prompt_ids
    if prompts is None:
        tokenizer = tokenizer_of(args)
        if tokenizer is None:
            raise UserError(f"{args.model} has no tokenizer; give --prompt-ids 1,2,3 instead of text")
        prompts = [tokenizer.encode(text) for text in args.prompt or DEFAULT_PROMPTS]
    for ids in prompts:
        config.check_prompt(ids, args.max_new_tokens)
    return prompts


def load_hf(path: str, args: argparse.Namespace):
    """The same checkpoint as Hugging Face runs it."""
    from transformers import AutoModelForCausalLM

    from mini_engine.config import DTYPES
    from mini_engine.weights import resolve_checkpoint

    model = AutoModelForCausalLM.from_pretrained(resolve_checkpoint(path), dtype=DTYPES[args.dtype])
    return model.to(args.device).eval()


def hf_generate(hf_model, prompt_ids: list[int], max_new_tokens: int, eos_token_ids: Sequence[int]) -> list[int]:
    """Greedy `generate` of one prompt alone: the new tokens."""
    import torch
    from transformers import GenerationConfig

    eos = list(eos_token_ids) or None
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=eos, pad_token_id=eos[0] if eos else 0
    )
    hf_model.generation_config = settings
    ids = torch.tensor([prompt_ids], device=hf_model.device)
    with torch.inference_mode():
        out = hf_model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return out[0, len(prompt_ids) :].tolist()


def find_divergence(model, hf_model, generate: Generate, request: RequestReport, args) -> Divergence:
    """Where two answers part, how near the choice was, and what `explain_divergence` says of it."""
    import torch
    from explain_divergence import explain

    same = (a == b for a, b in zip(request.ours, request.hf, strict=False))
    position = next((i for i, equal in enumerate(same) if not equal), min(len(request.ours), len(request.hf)))
    context = torch.tensor([request.prompt_ids + request.hf[:position]], device=hf_model.device)
    with torch.inference_mode():
        best = hf_model(context).logits[0, -1].float().topk(2).values
    gap = float(best[0] - best[1])
    where = explain(model, hf_model, generate, request.prompt_ids, position + 1, args)
    expected, got = (ids[position] if position < len(ids) else None for ids in (request.hf, request.ours))
    return Divergence(position, expected, got, gap, is_near_tie(gap, float(best[0]), args.dtype), str(where))


def is_near_tie(gap: float, best: float, dtype: str) -> bool:
    """Whether rounding alone may decide: in float32 never assumed, in half precision within 4 steps of the logit."""
    from mini_engine.config import DTYPES

    if dtype == "float32":
        return False
    import torch

    return gap <= 4 * torch.finfo(DTYPES[dtype]).eps * max(1.0, abs(best))


def show(report: Report, tokenizer) -> None:
    """The report for people."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    out = partial(console.print, markup=False)
    out(f"Lesson {report.lesson} · {report.model} · {report.dtype} on {report.device}", style="bold")
    for index, request in enumerate(report.requests):
        for line in request_lines(index, request, report.dtype, tokenizer):
            out(line)
    count, seconds = sum(len(request.ours) for request in report.requests), report.seconds
    out("KV: " + ", ".join(f"{key} {value}" for key, value in report.kv.items()))
    out(
        f"{count} tokens in {seconds['ours']:.2f} s ({count / seconds['ours']:.0f} tokens/s); "
        f"Hugging Face {seconds['hf']:.2f} s"
    )
    for fault in report.faults:
        out(fault, style="bold red")
    equal = sum(request.match for request in report.requests)
    verdict, style = ("PASS", "bold green") if report.match else ("FAIL", "bold red")
    out(f"{verdict}: {equal} of {len(report.requests)} answers equal Hugging Face's", style=style)


def request_lines(index: int, request: RequestReport, dtype: str, tokenizer) -> list[str]:
    """The lines of one request: prompt, answer, and where it leaves Hugging Face's."""

    def text(ids: list[int]) -> str:
        return repr(tokenizer.decode(ids)) if tokenizer else str(ids)

    tail = request.prompt_ids[-32:]
    dots = "… " if len(tail) < len(request.prompt_ids) else ""
    lines = [f"[{index}] {len(request.prompt_ids)} prompt tokens {dots}{text(tail)}", f"    ours {text(request.ours)}"]
    if request.match:
        return lines
    d = request.first_divergence
    near = f", a near-tie in {dtype}: rounding may decide it" if d.near_tie else ""
    return [
        *lines,
        f"    HF   {text(request.hf)}",
        f"    first difference at new token {d.position}: expected {d.expected}, got {d.got}; "
        f"the two best logits there are {d.gap:.4f} apart{near}",
        f"    {d.where}",
    ]
