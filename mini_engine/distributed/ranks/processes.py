"""Lesson 13. The processes of a model that is cut in shares: rank 0 is the engine's own, the others follow its plans.

    rank 0     schedule -> send the plan -> its share of the model -> choose tokens -> update
    others                 take the plan -> their share of the model

Only rank 0 has a scheduler and samples, so ranks cannot disagree about a token: the next plan brings it.

Ranks live and die together. The others wait for the end of rank 0 in a thread; a thread of rank 0 waits for theirs.
"""

import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mini_engine.checkpoint.weights import load_model
from mini_engine.distributed.ranks.follow import READY, Load, Place, follow, meet, part_of_rank
from mini_engine.distributed.ranks.messages import Message, packed
from mini_engine.engine.runner import Step
from mini_engine.errors import EngineDead, UserError, first_line

PATIENCE = timedelta(seconds=60)
NOTICE_SECONDS = 5.0  # for the end of a process to be noticed after its connections have broken
GUARD = 'in a script, start it under `if __name__ == "__main__":`'


class Ranks:
    """All ranks but this one, which is rank 0. Ends them with the `with` block.

    torch's threads are divided among the ranks as long as they run. The others are started at once and read the
    checkpoint; `join` joins them, with what this process has read meanwhile.

    Args:
        path: a checkpoint directory or hub id; every rank reads it.
        backend: of the layers: "auto", "packed", "torch" or "reference".
        load: reads the checkpoint; `load_model`, or lesson 11's for a hybrid.
        patience: how long a rank that is alive may leave the others waiting before all of them end.

    Attributes:
        model: this rank's share, from `join` on.

    Raises:
        UserError: this process is a rank already.
    """

    model: Any

    def __init__(
        self,
        path: str,
        num_ranks: int,
        dtype: torch.dtype = torch.float32,
        backend: str = "auto",
        load: Load = load_model,
        patience: timedelta = PATIENCE,
    ) -> None:
        if dist.is_initialized():
            raise UserError("this process is a rank of another model already; close that one first")
        self.lost, self.losing = "", threading.Lock()
        self.num_ranks, self.threads = num_ranks, torch.get_num_threads()
        self.folder = tempfile.TemporaryDirectory(prefix="mini-engine-", ignore_cleanup_errors=True)
        meeting = str(Path(self.folder.name) / "ranks")
        threads = max(1, self.threads // num_ranks)
        self.place = Place(str(path), load, dtype, backend, num_ranks, meeting, threads, patience)
        self.pipes, self.replies, self.processes = [], [], []
        self.watch = threading.Thread(target=self._watch, daemon=True)
        try:
            self._begin()
        except BaseException:  # Ctrl-C too
            self.close()
            raise

    def _begin(self) -> None:
        """Start the others."""
        context = mp.get_context("spawn")
        with ctrl_c_ignored():
            for rank in range(1, self.num_ranks):
                ours, theirs = context.Pipe()
                reply, answer = context.Pipe(duplex=False)
                process = context.Process(target=follow, args=(rank, self.place, theirs, answer), daemon=True)
                process.start()
                theirs.close()  # or the end of the process would not end the pipe
                answer.close()
                self.pipes.append(ours)
                self.replies.append(reply)
                self.processes.append(process)
        torch.set_num_threads(self.place.num_threads)

    def join(self, model: Any) -> Any:
        """Join the other ranks; return this one's share of `model`, whose weights it takes over.

        Raises:
            UserError: the model cannot be shared or have the layers that were asked for, or a rank ended before it was
                ready.
        """
        self.model = part_of_rank(0, self.place, model)
        self._await_ready()
        self.watch.start()
        with self.in_step():
            meet(0, self.place)
        return self.model

    def _await_ready(self) -> None:
        for rank, (pipe, process) in enumerate(zip(self.pipes, self.processes, strict=True), 1):
            try:
                said = pipe.recv_bytes()
            except (EOFError, OSError):
                process.join(NOTICE_SECONDS)
                ended = f"rank {rank} of {self.num_ranks} ended before it was ready (exit code {process.exitcode})"
                raise UserError(f"{ended}; its error is printed above; {GUARD}") from None
            if said != READY:
                raise UserError(f"rank {rank} of {self.num_ranks} cannot start: {said.decode()}")

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def fault(self) -> str:
        """Why no step can run any more; empty as long as all ranks do."""
        return self.lost and f"{self.lost}; the model is incomplete without all its ranks, start it again"

    def send(self, message: Message) -> None:
        """Send a message to all other ranks, packed once."""
        sent = packed(message)
        for pipe in self.pipes:
            pipe.send_bytes(sent)

    def tell(self, message: Message) -> None:
        """Send a message to all other ranks. Raises EngineDead if one is gone."""
        with self.in_step():
            self.send(message)

    def tell_each(self, messages: Sequence[Message]) -> None:
        """Send each of the other ranks a message of its own. Raises EngineDead if one is gone."""
        with self.in_step():
            for pipe, message in zip(self.pipes, messages, strict=True):
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
            answers = [self._answer(rank, reply, num_bytes) for rank, reply in enumerate(self.replies, 1)]
        return answers

    def _answer(self, rank: int, reply: "Connection[Any, Any]", num_bytes: int) -> bytes:
        """Return what a rank answers."""
        if not reply.poll(self.place.patience.total_seconds()):
            raise TimeoutError(f"rank {rank} does not answer")
        answer = reply.recv_bytes()
        if len(answer) != num_bytes:
            raise ValueError(f"rank {rank} answered with {len(answer)} bytes instead of {num_bytes}")
        return answer

    @contextmanager
    def running(self, step: Step) -> Iterator[None]:
        """Have all ranks run a step: send its plan to the others; this rank runs its share in the `with` block.

        Raises:
            EngineDead: a rank has ended, or this one was interrupted within a step.
        """
        with self.in_step():
            self.send(step)
            yield

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Mark what all ranks do together. Where it breaks off here, the others are out of step, and are ended.

        Raises:
            EngineDead: a rank has ended or does not answer, or something else went wrong in rank 0.
        """
        if self.lost:
            raise EngineDead(self.fault)
        try:
            yield
        except Exception as error:
            self.watch.join(NOTICE_SECONDS if self.processes else 0)
            self._lose(f"rank 0 of {self.num_ranks} could not finish a step ({first_line(error)})")
            raise EngineDead(self.fault) from error
        except BaseException:
            self._lose(f"rank 0 of {self.num_ranks} was interrupted in the middle of a step")
            raise

    def _watch(self) -> None:
        """Note which rank ended by itself, and end the others."""
        if not self.processes:
            return
        ended = wait([process.sentinel for process in self.processes])
        rank, process = next((i, p) for i, p in enumerate(self.processes, 1) if p.sentinel in ended)
        process.join()
        self._lose(f"rank {rank} of {self.num_ranks} has ended ({self._last_words(rank) or process.exitcode})")

    def _last_words(self, rank: int) -> str:
        """Return the error that a rank sent before it ended; empty if it was killed."""
        try:
            pipe = self.pipes[rank - 1]
            return pipe.recv_bytes().decode() if pipe.poll() else ""
        except (EOFError, OSError):
            return ""

    def _lose(self, why: str) -> None:
        """Note why the model is incomplete, unless that is known, and kill all other ranks."""
        with self.losing:
            self.lost = self.lost or why
        for process in self.processes:
            process.kill()

    def close(self) -> None:
        """End all other ranks, whatever they do. Idempotent."""
        self._lose("the ranks of this model have been ended")
        if self.watch.is_alive():
            self.watch.join()
        for process, *pipes in zip(self.processes, self.pipes, self.replies, strict=True):
            process.join()
            for pipe in pipes:
                pipe.close()
        self.processes, self.pipes, self.replies = [], [], []
        if dist.is_initialized():
            dist.destroy_process_group()
        torch.set_num_threads(self.threads)
        self.folder.cleanup()


@contextmanager
def ctrl_c_ignored() -> Iterator[None]:
    """Ignore Ctrl-C while processes start. They inherit that, so it does not interrupt their imports either."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set a handler
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
