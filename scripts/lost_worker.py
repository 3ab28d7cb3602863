"""Lesson 19. Ends a prefill worker while an answer streams, and shows the account of buffers before, then and after.

A's answer streams, and a worker computes B's prompt. Once some of B's blocks have arrived, the worker is killed.
"""

import argparse
import os
import signal
import sys
import time

import scripts.smoke  # noqa: F401 (before torch, so that its threads sleep while they wait)
from scripts.smoke.arguments import long_prompt

from mini_engine.base.errors import UserError
from mini_engine.cli.parser import OneLineParser, guard

NUM_BLOCKS = 900
PROMPTS = ["Once upon a time", long_prompt(250)]
SECONDS_A_TOKEN = 0.02  # a reader's pace
HAS_STOP = hasattr(signal, "SIGSTOP")  # Windows has not


class Account:
    """Prints how many buffers are in each state whenever that changes, and the answer that came meanwhile."""

    def __init__(self, buffers) -> None:
        from mini_engine.handover.stage import State

        self.buffers, self.states, self.last, self.text = buffers, list(State), [], ""
        print("".join(f"{state.value:>8}" for state in self.states) + "   A's answer meanwhile")

    def show(self, text: str = "") -> None:
        """Add text to A's answer; print a line if the account has changed."""
        counts = [self.buffers.count(state) for state in self.states]
        if counts != self.last:
            print("".join(f"{count:>8}" for count in counts) + f"   {self.piece()!r}", flush=True)
            self.last = counts
        self.text += text

    def piece(self) -> str:
        """Return what came of A's answer since the last line, shortened."""
        text, self.text = self.text, ""
        return text if len(text) < 60 else f"{text[:30]} … {text[-27:]}"


def end(process, stops: bool) -> None:
    """Kill a worker, or stop it: then it gives no sign, and does not end by itself."""
    print(f"-- B's worker, process {process.pid}, is {'stopped' if stops else 'killed'} --")
    if stops:
        os.kill(process.pid, signal.SIGSTOP)
    else:
        process.kill()


def watched(llm, params, stops: bool) -> list[list[int]]:
    """Stream A while B is handed over, and end the worker on the way. Return both answers' tokens."""
    from scripts.smoke.handed_over import receiving_of

    from mini_engine.handover.opening import workers_of

    a, b = (llm.stream(prompt, params) for prompt in PROMPTS)
    workers, receiving, has_ended = workers_of(llm.engine), receiving_of(llm.engine), False
    transfers, account = receiving.transfers, Account(receiving.transfers.buffers)
    for delta in a:
        account.show(delta.text)
        if not has_ended and any(4 * one.num_filled > len(one.buffers) for one in list(transfers.of_id.values())):
            end(workers.handles[1].process, stops)
            has_ended = True
            while not (stops or workers.num_losses):  # noticed at once, by another thread; a stopped one after 5 s
                time.sleep(0.001)
            account.show()
        time.sleep(SECONDS_A_TOKEN)
    for _ in b:
        account.show()
    print(f"-- A went on: {account.piece()!r} --")
    print(f"-- {receiving.events['tokens']} of B's {len(b.request.prompt_ids)} tokens had arrived --")
    replaced(workers)
    return [a.request.output_ids, b.request.output_ids]


def replaced(workers) -> None:
    """Wait for the worker that takes the lost one's place."""
    if not workers.num_losses:
        raise UserError("B's prompt arrived before its worker could be ended; run it again")
    while workers.num_away:
        time.sleep(0.1)
    [handle] = workers.handles.values()
    print(f"-- process {handle.process.pid} has taken the worker's place --")


def run(args: argparse.Namespace) -> int:
    from mini_engine.assembly.llm import LLM
    from mini_engine.engine.sampling_params import SamplingParams
    from mini_engine.engine.scheduler_config import SchedulerConfig

    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    limits = SchedulerConfig(chunked_prefill_size=128)
    with LLM(scheduler_config=limits, num_blocks=NUM_BLOCKS) as llm:
        expected = [answer.token_ids for answer in llm.generate(PROMPTS, params, progress=False)]
    with LLM(prefill_workers=1, scheduler_config=limits, num_blocks=NUM_BLOCKS) as llm:
        same = watched(llm, params, args.stop) == expected
    print(f"both answers {'equal' if same else 'DIFFER FROM'} those of one process")
    return 0 if same else 1


def main(argv=None) -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100, metavar="N", help="tokens of each answer (default: 100)")
    if HAS_STOP:
        parser.add_argument(
            "--stop", action="store_true", help="stop the worker instead: it is lost after five seconds"
        )
    parser.set_defaults(stop=False)
    return guard(parser, run, argv)


if __name__ == "__main__":
    sys.exit(main())
