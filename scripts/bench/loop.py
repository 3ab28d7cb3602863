"""Course machinery. Suite `loop`: the cost of one step as the text grows, for the single-request lessons 0, 1 and 2."""

from collections.abc import Callable

from scripts.bench.common import Report
from scripts.bench.options import add_model, model_of, numbers
from scripts.bench.turns import take_turns

import torch

from mini_engine.engine.loop import Sequence
from mini_engine.families.qwen3 import load_model
from mini_engine.kv import contiguous, no_cache, token_flat
from mini_engine.kv.allocator import BlockAllocator
from mini_engine.model.qwen3 import KvStore

STAGES = {0: "no cache", 1: "contiguous", 2: "token-flat"}
LENGTHS = (64, 256, 1024)
QUICK_LENGTHS = (32, 128, 512)


def add_arguments(parser) -> None:
    """Add this suite's options."""
    add_model(parser)
    parser.add_argument(
        "--stages", type=numbers(STAGES), default=list(STAGES), metavar="0,1,2", help="lessons to measure"
    )


def new_sequence(stage: int, config, ids: list[int]) -> tuple[KvStore, Sequence, Callable[[], None]]:
    """Return a stage's store, its sequence for the text `ids`, and a function that takes the last token back."""
    if stage == 0:
        return no_cache.NoCache(), no_cache.Recompute(), lambda: None
    if stage == 1:
        kv = contiguous.ContiguousKv(config, len(ids))
        sequence = contiguous.CachedSequence(kv)
        return kv, sequence, lambda: sequence.truncate(sequence.cur_len - 1)
    slots = -(-len(ids) // 16) * 16
    pool = token_flat.FlatKvPool(config, slots)
    request = token_flat.FlatRequest(ids[:-1])

    def take_back() -> None:
        request.cur_len -= 1

    return pool, token_flat.PagedSequence(request, pool, BlockAllocator.for_slots(slots)), take_back


class Walker:
    """One stage with a history of a given length. Each `step` computes one more token, then takes it back."""

    def __init__(self, model, stage: int, length: int) -> None:
        self.model, self.ids = model, torch.randint(model.config.vocab_size, (length,)).tolist()
        self.kv, self.sequence, self.take_back = new_sequence(stage, model.config, self.ids)
        self.feed(self.ids[:-1])

    def feed(self, ids: list[int]) -> None:
        """Run one step of the loop over `ids` and commit it."""
        meta = self.sequence.plan(ids)
        with torch.inference_mode():
            self.model(torch.tensor(ids)[meta.positions], self.kv, meta, rows=torch.tensor([len(meta.positions) - 1]))
        self.sequence.commit(meta)

    def step(self) -> None:
        """Feed the last token, then take it back so that the next call does the same work."""
        self.feed(self.ids)
        self.take_back()


def run(args) -> Report:
    """Measure every stage at every length, in interleaved rounds."""
    model = load_model(model_of(args))
    lengths = QUICK_LENGTHS if args.quick else LENGTHS
    walkers = {(stage, length): Walker(model, stage, length) for stage in args.stages for length in lengths}
    timings = take_turns({key: w.step for key, w in walkers.items()}, args.rounds or (5 if args.quick else 15), "loop")
    rows = []
    for (stage, length), timing in timings.items():
        times = timing.median / timings[stage, lengths[0]].median
        rows.append(
            {
                "lesson": f"{stage} {STAGES[stage]}",
                "tokens so far": length,
                "ms a step": timing.median * 1e3,
                "± %": timing.spread * 100,
                f"times its step at {lengths[0]}": times,
            }
        )
    return Report("loop", rows, ["one step chooses one token", *gain(timings, args.stages, lengths[-1])])


def gain(timings, stages: list[int], length: int) -> list[str]:
    """Describe the last stage's gain over the first at the longest text."""
    if len(stages) < 2:
        return []
    times = timings[stages[0], length].median / timings[stages[-1], length].median
    return [f"at {length} tokens, lesson {stages[-1]}'s step takes 1/{times:.1f} of the time of lesson {stages[0]}'s"]
