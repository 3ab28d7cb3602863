"""Lesson 20. Shows what a turn costs that drops the thoughts of earlier turns: what comes behind them is not cached.

An agent thinks and calls a tool, again and again. Then the user asks something else. Some chat templates leave out the
thoughts of earlier questions from then on, as Qwen3's does.
"""

import argparse
import random
import sys

import scripts.smoke  # noqa: F401 (before torch, so that its threads sleep while they wait)

from mini_engine.cli.parser import OneLineParser, guard, whole_number

SYSTEM, QUESTION, THOUGHT, CALL, RESULT = 256, 32, 48, 16, 64  # tokens


def run(args: argparse.Namespace) -> int:
    from mini_engine.assembly.llm import LLM

    for keeps in (True, False):
        llm = LLM(num_blocks=512, enable_sessions=True)
        print("thoughts stay in the history" if keeps else "thoughts are left out after the user's next question")
        converse(llm, args.calls, keeps)
    return 0


def converse(llm, num_calls: int, keeps: bool) -> None:
    """Let an agent call its tool so many times, then ask it something else; print what each turn found."""
    from mini_engine.engine.sampling_params import SamplingParams

    chance, ids = random.Random(0), range(100, 500)
    params = SamplingParams(temperature=0, max_tokens=THOUGHT + CALL, ignore_eos=True)
    text = whole = chance.choices(ids, k=SYSTEM + QUESTION)
    for number in range(1, num_calls + 2):
        is_next = number > num_calls
        prompt = text if is_next and not keeps else whole
        prompt = prompt + chance.choices(ids, k=QUESTION if is_next else 0)
        [answer] = llm.generate([prompt], params, progress=False, session_id="agent")
        found = answer.num_cached_tokens
        name = "next question" if is_next else f"call {number}"
        print(f"  {name:14}{len(prompt):5} prompt tokens, {found:4} found, {len(prompt) - found:4} computed")
        result = chance.choices(ids, k=RESULT)
        whole = whole + answer.token_ids + result
        text = text + answer.token_ids[THOUGHT:] + result


def main(argv=None) -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--calls", type=whole_number(1), default=5, metavar="N", help="of the tool (default: 5)")
    return guard(parser, run, argv)


if __name__ == "__main__":
    sys.exit(main())
