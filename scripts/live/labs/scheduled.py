"""Course machinery. Shared by the labs with a scheduler: its requests, and those that are left."""

from typing import Any

from scripts.live.labs.lab import Lab

from mini_engine.base.errors import UserError
from mini_engine.engine.request import FinishReason, Request
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler import Scheduler


class Scheduled(Lab):
    """A lab that steps a scheduler."""

    scheduler: Scheduler

    @property
    def alive(self) -> list[str]:
        return list(self.scheduler.requests)

    def add(self, name: str, prompt_ids: list[int], answer: int, priority: int = 0) -> UserError | None:
        """Put a request into the queue. Return the scheduler's error if it refuses."""
        params = SamplingParams(temperature=0, max_tokens=answer, seed=0)
        try:
            self.scheduler.add(Request(name, prompt_ids, params, priority))
        except UserError as error:
            return error
        return None

    def leave(self, name: str) -> None:
        if request := self.scheduler.requests.get(name):
            self.scheduler.finish(request, FinishReason.ABORT)

    def counters(self) -> dict[str, Any]:
        scheduler = self.scheduler
        queues = {"running": len(scheduler.running), "waiting": len(scheduler.waiting)}
        return queues | {"preempted so far": scheduler.num_preemptions}
