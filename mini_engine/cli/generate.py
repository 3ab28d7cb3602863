"""Lesson 6. The command `generate PROMPT`: continue a text, printed as it is generated."""

import argparse
import json
import signal
import sys
import time

from mini_engine.base.signals import noting
from mini_engine.cli.arguments import add_answer_options, load_llm, sampling_params


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `generate`."""
    parser.add_argument("prompt", help="the text to continue, or - to read it from standard input")
    add_answer_options(parser, max_tokens=64)
    parser.add_argument("--chat", action="store_true", help="send the prompt as a chat message")
    parser.add_argument("--stats", action="store_true", help="print tokens/s and KV figures on standard error")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(args: argparse.Namespace) -> int:
    """Answer one prompt; Ctrl-C stops the answer early. Returns exit code 0, or 1 if the engine failed."""
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    with load_llm(args) as llm:
        return answer(llm, prompt, args)


def answer(llm, prompt: str, args: argparse.Namespace) -> int:
    """Print the answer as it is generated. Returns the exit code."""
    from mini_engine.engine.answer import TextDelta

    params = sampling_params(args, llm.engine.config.sampling)
    started, pieces, token_ids, last = time.perf_counter(), [], [], TextDelta("", [])
    asked = [{"role": "user", "content": prompt}] if args.chat else prompt
    stream = llm.stream(asked, params, chat_template_kwargs=args.chat_template_kwargs)
    with noting(signal.SIGINT, twice=KeyboardInterrupt) as pressed, stream as deltas:
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
        found = {"prompt_ids": deltas.request.prompt_ids, "token_ids": token_ids, "text": "".join(pieces)}
        print(json.dumps(found | {"finish_reason": reason, "error": last.error, "seconds": seconds}))
    else:
        print()
    if last.error and not args.json:
        print(f"the engine failed: {last.error}", file=sys.stderr)
    if args.stats:
        print(figures(llm, len(deltas.request.prompt_ids), len(token_ids), seconds), file=sys.stderr)
    return 1 if last.error else 0


def figures(llm, num_prompt: int, num_new: int, seconds: float) -> str:
    """Return one line with lengths, speed, and the state of the pool."""
    blocks = llm.engine.scheduler.manager.blocks_by_state
    return (
        f"{num_prompt} prompt tokens, {num_new} new ones in {seconds:.2f} s ({num_new / seconds:.0f} tokens/s); "
        f"blocks: {blocks.free} free, {blocks.held} held, {blocks.cached} cached"
    )
