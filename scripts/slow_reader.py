"""Lesson 7. Shows why the engine needs its own thread: two readers of lesson 6's streams, one of them slow."""

import argparse
import sys
import time

import scripts.smoke  # noqa: F401 (before torch, so that its threads sleep while they wait)

from mini_engine.cli.parser import OneLineParser, guard, whole_number


def seconds(llm, pause: float, tokens: int) -> float:
    """Return how long two streams take, read in turns, if one of the readers pauses after each token."""
    from mini_engine.engine.sampling_params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    quick, slow = llm.stream("Once upon a time", params), llm.stream("One, two, three,", params)
    started = time.perf_counter()
    for _ in zip(quick, slow, strict=True):
        time.sleep(pause)
    return time.perf_counter() - started


def run(args: argparse.Namespace) -> int:
    from mini_engine.assembly.llm import LLM

    llm = LLM()
    for pause in (0.0, args.milliseconds / 1000):
        took = seconds(llm, pause, args.tokens)
        print(f"one reader pauses {pause:.1f} s a token: the other waits {took:.2f} s for its {args.tokens} tokens")
    return 0


def main(argv=None) -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument(
        "--tokens", type=whole_number(1), default=30, metavar="N", help="tokens per stream (default: 30)"
    )
    parser.add_argument(
        "--milliseconds", type=whole_number(0), default=100, metavar="N", help="pause per token (default: 100)"
    )
    return guard(parser, run, argv)


if __name__ == "__main__":
    sys.exit(main())
