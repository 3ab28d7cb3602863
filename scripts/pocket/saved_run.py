"""Course machinery. Saves a training run every few steps, so that one that was cut off can continue."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scripts.pocket.plan import Plan

import torch

from mini_engine.base.errors import UserError

EVERY = 50  # steps


@dataclass
class SavedRun:
    """A file that holds a run's state: weights, optimizers, schedules, and the losses so far.

    Fields:
        path: the file; it is replaced as a whole.
    """

    path: Path
    losses: list[float] = field(default_factory=list)

    def restore(self, plan: Plan, parts: Sequence[Any], report: Callable[[float], None]) -> int:
        """Load the parts from the file if there is one. Return the number of steps done, each of them reported.

        Raises:
            UserError: the file belongs to a run with other settings.
        """
        if not self.path.exists():
            return 0
        state = torch.load(self.path, weights_only=False)
        if state["plan"] != asdict(plan):
            raise UserError(f"{self.path} holds a run with other settings; give the same ones, or delete the file")
        for part, content in zip(parts, state["parts"], strict=True):
            part.load_state_dict(content)
        self.losses = state["losses"]
        for loss in self.losses:
            report(loss)
        return len(self.losses)

    def note(self, loss: float, plan: Plan, parts: Sequence[Any]) -> None:
        """Count a step; save the run after every EVERY of them."""
        self.losses.append(loss)
        if len(self.losses) % EVERY == 0:
            scratch = self.path.with_name(self.path.name + ".new")
            contents = [part.state_dict() for part in parts]
            torch.save({"plan": asdict(plan), "losses": self.losses, "parts": contents}, scratch)
            scratch.replace(self.path)
