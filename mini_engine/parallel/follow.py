"""Lesson 13. What a rank other than rank 0 does: it runs its share of every step that rank 0 plans."""

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from mini_engine.config import Qwen3Config
from mini_engine.errors import first_line
from mini_engine.model.qwen3 import Qwen3ForCausalLM
from mini_engine.parallel.messages import Copy, PoolSize, receive
from mini_engine.parallel.shard import shard, share_of
from mini_engine.weights import load_model

READY = b"ready"
LOOPBACK = ("lo", "lo0")  # its names on Linux and macOS
INTERFACE = "GLOO_SOCKET_IFNAME"


class Place(NamedTuple):
    """What a rank needs to know to join.

    path: the checkpoint. meeting: a file in which ranks find each other's addresses. num_threads: of each rank.
    patience: how long a collective waits for a rank that is alive but does not answer.
    """

    path: str
    dtype: torch.dtype
    num_ranks: int
    meeting: str
    num_threads: int
    patience: timedelta


def joined(rank: int, place: Place, model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """Wait for the other ranks, and return the model with this rank's share only."""
    store = dist.FileStore(place.meeting, place.num_ranks)  # pyright: ignore[reportPrivateImportUsage]
    with on_this_machine():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=place.num_ranks, timeout=place.patience)
        return shard(model, init_device_mesh("cpu", (place.num_ranks,)))


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


def follow(rank: int, place: Place, pipe: "Connection[Any, Any]") -> None:
    """In another rank's process: join, then run the share of this rank until rank 0 ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is rank 0's to handle
    Thread(target=end_with_rank_0, daemon=True).start()
    torch.set_num_threads(place.num_threads)
    try:
        model = load_model(place.path, place.dtype)
        pipe.send_bytes(READY)
        follow_plans(joined(rank, place, model), share_of(model.config, place.num_ranks), pipe)
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


@torch.inference_mode(False)  # with it, DTensor works out `linear` anew for each new number of tokens
@torch.no_grad()
def follow_plans(model: Qwen3ForCausalLM, share: Qwen3Config, pipe: "Connection[Any, Any]") -> None:
    """Carry out messages until rank 0 is gone (EOFError)."""
    pool = None
    while True:
        message = receive(pipe)
        if isinstance(message, PoolSize):
            pool = message.make(model, share)
            continue
        assert pool is not None, "rank 0 makes its pool first"
        if isinstance(message, Copy):
            pool.copy_blocks(message.sources, message.targets)
        else:
            model(message.token_ids, pool, message.meta, rows=message.rows)
