"""Lesson 18. The process of a rank other than rank 0: runs its share of every step that rank 0 plans."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple, NoReturn

import torch

from mini_engine.base.errors import first_line
from mini_engine.checkpoint.stored import Stored
from mini_engine.distributed.tensor_parallel.collectives import Collectives
from mini_engine.distributed.tensor_parallel.layers import with_layers
from mini_engine.distributed.tensor_parallel.messages import Memory, receive
from mini_engine.distributed.tensor_parallel.pulse import Pulse, live_with_parent
from mini_engine.distributed.tensor_parallel.shard import RankCut
from mini_engine.distributed.tensor_parallel.shared_block import SharedBlock
from mini_engine.distributed.tensor_parallel.transport import Transport
from mini_engine.engine.runner import Step

Read = Callable[[Path], Stored]

READY, MEET = b"ready", b"meet"


class Place(NamedTuple):
    """Everything that a rank needs to join.

    path: the checkpoint's directory. read: checks it; a module-level function, so that it can be pickled.
    backend: of the layers, the same in all ranks. transport: connects the ranks. pulse: their heartbeats.
    num_threads: of each rank. device: the type of the ranks' devices; with "cuda", rank i has GPU i.
    """

    path: str
    read: Read
    dtype: torch.dtype
    backend: str
    num_ranks: int
    transport: Transport
    pulse: SharedBlock
    num_threads: int
    device: str

    def device_of(self, rank: int) -> torch.device:
        """Return the device of a rank."""
        return torch.device("cuda", rank) if self.device == "cuda" else torch.device("cpu")


def part_of_rank(place: Place, stored: Stored, cut: RankCut, collectives: Collectives) -> Any:
    """Load a rank's share of a model and return it with its layers. Raises UserError if the layers do not work here."""
    model = stored.load(place.dtype, place.device_of(cut.rank), cut)
    return with_layers(model, place.backend, collectives)


def follow(rank: int, place: Place, pipe: "Connection[Any, Any]", replies: "Connection[Any, Any]") -> None:
    """Run the process of a rank other than 0: join, then run this rank's share until rank 0 ends.

    Args:
        pipe: brings rank 0's messages and takes this rank's last error. replies: takes the answers that rank 0 waits
            for.
    """

    def silent(seconds: float) -> None:
        end_with(f"rank 0 sent no heartbeat for {seconds:g} s", pipe)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is rank 0's to handle
    pulse = Pulse(rank, place.num_ranks, place.pulse)
    Thread(target=live_with_parent, args=(pulse, silent), daemon=True).start()
    torch.set_num_threads(place.num_threads)
    try:
        stored, cut = place.read(Path(place.path)), RankCut(rank, place.num_ranks)
        model = part_of_rank(place, stored, cut, place.transport.collectives(rank))
        replies.send_bytes(READY)
        pipe.recv_bytes()  # MEET, once all are ready: meeting has a time limit, loading has none
        place.transport.connect(rank)
        follow_plans(model, pipe, replies)
    except EOFError:
        os._exit(0)
    except Exception as error:  # rank 0 reports it to the user
        end_with(first_line(error), pipe)


def end_with(words: str, pipe: "Connection[Any, Any]") -> NoReturn:
    """End this process and send rank 0 the reason. Other threads may be waiting for a rank that is gone."""
    with suppress(OSError):  # rank 0 has ended too
        pipe.send_bytes(words.encode())
    os._exit(1)


@torch.inference_mode()
def follow_plans(model: Any, pipe: "Connection[Any, Any]", replies: "Connection[Any, Any]") -> None:
    """Carry out messages until rank 0 is gone (EOFError)."""
    memory = Memory(model)
    while True:
        message = receive(pipe, model.device)
        if isinstance(message, Step):
            model(message.token_ids, memory.store, message.meta, rows=message.rows)
        elif (reply := message.carry_out(memory)) is not None:
            replies.send_bytes(reply)
