"""Lesson 20. The paths of its smoke script. Each opens an engine, and lets agents take turns in it."""

from scripts.smoke.agents import Agents
from scripts.smoke.tiers import store_of

from mini_engine.engine.scheduler_config import SchedulerConfig


def crowded(trial: Agents, survives: bool = False, **options) -> None:
    """Let a crowd pass while all tools run. survives: it should leave the sessions' texts alone."""
    trial.prepare(**options)
    for is_held in (False, True):  # a session is held from its second turn on
        trial.turn()
        before = trial.num_cached()
        trial.crowd()
        kept = trial.num_cached() == before
        trial.shows(kept or not (survives and is_held), "the crowd has evicted a session's blocks")
    trial.turn()


def together(trial: Agents, preempt: bool = False, **options) -> None:
    """Answer the turns of all agents together."""
    trial.prepare(**options)
    *_, last = [trial.turn(preempt=preempt) for _ in range(3)]
    trial.shows(all(one.num_cached_tokens for one in last), "a turn did not find the one before")
    trial.shows(not preempt or any(one.num_preemptions for one in trial.requests), "no request was preempted")


def alone(trial: Agents) -> None:
    """Answer one agent's turn after another's."""
    trial.prepare()
    last = [trial.turn([agent]) for _ in range(2) for agent in range(len(trial.texts))][-1]
    trial.shows(last[0].num_cached_tokens, "a turn did not find the one before")


def forked(trial: Agents) -> None:
    """Go on with one agent's text in several sessions: they begin behind the prefix that it has cached."""
    trial.prepare()
    trial.turn([0])
    trial.texts = [trial.texts[0] + ids for ids in trial.prompts]
    trial.shows(all(one.num_cached_tokens for one in trial.turn()), "a session did not find the text it shares")


def last_resort(trial: Agents) -> None:
    """Let a crowd run at once that needs the sessions' blocks too."""
    trial.prepare()
    trial.turn()
    trial.turn()
    trial.crowd(4, trial.shared.scheduler.manager.num_usable_blocks // 5)
    trial.shows(trial.sessions.stats.evicted, "no block was evicted that a session referred to")
    trial.turn()


def compacted(trial: Agents) -> None:
    """Let every agent go on from a short text; what they have left is evicted first."""
    trial.prepare()
    trial.turn()
    old, trial.texts = trial.texts, [ids + trial.prompts[0] for ids in trial.prompts]
    trial.turn()
    trial.shows(trial.sessions.stats.num_left == len(old), "a session has not left its text")
    before = trial.num_cached()
    trial.crowd()
    trial.shows(trial.num_cached() == before and trial.num_cached(old) != before, "a text was kept that was left")
    trial.turn()


def closed(trial: Agents) -> None:
    """Close every session while a turn of it runs. The crowd evicts what they have said."""
    trial.prepare()
    trial.turn()
    requests = trial.begin(range(len(trial.texts)))
    trial.shared.step()
    for request in requests:
        trial.shows(trial.cache.close_session(request.session, None), "a session was not known")
    trial.run_out(trial.shared)
    before = trial.num_cached()
    trial.crowd()
    trial.shows(sum(trial.num_cached()) < sum(before), "nothing was evicted of what a closed session has said")
    trial.turn()


def host(trial: Agents) -> None:
    """Lose the pool's cache after a crowd that fills all of host memory: the sessions' texts are still there."""
    trial.prepare()
    trial.prepare(kv_host_bytes=trial.shared.runner.pool.bytes // 2, kv_always=True)
    trial.turn()
    trial.crowd()
    trial.cache.clear()
    trial.turn()
    trial.shows(store_of(trial.shared).restored_tokens, "host memory has lost the sessions' texts")


def longest_prefix_first(trial: Agents) -> None:
    """Let agents come back behind a crowd that waits: they go first."""
    limits = SchedulerConfig(1, max_num_batched_tokens=512, chunked_prefill_size=512)
    trial.prepare(longest_prefix_first=True, scheduler_config=limits)
    trial.turn()
    [first, _] = trial.add(trial.shared, [trial.rotated(start, 99) for start in (1, 2)])
    requests = trial.begin(range(len(trial.texts)))
    while not first.output_ids:
        trial.shared.step()
    trial.shows(all(one.output_ids for one in requests), "a crowd that had no prefix went first")
    trial.run_out(trial.shared)
