"""Lesson 18. Processes of a tensor-parallel model: rank 0 is the engine's own, the others follow its plans.

    rank 0     schedule -> send the plan -> its share of the model -> choose tokens -> update
    others                 take the plan -> their share of the model

Only rank 0 has a scheduler and samples, so ranks cannot disagree about a token: the next plan contains it.

Ranks start and end together. A thread of rank 0 waits for the end of any other rank, or for its silence (`pulse.py`);
a thread of each other rank waits for rank 0's.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from mini_engine.base.errors import EngineDead, UserError, first_line
from mini_engine.checkpoint.stored import Part, Stored
from mini_engine.distributed.tensor_parallel.follow import MEET, Place, Read, part_of_rank
from mini_engine.distributed.tensor_parallel.messages import Message, packed
from mini_engine.distributed.tensor_parallel.others import Others
from mini_engine.distributed.tensor_parallel.pulse import pulse_bytes
from mini_engine.distributed.tensor_parallel.shard import RankCut
from mini_engine.distributed.tensor_parallel.shared_block import SharedBlock
from mini_engine.distributed.tensor_parallel.transport import transport_for
from mini_engine.engine.runner import Group, Step

PATIENCE = timedelta(hours=1)  # Ctrl-Z may interrupt a collective, whose clock keeps running


@dataclass(frozen=True)
class CheckedCut(RankCut):
    """Calls `check` before each tensor: loading may take minutes, but ends at once if another rank is lost."""

    check: Callable[[], None]

    def part_of(self, name: str, shape: Sequence[int], config: Any) -> Part:
        """Return the part of a stored tensor that the rank loads."""
        self.check()
        return super().part_of(name, shape, config)


class Ranks(Group):
    """All ranks but this one, which is rank 0. They end with the `with` block.

    As long as they run, torch's threads are divided among the ranks. The others start at once and read the checkpoint;
    `join` joins them.

    Args:
        path: a checkpoint directory; every rank reads its part of it.
        read: checks the checkpoint; its family's `stored`.
        backend: of the layers: "auto", "packed", "torch" or "reference".
        patience: how long a rank that is alive may leave the others waiting before all of them end.
        transport: connects the ranks: "memory", "gloo", or "auto", the first of them that works here.
        device: "cpu", or "cuda" for a GPU each, connected by NCCL; the latter has never been run.

    Attributes:
        model: this rank's share, from `join` on. collectives: this rank's.

    Raises:
        UserError: the transport cannot work here.
    """

    model: Any

    def __init__(
        self,
        path: str,
        num_ranks: int,
        read: Read,
        dtype: torch.dtype = torch.float32,
        backend: str = "auto",
        patience: timedelta = PATIENCE,
        transport: str = "auto",
        device: str = "cpu",
    ) -> None:
        self.num_ranks, self.threads = num_ranks, torch.get_num_threads()
        self.patience = patience
        self.transport = transport_for(transport, num_ranks, Path(tempfile.gettempdir()), patience, device)
        self.collectives = self.transport.collectives(0)
        threads = max(1, self.threads // num_ranks)
        pulse = SharedBlock(pulse_bytes(num_ranks))
        self.place = Place(str(path), read, dtype, backend, num_ranks, self.transport, pulse, threads, device)
        self.others = Others(self.place)
        try:
            self.others.start()
            torch.set_num_threads(threads)
        except BaseException:  # Ctrl-C too
            self.close()
            raise

    def join(self, stored: Stored) -> Any:
        """Load this rank's share of a checkpoint while the others load theirs, join them, and return it.

        Raises:
            UserError: the model cannot be shared, or the requested layers do not work, or a rank ended before it was
                ready.
        """
        cut = CheckedCut(0, self.num_ranks, self.check)
        self.model = part_of_rank(self.place, stored, cut, self.collectives)
        self._await_ready()
        with self.in_step():
            for pipe in self.others.pipes:
                pipe.send_bytes(MEET)
            self.transport.connect(0)
        self.others.has_joined = True
        return self.model

    def _await_ready(self) -> None:
        try:
            for reply in self.others.replies:
                reply.recv_bytes()
        except (EOFError, OSError):
            self.others.await_notice()
            self.check()
            raise

    def check(self) -> None:
        """Raise UserError if a rank is lost."""
        if self.others.lost:
            raise UserError(self.others.lost)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def processes(self) -> "list[SpawnProcess]":
        """The processes of the other ranks."""
        return self.others.processes

    @property
    def fault(self) -> str:
        """The reason no step can run any more; empty while all ranks run."""
        return self.others.lost and f"{self.others.lost}; the model is incomplete without all its ranks; start it again"

    def send(self, message: Message) -> None:
        """Send a message to all other ranks, packed once."""
        sent = packed(message)
        for pipe in self.others.pipes:
            pipe.send_bytes(sent)

    def tell(self, message: Message) -> None:
        """Send a message to all other ranks. Raises EngineDead if one is gone."""
        with self.in_step():
            self.send(message)

    def tell_each(self, messages: Sequence[Message]) -> None:
        """Send each of the other ranks its own message. Raises EngineDead if one is gone."""
        with self.in_step():
            for pipe, message in zip(self.others.pipes, messages, strict=True):
                pipe.send_bytes(packed(message))

    def ask(self, message: Message, num_bytes: int) -> list[bytes]:
        """Send a message to all other ranks; return the answer of each.

        Args:
            num_bytes: of each answer.

        Raises:
            EngineDead: a rank is gone, or does not answer in time.
        """
        with self.in_step():
            self.send(message)
            answers = [self._answer(rank, reply, num_bytes) for rank, reply in enumerate(self.others.replies, 1)]
        return answers

    def _answer(self, rank: int, reply: "Connection[Any, Any]", num_bytes: int) -> bytes:
        """Return the answer of a rank."""
        if not reply.poll(self.patience.total_seconds()):
            raise TimeoutError(f"rank {rank} does not answer")
        answer = reply.recv_bytes()
        if len(answer) != num_bytes:
            raise ValueError(f"rank {rank} answered with {len(answer)} bytes instead of {num_bytes}")
        return answer

    @contextmanager
    def running(self, step: Step) -> Iterator[None]:
        """Have all ranks run a step: send its plan to the others; the `with` block runs this rank's share.

        Raises:
            EngineDead: a rank has ended, or this one was interrupted within a step.
        """
        with self.in_step():
            self.send(step)
            yield

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Wrap an action of all ranks. If it breaks off here, the others are out of step and are ended.

        Raises:
            EngineDead: a rank has ended or does not answer, or something else went wrong in rank 0.
        """
        if self.others.lost:
            raise EngineDead(self.fault)
        try:
            yield
        except Exception as error:
            self.others.await_notice()
            self.others.lose(f"rank 0 of {self.num_ranks} could not finish a step ({first_line(error)})")
            raise EngineDead(self.fault) from error
        except BaseException:
            self.others.lose(f"rank 0 of {self.num_ranks} was interrupted in the middle of a step")
            raise

    def close(self) -> None:
        """End all other ranks, whatever they are doing. Idempotent."""
        self.others.end()
        self.transport.disconnect()
        torch.set_num_threads(self.threads)
