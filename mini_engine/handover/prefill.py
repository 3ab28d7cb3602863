"""Lesson 19. A prefill worker: a process whose own engine computes prompts for another process.

It has no readers: for each prompt it computes one token more than was asked for and throws it away. All that matters is
the KV that its connector copies on the way. Its own prefix cache knows no sessions (lesson 20): what a session's next
turn needs is in the receiver's.
"""

import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any, NamedTuple

import torch

from mini_engine.base.errors import UserError, first_line
from mini_engine.distributed.tensor_parallel.pulse import Pulse, live_with_parent
from mini_engine.distributed.tensor_parallel.shared_block import SharedBlock
from mini_engine.engine.engine import Engine
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.handover.protocol import Ask, Cancel, Close, Failed, Layout
from mini_engine.handover.sender import SendingConnector

ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


class Seat(NamedTuple):
    """Everything a prefill worker needs to start.

    build: loads the model and creates the engine with a connector over these buffers; returns both and the layout.
    block: the memory of the buffers. pulse: for heartbeats; the worker is rank 1, the receiver rank 0.
    num_threads: torch's threads.
    """

    build: "Callable[[SharedBlock, Callable[[Any], None]], Built]"
    block: SharedBlock
    pulse: SharedBlock
    num_threads: int


class Built(NamedTuple):
    """An engine that computes prompts, its connector, and the layout of its buffers."""

    engine: Engine
    connector: SendingConnector
    layout: Layout


def work(seat: Seat, pipe: "Connection[Any, Any]") -> None:
    """Run the worker's process: build the engine, shake hands, and compute prompts until the receiver ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the receiver's to handle
    Thread(target=live_with_parent, args=(Pulse(1, 2, seat.pulse),), daemon=True).start()
    torch.set_num_threads(seat.num_threads)
    try:
        with suppress(EOFError, BrokenPipeError, ConnectionResetError):
            built = seat.build(seat.block, pipe.send)
            pipe.send(built.layout)
            Worker(built.engine, built.connector, pipe).run()
    except Exception as error:  # the receiver reports it to the user
        with suppress(OSError):
            pipe.send(Failed(first_line(error)))
        if not isinstance(error, UserError):
            raise


class Worker:
    """Computes prompts one chunk after another, and reads messages between steps."""

    def __init__(self, engine: Engine, connector: SendingConnector, pipe: "Connection[Any, Any]") -> None:
        self.engine, self.connector, self.pipe = engine, connector, pipe
        self.is_closing = False

    @torch.inference_mode()
    def run(self) -> None:
        """Work until `Close` has arrived and nothing is left to do, or the receiver is gone (EOFError)."""
        while not (self.is_closing and not self.engine.has_unfinished):
            while self.pipe.poll(0 if self.engine.has_unfinished else None):
                self.hear(self.pipe.recv())
                if self.is_closing:
                    break
            if self.engine.has_unfinished:
                for request in self.engine.step().finished:
                    self.end(int(request.id), request.error or "")

    def hear(self, message: Any) -> None:
        """Carry out a message."""
        if isinstance(message, Close):
            self.is_closing = True
        elif isinstance(message, Cancel):
            self.engine.abort(str(message.id))
            self.end(message.id, "cancelled")
        else:
            self.ask(message)

    def ask(self, ask: Ask) -> None:
        """Start computing a prompt."""
        self.connector.begin(ask)
        try:
            self.engine.add_request(str(ask.id), list(ask.tokens), ONE_TOKEN, namespace=ask.namespace)
        except UserError as error:
            self.end(ask.id, str(error))

    def end(self, transfer_id: int, error: str = "") -> None:
        """Report that a transfer's buffers are no longer in use, and the number of blocks that requests now hold."""
        manager = self.engine.scheduler.manager
        num_held = sum(len(table.blocks) for table in manager.tables.values())
        self.connector.end(transfer_id, error, num_held)
