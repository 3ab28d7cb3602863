"""Course machinery. Shows the training's progress: a bar on a terminal, an occasional line in a log."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SMOOTHING = 0.95
LINES_IN_A_LOG = 20


@contextmanager
def progress(steps: int, quiet: bool) -> Iterator[Callable[[float], None]]:
    """Show the smoothed loss and the time left on stderr. Yields a function to call with each step's loss."""
    console = Console(stderr=True)
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("training", total=steps, loss=0.0)
        [state] = bar.tasks

        def report(loss: float) -> None:
            smooth = SMOOTHING * state.fields["loss"] + (1 - SMOOTHING) * loss if state.completed else loss
            bar.update(task, advance=1, loss=smooth)
            if not (quiet or console.is_terminal) and state.completed % max(1, steps // LINES_IN_A_LOG) == 0:
                elapsed = state.elapsed or 0.0  # None before the first step
                left = elapsed / state.completed * (steps - state.completed) / 60
                console.print(f"step {state.completed:.0f} of {steps}, loss {smooth:.3f}, {left:.1f} minutes left")

        yield report
