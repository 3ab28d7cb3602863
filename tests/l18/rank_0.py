"""Lesson 18. Rank 0 of a model in a process of its own: `python -m tests.l18.rank_0 WHEN FAULT`.

It prints the process of rank 1 once it is where the fault shall come. If it lives on, it ends as commands do.
"""

import argparse
import sys
import time

from mini_engine.base.errors import EngineDead, UserError
from mini_engine.distributed.tensor_parallel.processes import Ranks
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.families.qwen3 import DENSE
from mini_engine.pocket import POCKET_DIR
from tests.l18.ends import SlowlyStored
from tests.l18.ranks import engine_over


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("when", choices=["loading", "collective", "idle"])
    parser.add_argument("fault", choices=["wait", "raise"])
    parser.add_argument("--transport", default="auto")
    args = parser.parse_args()
    with Ranks(str(POCKET_DIR), 2, DENSE.stored, transport=args.transport) as ranks:
        if args.when == "loading":
            announce(ranks)
            ranks.join(SlowlyStored(POCKET_DIR, args.fault == "raise"))
        ranks.join(DENSE.stored(POCKET_DIR))
        if args.when == "collective":
            ranks.model.register_forward_pre_hook(lambda *_: come_to(args.fault, ranks))
            run_step(ranks)
        come_to(args.fault, ranks)
        raise EngineDead(ranks.fault)


def announce(ranks: Ranks) -> None:
    """Print the process of rank 1, once it sends heartbeats."""
    while not ranks.others.pulse.seen[1]:
        time.sleep(0.02)
    sys.stdout.write(f"{ranks.processes[0].pid}\n")
    sys.stdout.flush()


def come_to(fault: str, ranks: Ranks) -> None:
    """Fail, or wait until rank 1 is lost."""
    announce(ranks)
    if fault == "raise":
        raise ValueError("rank 0 is confused")
    while not ranks.fault:
        time.sleep(0.02)


def run_step(ranks: Ranks) -> None:
    """Run a step; rank 1 is in its first collective when rank 0 begins."""
    engine = engine_over(ranks, num_blocks=20)
    engine.add_request("one", [5, 9, 11], SamplingParams(temperature=0, max_tokens=4))
    engine.step()


if __name__ == "__main__":
    try:
        main()
    except (UserError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
