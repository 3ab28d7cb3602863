"""Course machinery. Runs an engine's steps to the end, and gives up if an engine never gets there."""

from collections.abc import Iterator

from mini_engine.engine.engine import Engine, StepResult
from mini_engine.engine.request import Request

PREEMPT_EVERY = 3  # steps
MOST_IDLE = 100_000  # steps that compute nothing: they wait for another process, which takes a millisecond or more


def steps_of(engine: Engine, preempt: bool = False, num_requests: int = 0) -> Iterator[StepResult]:
    """Run steps until no request is unfinished, and yield each one's result. The caller may add requests meanwhile.

    Args:
        preempt: take back the newest request's blocks every few steps.
        num_requests: the number of requests to expect; the run does not end earlier.

    Raises:
        RuntimeError: there were more steps than the requests can need.
    """
    requests: dict[str, Request] = {}
    num_computing = num_idle = 0
    while engine.has_unfinished or len(requests) < num_requests:
        requests |= engine.scheduler.requests
        if num_computing >= most_steps(requests) or num_idle >= MOST_IDLE:
            left = ", ".join(sorted(engine.scheduler.requests))
            raise RuntimeError(f"{left}: unfinished after {num_computing} steps, and {num_idle} that computed nothing")
        result = engine.step()
        yield result
        is_idle = result.stats.prefill_tokens + result.stats.decode_tokens == 0
        num_computing, num_idle = num_computing + (not is_idle), num_idle + is_idle
        if preempt and (num_computing + num_idle) % PREEMPT_EVERY == 0:
            take_back(engine)


def most_steps(requests: dict[str, Request]) -> int:
    """Return the most steps that requests can need: one for each token, again for each time that all are lost.

    `take_back` takes a request's tokens at most once for each token of its answer. When the engine preempts a request,
    the oldest one goes on, so that costs no step.
    """
    return sum(request.max_kv_tokens * (1 + request.params.max_tokens) for request in requests.values())


def take_back(engine: Engine) -> None:
    """Preempt the newest running request that has got further than when it was last preempted."""
    newest = next((request for request in reversed(engine.scheduler.running) if request.has_caught_up), None)
    if newest is not None:
        engine.scheduler.preempt(newest)
