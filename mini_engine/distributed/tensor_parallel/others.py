"""Lesson 18. Rank 0's view of the other ranks: their processes, pipes to them, and a thread that notices a loss."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait

import torch.multiprocessing as mp

from mini_engine.base.signals import handling
from mini_engine.distributed.tensor_parallel.follow import Place, follow
from mini_engine.distributed.tensor_parallel.pulse import TICK_SECONDS, Pulse

NOTICE_SECONDS = 2.0  # to notice the end of a process after its connections have broken
PRINTED = '; its error is printed above; in a script, start it under `if __name__ == "__main__":`'


class Others:
    """The processes of all ranks but rank 0. If one is lost, all are ended.

    Attributes:
        lost: the reason no step can run any more; empty while steps can run.
        has_joined: to be set once all ranks are ready; an earlier end is reported as a failed start.
        pipes: take messages to each rank and bring its last error. replies: bring the answers that rank 0 waits for.
    """

    def __init__(self, place: Place) -> None:
        self.place, self.lost, self.losing = place, "", threading.Lock()
        self.has_joined = False
        self.pulse = Pulse(0, place.num_ranks, place.pulse)
        self.pipes, self.replies, self.processes = [], [], []
        self.watch = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        """Start all processes and watch them from now on."""
        context = mp.get_context("spawn")
        with ctrl_c_ignored():
            for rank in range(1, self.place.num_ranks):
                ours, theirs = context.Pipe()
                reply, answer = context.Pipe(duplex=False)
                process = context.Process(target=follow, args=(rank, self.place, theirs, answer), daemon=True)
                process.start()
                theirs.close()  # otherwise the pipe would outlive the process
                answer.close()
                self.pipes.append(ours)
                self.replies.append(reply)
                self.processes.append(process)
        self.watch.start()

    def await_notice(self) -> None:
        """After a failure here, give the watch thread time to notice the end of a process that may have caused it."""
        if self.processes:
            self.watch.join(NOTICE_SECONDS)

    def _watch(self) -> None:
        """Send heartbeats until another rank ends or sends none; note which one, and end all others."""
        ranks = {process.sentinel: rank for rank, process in enumerate(self.processes, 1)}
        while ranks and not self.lost:
            ended = [ranks[sentinel] for sentinel in wait(list(ranks), TICK_SECONDS)]
            self.pulse.tick()
            if ended:
                self.lose(self.ending_of(ended))
            for rank, process in enumerate(self.processes, 1):
                if seconds := self.pulse.seconds_lost(rank, process.pid):
                    self.lose(f"{self._name(rank)} has stopped answering (no heartbeat for {seconds:g} s)")

    def ending_of(self, ranks: list[int]) -> str:
        """Describe ranks that have ended at the same time: one that was killed, and others that noticed."""
        for rank in ranks:
            self.processes[rank - 1].join()
        rank = min(ranks, key=lambda rank: self.processes[rank - 1].exitcode)
        code, words = self.processes[rank - 1].exitcode, self._last_words(rank)
        how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        if self.has_joined:
            return f"{self._name(rank)} has ended ({words or how})"
        if words:
            return f"{self._name(rank)} cannot start: {words}"
        return f"{self._name(rank)} ended before it was ready ({how})" + (PRINTED if code > 0 else "")

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {self.place.num_ranks}"

    def _last_words(self, rank: int) -> str:
        """Return the error that a rank sent before it ended; empty if it was killed."""
        try:
            pipe = self.pipes[rank - 1]
            return pipe.recv_bytes().decode() if pipe.poll() else ""
        except (EOFError, OSError):
            return ""

    def lose(self, why: str) -> None:
        """Record why the model is incomplete, unless that is known, and kill all processes, even stopped ones."""
        with self.losing:
            self.lost = self.lost or why
        self.place.transport.interrupt()
        for process in self.processes:
            process.kill()

    def end(self) -> None:
        """End all processes, whatever they are doing. Idempotent."""
        self.lose("the ranks of this model have been ended")
        if self.watch.is_alive():
            self.watch.join()
        for process, *pipes in zip(self.processes, self.pipes, self.replies, strict=True):
            process.join()
            for pipe in pipes:
                pipe.close()
        self.processes, self.pipes, self.replies = [], [], []


@contextmanager
def ctrl_c_ignored() -> Iterator[None]:
    """Ignore Ctrl-C while processes start. They inherit that, so it does not interrupt their imports either."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set a handler
        return
    with handling(signal.SIGINT, signal.SIG_IGN):
        yield
