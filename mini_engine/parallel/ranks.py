"""Lesson 13. The processes of a model that is cut in shares: rank 0 is the engine's own, the others follow its plans.

    rank 0     schedule -> send the plan -> its share of the model -> choose tokens -> update
    others                 take the plan -> their share of the model

Only rank 0 has a scheduler and samples, so ranks cannot disagree about a token: the next plan brings it.
"""

import os
import signal
import socket
import sys
from datetime import timedelta
from multiprocessing.connection import wait
from threading import Thread
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from mini_engine.attention.registry import load_kernel
from mini_engine.config import Qwen3Config
from mini_engine.engine.runner import Step
from mini_engine.errors import UserError, first_line
from mini_engine.kv.block_tensor import KvPool
from mini_engine.model.qwen3 import Qwen3ForCausalLM
from mini_engine.parallel.shard import shard, share_of
from mini_engine.weights import load_model

HOST = "127.0.0.1"
IDLE_LIMIT = timedelta(days=365)  # a rank waits for the next plan as long as there are no requests
JOIN_SECONDS = 10.0


class Place(NamedTuple):
    """What a rank needs to know to join. path: the checkpoint. num_threads: of each rank."""

    path: str
    dtype: torch.dtype
    num_ranks: int
    port: int
    num_threads: int


class PoolSize(NamedTuple):
    """What the other ranks need to know to make their pools."""

    num_blocks: int
    block_size: int
    kernel: str

    def make(self, model: Qwen3ForCausalLM, share: Qwen3Config) -> KvPool:
        """Return a rank's pool; UserError if that is impossible."""
        attend = load_kernel(self.kernel, model.device, model.dtype)
        return KvPool(share, self.num_blocks, self.block_size, attend, model.dtype, model.device)


class Ranks:
    """All ranks but this one, which is rank 0. Ends them with the `with` block.

    Args:
        path: a checkpoint directory or hub id; every rank reads it.

    Raises:
        UserError: the model cannot be shared by so many ranks, this process is a rank already, or one of them ended
            before it was ready.
    """

    def __init__(self, path: str, num_ranks: int, dtype: torch.dtype = torch.float32) -> None:
        if dist.is_initialized():
            raise UserError("this process is a rank of another model already; close that one first")
        model = load_model(path, dtype)
        self.config = share_of(model.config, num_ranks)
        self.lost = ""
        self.place = Place(str(path), dtype, num_ranks, free_port(), torch.get_num_threads())
        context = mp.get_context("spawn")
        self.processes = [
            context.Process(target=follow, args=(rank, self.place), daemon=True) for rank in range(1, num_ranks)
        ]
        for process in self.processes:
            process.start()
        self.watch = Thread(target=self._watch, daemon=True)
        self.watch.start()
        try:
            self.model = joined(0, self.place, model)
        except RuntimeError as error:
            self.close()
            raise self.as_error(error) from error

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def send(self, message: Step | PoolSize | None) -> None:
        """Send a message to all other ranks; None ends them."""
        dist.broadcast_object_list([message], src=0)

    def _watch(self) -> None:
        """Note which rank ended by itself, and end the others."""
        ended = wait([process.sentinel for process in self.processes])
        if not self.processes:
            return
        rank, process = next((i, p) for i, p in enumerate(self.processes, 1) if p.sentinel in ended)
        process.join()
        self.lost = f"rank {rank} of {self.place.num_ranks} has ended (exit code {process.exitcode})"
        self._kill()

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()

    def as_error(self, error: Exception) -> UserError:
        """Return what to say where an exchange failed: which rank is gone."""
        self.watch.join(JOIN_SECONDS)
        return UserError(f"{self.lost or first_line(error)}; the model is incomplete without it, start again")

    def close(self) -> None:
        """End all other ranks, whatever they do."""
        processes, self.processes = self.processes, []
        for process in processes:
            process.kill()
            process.join(JOIN_SECONDS)
        if dist.is_initialized():
            dist.destroy_process_group()


def joined(rank: int, place: Place, model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """Wait for the other ranks, and return the model with this rank's share only."""
    address = f"tcp://{HOST}:{place.port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=place.num_ranks, timeout=IDLE_LIMIT)
    return shard(model, init_device_mesh("cpu", (place.num_ranks,)))


def follow(rank: int, place: Place) -> None:
    """In another rank's process: run its share of each plan until rank 0 has no more, or has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is rank 0's to handle
    torch.set_num_threads(place.num_threads)
    try:
        model = joined(rank, place, load_model(place.path, place.dtype))
        follow_plans(model, share_of(model.config, place.num_ranks))
    except (RuntimeError, UserError) as error:
        sys.stderr.write(f"rank {rank} of {place.num_ranks} ends: {first_line(error)}\n")
        sys.stderr.flush()
        os._exit(1)  # threads of the library may still wait for a rank that is gone


@torch.inference_mode()
def follow_plans(model: Qwen3ForCausalLM, share: Qwen3Config) -> None:
    """Take messages until None: a PoolSize makes a pool, a Step runs the model on it."""
    pool = None
    while (message := receive()) is not None:
        if isinstance(message, PoolSize):
            pool = message.make(model, share)
        else:
            model(message.token_ids, pool, message.meta, rows=message.rows)


def receive() -> Step | PoolSize | None:
    """Wait for rank 0's next message."""
    box: list[Step | PoolSize | None] = [None]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def free_port() -> int:
    """Return a port of this machine that is not in use."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]
