"""Course machinery. Runs a cell of "What works with what": an engine with its features, asked in two rounds."""

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.pages.matrix_cells import Cell
from scripts.pages.matrix_judges import difference, params_of

from mini_engine import LLM, SamplingParams, SchedulerConfig
from mini_engine.agents.sessions import Sessions
from mini_engine.assembly.engine_config import EngineConfig
from mini_engine.base.errors import UserError
from mini_engine.engine.offline import Completion
from mini_engine.kv.cache_coordinator import cache_of

GROUPS = {
    "windows": 3,
    "all kinds": 2,
    "Gemma 3": 6,
}  # a block has K and V of one group, so the same memory has more blocks
CROWD = 8  # times as many blocks and requests at a time
LEAST_SHARED = 64  # tokens; from here on the C++ kernels read keys once for all sequences that share them


class NotExercised(Exception):
    """An engine has not used one of its features, so its tokens are no evidence."""


def run(cell: Cell, device: str = "cpu") -> str:
    """Run a cell. Returns "equal", the sentence with which it is refused, or how it differs, after "differs: "."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            rounds = ask(cell, options_of(cell, folder), device)
        except UserError as error:
            return str(error).replace(folder, "DIR")
        except NotExercised as error:
            return f"differs: {error}"
    return next((wrong for answers in rounds if (wrong := difference(cell, answers))), "equal")


def options_of(cell: Cell, folder: str) -> dict[str, Any]:
    """Return the options of the cell's engine. folder: of its disk tier, if there is one."""
    times = CROWD if cell.has("is_crowd") else 1
    options: dict[str, Any] = {"num_blocks": 96} | cell.merged("options")
    options["num_blocks"] *= GROUPS.get(cell.model, 1) * times
    limits: dict[str, Any] = {"max_num_seqs": 8} | cell.merged("limits")
    for name in {"max_num_seqs", "max_num_batched_tokens"} & limits.keys():
        limits[name] *= times
    options["scheduler_config"] = SchedulerConfig(**limits)
    if cell.has("needs_folder"):
        options["kv_cache_dir"] = folder
    return options


def ask(cell: Cell, options: Mapping[str, Any], device: str = "cpu") -> list[list[Completion]]:
    """Ask everything, drop the pool's cache, and ask again: tiers must bring it back.

    Without tiers a crowd, which takes longest, is asked once.
    """
    asked, rounds, events = cell.asked, [], Counter()
    params = [params_of(asked, **cell.params_for(number)) for number in range(len(asked.prompts))]
    num_engines = 2 if cell.has("restarts") else 1
    num_rounds = 1 if cell.has("is_crowd") and "kv_host_bytes" not in options else 2
    for _ in range(num_engines):
        with llm_of(cell, options, device) as llm:
            for _ in range(num_rounds // num_engines):
                sessions = first_turns(llm, asked.prompts) if cell.has("has_turns") else {}
                rounds.append(llm.generate(asked.prompts, params, progress=False, **sessions))
                llm.engine.scheduler.manager.coordinator.clear()
            events.update(handed_over(llm))
            if cell.has("has_turns"):
                check_turns(llm)
    if cell.has("hands_over"):
        check_handed_over(events)
    if cell.has("is_crowd") and options.get("enable_prefix_caching", True):
        check_shared(rounds)
    return rounds


def llm_of(cell: Cell, options: Mapping[str, Any], device: str) -> LLM:
    """Return the cell's LLM. On a GPU decode steps are captured, and padded ones run without a graph, as on a CPU."""
    from mini_engine.assembly.build import open_engine
    from mini_engine.gpu.graphs import no_graph
    from mini_engine.text.tokenizer import Tokenizer

    model, capture = cell.asked.checkpoint, no_graph if cell.has("is_padded") else None
    engine = open_engine(model, EngineConfig.of(options), "float32", device, capture)
    return LLM.for_engine(engine, Tokenizer.load(model))


def first_turns(llm: LLM, prompts: Sequence[str]) -> dict[str, Any]:
    """Answer all of each prompt but its end, in sessions; evict half of the cache. Returns the second turns' ids."""
    sessions = [f"session {number}" for number in range(len(prompts))]
    params = SamplingParams(temperature=0, max_tokens=1)  # its K and V are not stored: the prompt continues the text
    llm.generate([llm.encode(prompt)[:-2] for prompt in prompts], params, progress=False, session_id=sessions)
    tree = cache_of(llm.engine.scheduler.manager).prefixes.tree
    tree.evict(tree.num_evictable // 2)
    return {"session_id": sessions}


def check_turns(llm: LLM) -> None:
    """Raise NotExercised unless a second turn continued what was stored of a first one."""
    policy = cache_of(llm.engine.scheduler.manager).prefixes.tree.policy
    if not (isinstance(policy, Sessions) and policy.stats.asked):
        raise NotExercised("no session had a second turn")


def handed_over(llm: LLM) -> Mapping[str, int]:
    """Return the events between an engine and its prefill worker; empty without one."""
    stats = llm.engine.scheduler.manager.coordinator.stats
    return next((tier.events for tier in stats if tier.name == "prefill"), {})


def check_handed_over(events: Mapping[str, int]) -> None:
    """Raise NotExercised unless prompts were handed over; after a restart, the disk may have them all."""
    if events["losses"]:
        raise NotExercised("a prefill worker was lost")
    if not events["transfers"]:
        raise NotExercised("nothing was handed over")


def check_shared(rounds: list[list[Completion]]) -> None:
    """Raise NotExercised unless a good part of each round's crowd shares enough of its beginning to be read once."""
    for answers in rounds:
        if sum(done.num_cached_tokens >= LEAST_SHARED for done in answers) < len(answers) // 3:
            raise NotExercised("the crowd shares nothing")
