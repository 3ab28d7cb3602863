"""Lesson 6. The command `generate PROMPT`: continues a text and shows it as it comes."""

import argparse
import json
import sys
import time
from contextlib import closing

from mini_engine.cli.arguments import add_engine_options, add_sampling_options, interruptible, load_llm, sampling_params


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `generate`."""
    parser.add_argument("prompt", help="the text to continue; - reads it from standard input")
    add_engine_options(parser)
    add_sampling_options(parser, max_tokens=64)
    parser.add_argument("--chat", action="store_true", help="ask it as a question, through the chat template")
    parser.add_argument("--stats", action="store_true", help="tokens/s and KV figures on standard error")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(args: argparse.Namespace) -> int:
    """Answer one prompt. Ctrl-C ends the answer where it is; exit code 0, or 1 if the engine failed."""
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    llm, params = load_llm(args), sampling_params(args)
    prompt_ids = llm.encode([{"role": "user", "content": prompt}] if args.chat else prompt)
    started, pieces, token_ids, last = time.perf_counter(), [], [], None
    with interruptible() as pressed, closing(llm.stream(prompt_ids, params, args.stop)) as deltas:
        for last in deltas:
            pieces.append(last.text)
            token_ids += last.token_ids
            if not args.json:
                print(last.text, end="", flush=True)
            if pressed():
                break
    seconds = time.perf_counter() - started
    reason = last.finish_reason or "abort"
    if args.json:
        answer = {"prompt_ids": prompt_ids, "token_ids": token_ids, "text": "".join(pieces)}
        print(json.dumps(answer | {"finish_reason": reason, "error": last.error, "seconds": seconds}))
    else:
        print()
    if last.error and not args.json:
        print(f"the engine failed: {last.error}", file=sys.stderr)
    if args.stats:
        print(figures(llm, len(prompt_ids), len(token_ids), seconds), file=sys.stderr)
    return 1 if last.error else 0


def figures(llm, num_prompt: int, num_new: int, seconds: float) -> str:
    """One line: lengths, speed, and the state of the pool."""
    blocks = llm.engine.scheduler.manager.blocks_by_state
    return (
        f"{num_prompt} prompt tokens, {num_new} new ones in {seconds:.2f} s ({num_new / seconds:.0f} tokens/s); "
        f"blocks: {blocks.free} free, {blocks.held} held, {blocks.cached} cached"
    )
