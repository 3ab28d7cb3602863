"""Course machinery. Shared by the labs with a scheduler: its events, and which requests are left."""

from typing import TYPE_CHECKING

from scripts.live.labs.events import Event
from scripts.live.labs.lab import is_full
from scripts.traces.tape import Tape

if TYPE_CHECKING:  # a reader's own may take its place
    from mini_engine.engine.scheduler import Scheduler


class Scheduled:
    """A world in which a scheduler is stepped. A lab says how a request arrives and what one step does."""

    tape: Tape
    scheduler: "Scheduler"

    def arrive(self, name: str, text: str) -> None:
        raise NotImplementedError

    def step(self) -> None:
        raise NotImplementedError

    def happen(self, event: Event) -> None:
        if event.kind == "+":
            self.arrive(event.name, event.text)
        elif event.kind == "-":
            self.abort(event.name)
        elif event.kind == "*":
            while self.scheduler.requests and not is_full(self.tape):
                self.step()
        else:
            self.step()

    @property
    def alive(self) -> list[str]:
        return list(self.scheduler.requests)

    def abort(self, name: str) -> bool:
        """End a request. Return whether there was one."""
        from mini_engine.engine.request import FinishReason

        request = self.scheduler.requests.get(name)
        if request:
            self.scheduler.finish(request, FinishReason.ABORT)
        return request is not None
