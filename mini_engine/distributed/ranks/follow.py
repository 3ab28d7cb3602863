"""Lesson 13. A rank other than rank 0: it runs its share of every step that rank 0 plans."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mini_engine.distributed.ranks.layers import with_layers
from mini_engine.distributed.ranks.memory import Memory
from mini_engine.distributed.ranks.messages import receive
from mini_engine.distributed.ranks.shard import shard
from mini_engine.engine.runner import Step
from mini_engine.errors import first_line

Load = Callable[[str, torch.dtype], Any]

READY = b"ready"
LOOPBACK = ("lo", "lo0")  # its names on Linux and macOS
INTERFACE = "GLOO_SOCKET_IFNAME"


class Place(NamedTuple):
    """What a rank needs to know to join.

    path: the checkpoint. load: reads it; a function of a module, so that other processes find it.
    backend: of the layers, the same in all ranks. meeting: a file in which ranks find each other's addresses.
    num_threads: of each rank. patience: how long a collective waits for a rank that is alive but does not answer.
    """

    path: str
    load: Load
    dtype: torch.dtype
    backend: str
    num_ranks: int
    meeting: str
    num_threads: int
    patience: timedelta


def part_of_rank(rank: int, place: Place, model: Any) -> Any:
    """Return a rank's share of a model, with its layers. Raises UserError if it cannot have them."""
    return with_layers(shard(model, rank, place.num_ranks), place.backend)


def meet(rank: int, place: Place) -> None:
    """Wait for the other ranks. From now on this process can add up with them."""
    store = dist.FileStore(place.meeting, place.num_ranks)  # pyright: ignore[reportPrivateImportUsage]
    with on_this_machine():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=place.num_ranks, timeout=place.patience)


@contextmanager
def on_this_machine() -> Iterator[None]:
    """Let gloo listen on the loopback interface, not on what this machine's name happens to mean.

    On Windows it is left to choose. A choice in the environment is respected.
    """
    names = {name for _, name in socket.if_nameindex()}
    chosen = next((name for name in LOOPBACK if name in names), None)
    if chosen is None or INTERFACE in os.environ:
        yield
        return
    os.environ[INTERFACE] = chosen
    try:
        yield
    finally:
        del os.environ[INTERFACE]


def follow(rank: int, place: Place, pipe: "Connection[Any, Any]", replies: "Connection[Any, Any]") -> None:
    """In another rank's process: join, then run the share of this rank until rank 0 ends.

    Args:
        pipe: brings rank 0's messages, and takes this rank's first and last words. replies: takes what rank 0 asks for.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is rank 0's to handle
    Thread(target=end_with_rank_0, daemon=True).start()
    torch.set_num_threads(place.num_threads)
    try:
        model = part_of_rank(rank, place, place.load(place.path, place.dtype))
        pipe.send_bytes(READY)
        meet(rank, place)
        follow_plans(model, pipe, replies)
    except EOFError:
        os._exit(0)
    except Exception as error:  # whatever it is, rank 0 says it to the user
        pipe.send_bytes(first_line(error).encode())
        os._exit(1)  # threads of the library may still wait for a rank that is gone


def end_with_rank_0() -> None:
    """Wait for the end of rank 0, then end this process whatever it is doing. Works where rank 0 was killed, too."""
    rank_0 = parent_process()
    assert rank_0 is not None  # `follow` runs in no other process
    rank_0.join()
    os._exit(0)


@torch.inference_mode()
def follow_plans(model: Any, pipe: "Connection[Any, Any]", replies: "Connection[Any, Any]") -> None:
    """Carry out messages until rank 0 is gone (EOFError)."""
    memory = Memory(model)
    while True:
        message = receive(pipe)
        if isinstance(message, Step):
            model(message.token_ids, memory.store, message.meta, rows=message.rows)
        elif (reply := message.carry_out(memory)) is not None:
            replies.send_bytes(reply)
