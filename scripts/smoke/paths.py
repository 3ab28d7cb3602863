"""Course machinery. The paths that smoke scripts share. Each takes a trial and an engine's options.

A path that did not do what it is named for notes that it was not exercised; one that cannot run here returns why.
"""

from scripts.smoke.run import LeftOut, Outcome, Path
from scripts.smoke.trial import Trial

from mini_engine.base.errors import UserError
from mini_engine.engine.request import Request

CHUNK = 7  # tokens: less than a block


def alone(trial: Trial, **options) -> Outcome:
    """Run the prompts one after another, without prefix caching."""
    engine = trial.engine(enable_prefix_caching=False, **options)
    return trial.outcome(engine, trial.ask_in_turn(engine))


def batched(trial: Trial, **options) -> Outcome:
    """Run all prompts together."""
    engine = trial.engine(**options)
    return trial.outcome(engine, trial.ask(engine))


def chunked(trial: Trial, chunk: int = CHUNK, **options) -> Outcome | LeftOut:
    """Run all prompts together, `chunk` tokens of a prompt a step."""
    if all(len(ids) <= chunk for ids in trial.prompts):
        return "no prompt is longer"
    return batched(trial, chunk=chunk, **options)


def preempted(trial: Trial, preempt: bool = True, **options) -> Outcome:
    """Take back the newest request's blocks every few steps. preempt: False leaves that to a pool that is too small."""
    engine = trial.engine(**{"chunk": CHUNK} | options)
    return if_preempted(trial.outcome(engine, requests := trial.ask(engine, preempt=preempt)), requests)


def if_preempted(outcome: Outcome, requests: list[Request]) -> Outcome:
    """Note if none of the requests was preempted. Return the outcome."""
    return outcome.exercising(any(one.num_preemptions for one in requests), "no request was preempted")


def cached(trial: Trial, **options) -> Outcome:
    """Run the prompts twice: the second time every prompt longer than a block begins after a cached prefix."""
    engine = trial.engine(**options)
    trial.ask(engine)
    requests = trial.ask(engine)
    found = any(request.num_cached_tokens for request in requests)
    return trial.outcome(engine, requests).exercising(found, "no prompt found a prefix")


def guesses(trial: Trial, **options) -> Outcome:
    """Run the prompts twice with guesses; rejected ones are taken back."""
    engine, rejected, requests = trial.engine(speculate=4, **options), 0, []
    for _ in range(2):
        requests = trial.ask(engine)
        rejected += trial.summary.num_drafted - trial.summary.num_accepted
    return trial.outcome(engine, requests).exercising(rejected, "no guess was taken back")


def rounded(trial: Trial, kv_dtype: str, path: Path = batched, **options) -> Outcome | LeftOut:
    """Run a path with K and V rounded. Expected: the tokens of one process that rounds alike, each prompt alone."""

    def reference() -> list[list[int]]:
        plain = Trial("reference", trial.args, trial.prompts, trial.opened)
        return alone(plain, kv_dtype=kv_dtype, kernel="reference").outputs

    expected = trial.opened.once(("reference", kv_dtype), reference)
    done = path(trial, kv_dtype=kv_dtype, **options)
    if isinstance(done, Outcome):
        done.expected = expected
    return done


def if_possible(trial: Trial, path: Path = batched, **options) -> Outcome | LeftOut:
    """Run a path with these options, unless they cannot work here."""
    try:
        return path(trial, **options)
    except UserError as why:
        return str(why)
