"""Course machinery. Lesson 18's trace: two ranks compute a layer for one token, and meet after each half of it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.traces.rank_threads import NUM_RANKS, answered
from scripts.traces.tape import Tape, ask

import torch
from torch import Tensor

from lessons.l18_ranks import one_shot
from mini_engine.distributed.tensor_parallel.shard import bytes_per_step, gathered_bytes_per_step
from mini_engine.distributed.tensor_parallel.vocabulary import rows_of
from mini_engine.pocket import POCKET_DIR

PROMPT = "The capital of France is"
SHOWN = 3  # of a vector's numbers
PART = "mini_engine/distributed/tensor_parallel/shard.py::part_of"
LOOK_UP = "mini_engine/distributed/tensor_parallel/vocabulary.py::looked_up"
FINISH = "mini_engine/layers/torch_layers.py::TorchDecoderLayer.finish"
ADD_UP = "lessons/l18_ranks/one_shot.py::add_up"
HEAD = "mini_engine/distributed/tensor_parallel/vocabulary.py::GatheredHead.forward"
FOLLOW = "mini_engine/distributed/tensor_parallel/follow.py::follow_plans"


class Noted(one_shot.Board):
    """A board that keeps the numbers in its places to draw. shown: by (half, rank)."""

    def __init__(self, num_ranks: int, count: int) -> None:
        super().__init__(num_ranks, count)
        self.shown: dict[tuple[int, int], list[float]] = {}

    def put(self, half: int, rank: int, x: Tensor) -> None:
        super().put(half, rank, x)
        self.shown[half, rank] = first(x)


class Ranks(Tape):
    """One decode step of two ranks: the embedding, the first layer's two sums, and the head.

    stage: the matrices at work. For each rank: part, the first numbers of its part; total, of the sum; does.
    flags and places are those of a board; a place shows the first numbers of the part in it.
    """

    def __init__(self) -> None:
        super().__init__("l18-ranks", "l18_ranks/ranks.trace.js", "ranks", "Two ranks, one token", 7)
        self.board = Noted(NUM_RANKS, self.model.config.hidden_size)
        self.stage, self.meeting = "", 0
        self.parts: list[list[float] | None] = [None] * NUM_RANKS
        self.totals: list[list[float] | None] = [None] * NUM_RANKS
        self.does = [""] * NUM_RANKS

    def state(self) -> dict[str, Any]:
        places = [[self.board.shown.get((half, rank)) for rank in range(NUM_RANKS)] for half in (1, 0)]
        ranks = [
            {"part": part, "total": total, "does": does}
            for part, total, does in zip(self.parts, self.totals, self.does, strict=True)
        ]
        half = 1 - self.meeting % 2 if self.meeting else None  # places[0] is half 1, the first to be used
        return {
            "stage": self.stage,
            "ranks": ranks,
            "flags": list(self.board.flags),
            "places": places,
            "half": half,
        }

    def run(self) -> None:
        """Answer the prompt over two ranks; keep their parts of the last decode step's collectives."""
        ids = self.tokenizer.encode(PROMPT)
        steps, (self.fed, self.chosen) = answered(Path(POCKET_DIR), ids, 2)
        self.brought = steps[-1]

    def record(self) -> None:
        """Show the embedding, the two sums of the first layer, and the head."""
        self.run()
        self.cut()
        self.embedding()
        self.layer()
        self.head()

    def cut(self) -> None:
        """Show the shares."""
        c = self.model.config
        heads, columns = c.num_attention_heads // NUM_RANKS, c.intermediate_size // NUM_RANKS
        self.show(
            f"Each rank has half of every matrix: {heads} of {c.num_attention_heads} heads, {columns} of "
            f"{c.intermediate_size} columns, {len(rows_of(c.vocab_size, 0, NUM_RANKS)):,} of {c.vocab_size:,} tokens.",
            PART,
        )

    def meet(self, stage: str, index: int, order: str, stop: dict[int, Callable[[], None]]) -> None:
        """Let the ranks meet through `add_up`, each character of `order` a step of that rank.

        stop: maps a number of steps to a function that shows a frame then.
        """
        self.stage, self.meeting = stage, index + 1
        given = [self.brought[index][rank][0].clone() for rank in range(NUM_RANKS)]
        total = torch.stack(given).sum(0)
        sums: list[Iterator[None]] = [
            one_shot.add_up(x, self.board, rank, self.meeting) for rank, x in enumerate(given)
        ]
        self.parts, self.totals = [first(x) for x in given], [None] * NUM_RANKS
        self.does = ["computes"] * NUM_RANKS
        for count, character in enumerate(order, 1):
            rank = int(character)
            if next(sums[rank], sums) is sums:
                self.totals[rank] = first(given[rank])
                if not torch.equal(given[rank], total):
                    raise ValueError(f"add_up gave rank {rank} something else than the sum of the parts")
            self.does[rank] = "has the sum" if self.totals[rank] else self.doing(rank)
            if count in stop:
                stop[count]()

    def doing(self, rank: int) -> str:
        """Describe a rank's activity."""
        if self.board.flags[rank] < self.meeting:
            return "brings its part"
        if min(self.board.flags) < self.meeting:
            return "waits"
        return "adds up"

    def embedding(self) -> None:
        """Show one rank's vector and the other's zeros become the embedding."""
        word, vocab = self.words([self.fed])[0], self.model.config.vocab_size
        owner = next(rank for rank in range(NUM_RANKS) if self.fed in rows_of(vocab, rank, NUM_RANKS))
        other = 1 - owner

        def brought() -> None:
            text = f"The token is “{word}”, {self.fed}. Rank {owner} has tokens "
            rows = rows_of(vocab, owner, NUM_RANKS)
            why = "A sum of the vector and of zeros is the vector. So one all-reduce is a lookup over all ranks."
            self.show(
                f"Rank {owner} has the row of token {self.fed}, “{word}”. Rank {other} does not, and brings zeros.",
                LOOK_UP,
                ask(
                    f"{text}{rows.start:,} … {rows.stop - 1:,}. What does rank {other} bring to the sum?",
                    "zeros",
                    ("its row 0", "nothing: it does not come"),
                    why,
                ),
            )

        def done() -> None:
            self.show("Both ranks have the embedding. That was the first meeting.", ADD_UP)

        self.meet("embedding", 0, "0101" + "01" * 8, {2: brought, 20: done})

    def layer(self) -> None:
        """Show the part without exchanges, then the meetings after o and after down."""
        c = self.model.config
        self.stage, self.meeting, self.does = "qkv", 0, ["computes"] * NUM_RANKS
        self.parts, self.totals = [None] * NUM_RANKS, [None] * NUM_RANKS
        self.show(
            f"Layer 0: each rank attends with its {c.num_attention_heads // NUM_RANKS} heads and its own K and V. "
            "Nothing is exchanged.",
            FINISH,
        )
        self.attention_sum()
        self.feed_forward()

    def attention_sum(self) -> None:
        """Show the meeting after o, step by step."""
        width = self.model.config.hidden_size

        def behind_o() -> None:
            self.show(
                f"o makes a part of all {width} outputs. Rank 1 is faster: its part is there, in the unused half.",
                ADD_UP,
            )

        def waiting() -> None:
            why = "Flag 0 says 1: rank 0 has come to one meeting. What is in its place now may be anything."
            self.show(
                "Rank 1 has raised its flag to 2 and waits for rank 0's.",
                ADD_UP,
                ask(
                    "Rank 1's part is there. May it add up?",
                    "no, flag 0 says 1",
                    ("yes", "yes, its own part only"),
                    why,
                ),
            )

        def raised() -> None:
            self.show("Rank 0 has brought its part and raised its flag. Now both may read both places.", ADD_UP)

        def ahead() -> None:
            self.show(
                "Rank 1 has the sum, adds it to the residual and goes on. Rank 0 has not read anything yet.",
                ADD_UP,
            )

        def both() -> None:
            self.show("Both have the same sum, bit for bit: each adds the parts in the order of the ranks.", FINISH)

        shown = {2: behind_o, 5: waiting, 8: raised, 13: ahead, 30: both}
        self.meet("o", 1, "11111" + "000" + "11111" + "0" * 17, shown)

    def feed_forward(self) -> None:
        """Show the meeting after down."""
        c = self.model.config

        def early() -> None:
            why = "Meeting 3 uses the other half. The parts of meeting 2 stay until meeting 4."
            self.show(
                f"gate and up make {c.intermediate_size // NUM_RANKS} columns in each rank, down a part of each sum.",
                ADD_UP,
                ask(
                    "Rank 1 brings its part of meeting 3 while rank 0 may still read those of meeting 2. Where to?",
                    "the other half",
                    ("the same place", "rank 0's place"),
                    why,
                ),
            )

        def done() -> None:
            count = 2 * c.num_hidden_layers + 1
            self.show(
                f"A layer has two meetings, {c.num_hidden_layers} layers and the embedding {count}: "
                f"{bytes_per_step(c, 1, 4):,} bytes from each rank.",
                FINISH,
            )

        self.meet("down", 2, "11" + "01" * 14, {2: early, 30: done})

    def head(self) -> None:
        """Show the logits being gathered, and the rank that chooses."""
        c, logits = self.model.config, self.brought[-1]
        self.stage, self.meeting, self.does = "head", 0, ["brings its logits"] * NUM_RANKS
        self.parts, self.totals = [first(logits[rank][0]) for rank in range(NUM_RANKS)], [None] * NUM_RANKS
        each = gathered_bytes_per_step(c, 1, 4, NUM_RANKS)
        best = [float(logits[rank][0].max()) for rank in range(NUM_RANKS)]
        word, owner = self.words([self.chosen])[0], int(best[1] > best[0])
        self.show(
            f"Each rank has the logits of its tokens, {each:,} bytes. The largest: {best[0]:.2f} and "
            f"{best[1]:.2f}.".replace("-", "−"),
            HEAD,
        )
        self.does = ["chooses", "waits for the next plan"]
        why = "Two ranks that both choose may choose differently, and then add up halves of different texts."
        self.show(
            f"Rank 0 has all logits and chooses “{word}”. Rank 1 learns it with the next plan.",
            FOLLOW,
            ask(
                "Which rank chooses the token?",
                "rank 0",
                ("each for itself", f"rank {owner}" if owner else "rank 1"),
                why,
            ),
        )


def first(x: Tensor) -> list[float]:
    """Return the first numbers of a vector, rounded."""
    return [round(value, 2) + 0.0 for value in x[:SHOWN].tolist()]
