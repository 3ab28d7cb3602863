"""Lesson 13. The processes of a model that is cut in shares: rank 0 is the engine's own, the others follow its plans.

    rank 0     schedule -> send the plan -> its share of the model -> choose tokens -> update
    others                 take the plan -> their share of the model

Only rank 0 has a scheduler and samples, so ranks cannot disagree about a token: the next plan brings it.

Ranks live and die together. The others wait for the end of rank 0 in a thread; a thread of rank 0 waits for theirs.
"""

import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mini_engine.config import Qwen3Config
from mini_engine.errors import EngineDead, UserError, first_line
from mini_engine.parallel.follow import READY, Place, follow, joined
from mini_engine.parallel.messages import Message, packed
from mini_engine.parallel.shard import share_of
from mini_engine.weights import load_model, resolve_checkpoint

PATIENCE = timedelta(seconds=60)
NOTICE_SECONDS = 5.0  # for the end of a process to be noticed after its connections have broken
GUARD = 'in a script, start it under `if __name__ == "__main__":`'


class Ranks:
    """All ranks but this one, which is rank 0. Ends them with the `with` block.

    torch's threads are divided among the ranks as long as they run.

    Args:
        path: a checkpoint directory or hub id; every rank reads it.
        patience: how long a rank that is alive may leave the others waiting before all of them end.

    Raises:
        UserError: the model cannot be shared by so many ranks, this process is a rank already, or one of them ended
            before it was ready.
    """

    def __init__(
        self, path: str, num_ranks: int, dtype: torch.dtype = torch.float32, patience: timedelta = PATIENCE
    ) -> None:
        if dist.is_initialized():
            raise UserError("this process is a rank of another model already; close that one first")
        self.config = share_of(Qwen3Config.from_dir(resolve_checkpoint(path)), num_ranks)
        self.lost, self.losing = "", threading.Lock()
        self.num_ranks, self.threads = num_ranks, torch.get_num_threads()
        self.folder = tempfile.TemporaryDirectory(prefix="mini-engine-", ignore_cleanup_errors=True)
        meeting = str(Path(self.folder.name) / "ranks")
        place = Place(str(path), dtype, num_ranks, meeting, max(1, self.threads // num_ranks), patience)
        self.pipes, self.processes = [], []
        self.watch = threading.Thread(target=self._watch, daemon=True)
        try:
            self._begin(place)
        except BaseException:  # Ctrl-C too
            self.close()
            raise

    def _begin(self, place: Place) -> None:
        """Start the others, load the model while they do, and join them."""
        context = mp.get_context("spawn")
        with ctrl_c_ignored():
            for rank in range(1, self.num_ranks):
                ours, theirs = context.Pipe()
                process = context.Process(target=follow, args=(rank, place, theirs), daemon=True)
                process.start()
                theirs.close()  # or the end of the process would not end the pipe
                self.pipes.append(ours)
                self.processes.append(process)
        torch.set_num_threads(place.num_threads)
        model = load_model(place.path, place.dtype)
        self._await_ready()
        self.watch.start()
        with self.in_step():
            self.model = joined(0, place, model)

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
        """Send a message to all other ranks."""
        sent = packed(message)
        for pipe in self.pipes:
            pipe.send_bytes(sent)

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
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join()
            pipe.close()
        self.processes, self.pipes = [], []
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
