"""Lesson 19. A receiver in a process of its own: `python -m tests.l19.receiver WHEN FAULT`.

It prints its worker's process, comes to the fault at the point WHEN, and prints its answers if it lives on.
"""

import json
import os
import signal
import sys

from mini_engine import LLM
from mini_engine.checkpoint.shipped import shipped_checkpoint
from mini_engine.handover.opening import workers_of
from mini_engine.handover.protocol import Ask, Cancel
from tests.l19.ends import ASKED, OPTIONS, PROMPTS, ask, check_nothing_is_held, drain, receiving


def main(when: str, fault: str) -> None:
    with LLM(shipped_checkpoint("pocket"), dtype="float32", device="cpu", **OPTIONS | ASKED) as llm:
        connector, workers = receiving(llm.engine), workers_of(llm.engine)
        say([handle.process.pid for handle in workers.handles.values()])
        strike = once(getattr(signal, fault))
        send, fill, write = workers.send, connector.transfers.fill, connector.blocks.write

        def send_and_strike(sender, message):
            send(sender, message)
            if (when, type(message)) in (("asked", Ask), ("cancelled", Cancel)):
                strike()

        def fill_and_strike(*args):
            fill(*args)
            if when == "filled":
                strike()

        def write_and_strike(blocks, payloads):
            write(blocks[:1], payloads[:1])
            if when == "copying":
                strike()
            write(blocks, payloads)

        workers.send, connector.transfers.fill = send_and_strike, fill_and_strike
        connector.blocks = Blocks(connector.blocks, write_and_strike)
        if when == "cancelled":
            [extra] = ask(llm.engine, [PROMPTS[2][::-1]], name="extra")
            llm.engine.step()
            llm.engine.abort(extra.id)
        requests = ask(llm.engine)
        drain(llm.engine)
        check_nothing_is_held(llm.engine)
        say([request.output_ids for request in requests])


class Blocks:
    """Copies blocks; writes them in its own way."""

    def __init__(self, blocks, write):
        self.payload_bytes, self.read, self.write = blocks.payload_bytes, blocks.read, write


def once(fault: int):
    left = [fault]

    def strike():
        if left:
            os.kill(os.getpid(), left.pop())

    return strike


def say(value) -> None:
    sys.stdout.write(f"{json.dumps(value)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
