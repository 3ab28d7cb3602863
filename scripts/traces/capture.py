"""Course machinery. Lesson 10's trace: the buffers of replayed decode steps, filled, copied and read.

Everything shown is read from a real GraphRunner's buffers. Its capture records nothing: a replay runs the step again.
"""

from collections.abc import Callable, Sequence
from typing import Any

from scripts.traces.tape import Tape, ask, listed, plural

from torch import Tensor

from mini_engine.engine.engine import Engine
from mini_engine.engine.runner import ModelRunner
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler import Chunk
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.gpu.graphs import GraphRunner, no_graph

BLOCK_SIZE, NUM_BLOCKS, MAX_ROWS = 4, 7, 4
PROMPTS = {
    "A": ("The capital of France is", 7),  # and the number of tokens in its answer
    "B": ("Once upon", 3),
    "C": ("Count: one, two, three, four", 4),
    "D": ("The opposite of hot is", 2),
    "E": ("One", 2),
}
TABLES = ("token_ids", "positions", "slot_mapping", "cu_seqlens_q", "seq_lens_kv", "block_table")
GRAPHS = "mini_engine/gpu/graphs.py"
COPY = "mini_engine/gpu/staging.py::Staging.filling"


class Watched(GraphRunner):
    """A runner that calls `note` with "fill", "copy", "replay" or "eager" when it has done so.

    names: the requests of the last step. size: its capture size, 0 if it ran eagerly.
    """

    def __init__(self, eager: ModelRunner, note: Callable[[str], None]) -> None:
        self.note, self.names, self.size = note, list[str](), 0
        super().__init__(eager, MAX_ROWS, self.capture)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return a replay, which begins when the copy is done."""
        replay = no_graph(work)

        def watched() -> None:
            self.note("copy")
            replay()
            self.note("replay")

        return watched

    def fill(self, chunks: Sequence[Chunk], size: int) -> None:
        self.names, self.size = [chunk.request.id for chunk in chunks], size
        super().fill(chunks, size)
        self.note("fill")

    def run_eagerly(self, chunks: Sequence[Chunk]) -> Tensor:
        self.names, self.size = [chunk.request.id for chunk in chunks], 0
        logits = super().run_eagerly(chunks)
        self.note("eager")
        return logits


class Captured(Tape):
    """An engine whose decode steps are replayed. states: its buffers after each act of the last step."""

    def __init__(self) -> None:
        title = "A step that is replayed"
        super().__init__("l10-capture", "l10_device/capture.trace.js", "capture", title, 4, rows=MAX_ROWS)
        self.engine = Engine.for_model(
            self.model, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, kernel="reference", runner=self.runner_for,
            scheduler_config=SchedulerConfig(max_num_seqs=MAX_ROWS, max_num_batched_tokens=64, watermark=0),
        )  # fmt: skip
        self.replays = dict.fromkeys(self.runner.replays, 0)
        self.eager_steps = 0
        self.addresses = self.addresses_now()
        self.states: dict[str, dict[str, Any]] = {}

    def runner_for(self, model, pool) -> Watched:
        self.runner = Watched(ModelRunner(model, pool), self.note)
        return self.runner

    def addresses_now(self) -> list[int]:
        """Return each table's address on the device."""
        return [getattr(self.runner.buffers, name).data_ptr() for name in TABLES]

    def note(self, act: str) -> None:
        """Count a step, and keep the buffers' contents."""
        if act == "replay":
            self.replays[self.runner.size] += 1
        self.eager_steps += act == "eager"
        self.states[act] = self.buffers(act)

    def buffers(self, act: str) -> dict[str, Any]:
        """Read the buffers: the host's after they were filled, otherwise the device's."""
        runner, block = self.runner, self.runner.buffers.tables
        shown = runner.host if act == "fill" else runner.buffers
        tables = {name: getattr(shown, name).tolist() for name in TABLES}
        return {
            "act": act,
            "names": list(runner.names),
            "size": runner.size,
            "copied": runner.host.bytes_of(runner.size) if runner.size else 0,
            "tables": tables,
            "fed": [self.word(token) for token in tables["token_ids"]],
            "chosen": [self.word(int(row.argmax())) if row.any() else "" for row in runner.buffers.logits],
            "starts": [address - block.data_ptr() for address in self.addresses_now()],
            "bytes": len(block),
            "replays": [list(pair) for pair in self.replays.items()],
            "eager": self.eager_steps,
        }

    def word(self, token_id: int) -> str:
        text = self.tokenizer.decode([token_id])
        return text.strip() or text.replace(" ", "␣").replace("\n", "↵")

    def arrive(self, names: str) -> list[int]:
        """Add requests; return the lengths of their prompts."""
        lengths = []
        for name in names:
            prompt, answer = PROMPTS[name]
            params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
            lengths.append(len(self.engine.add_request(name, self.tokenizer.encode(prompt), params).prompt_ids))
        return lengths

    def step(self) -> list[str]:
        """Run a step; return the requests that ended with it."""
        self.states = {}
        return [request.id for request in self.engine.step().finished]

    def after(self, act: str, say: str, code: str, question=None) -> None:
        """Add a frame: the last step after its `act`."""
        self.show(say, code, question, **self.states[act])

    def record(self) -> None:
        """Run two batches: three requests of which two end, then two more with the remaining one."""
        self.before()
        self.prompts()
        self.padded()
        self.next_step()
        self.fewer()
        self.alone()
        self.again()

    def before(self) -> None:
        state, sizes = self.buffers("none"), list(self.replays)
        self.show(
            f"Sizes {listed(sizes)} are captured first. Their steps read six tables in one block of {state['bytes']} "
            "bytes.",
            f"{GRAPHS}::GraphRunner.capture_all",
            **state,
        )

    def prompts(self) -> None:
        lengths = self.arrive("ABC")
        self.step()
        used = [size for size, count in self.replays.items() if count]
        text = f"Three prompts arrive, of {listed(lengths)} tokens. Which capture size does their step use?"
        why = "Only a step in which each request feeds one token, its newest, is replayed."
        self.after(
            "eager",
            f"A, B and C arrive with {listed(lengths)} tokens. Prompts run eagerly: their shape hardly ever repeats.",
            f"{GRAPHS}::GraphRunner.run_eagerly",
            ask(text, listed(used) or "none", (max(self.replays), sum(lengths)), why),
        )

    def padded(self) -> None:
        """Show the parts of one decode step."""
        self.step()
        state = self.states["fill"]
        count, size, tables = len(state["names"]), state["size"], state["tables"]
        slot, last = tables["slot_mapping"][count], tables["slot_mapping"][count - 1]
        text = (
            f"{count} requests decode with a step captured for {size} rows. Into which slot does row {count}, the "
            "padding, write its K and V?"
        )
        why = "The captured step writes K and V for every row. Slot 0 is in the null block, which no request reads."
        self.after(
            "fill",
            f"{count} rows need size {size}: the host adds a padding row without keys or query, whose slot is {slot}.",
            f"{GRAPHS}::DecodeBuffers.fill",
            ask(text, slot, (last + 1, "none"), why),
        )
        self.after(
            "copy",
            f"One copy moves all six tables, {state['copied']} bytes, to the addresses that the captured step reads.",
            COPY,
        )
        words = zip(state["names"], self.states["replay"]["chosen"], strict=False)
        self.after(
            "replay",
            f"One replay runs all {size} rows, and chooses {listed([f'{name} “{word}”' for name, word in words])}"
            "; padding is ignored.",
            f"{GRAPHS}::GraphRunner.run",
        )

    def next_step(self) -> None:
        """Show the whole of the next step."""
        ended = self.step()
        self.after(
            "replay",
            f"The same buffers, written again, and the same size: {plural(self.replays[self.runner.size], 'replay')} "
            f"so far. {listed(ended)} ends.",
            f"{GRAPHS}::GraphRunner.run",
        )

    def fewer(self) -> None:
        """Show a smaller size."""
        ended = self.step()
        state = self.states["copy"]
        copied, size, names = state["copied"], state["size"], listed(state["names"])
        text = f"{names} remain, so size {size} is next. How many of the block's {state['bytes']} bytes are copied?"
        why = f"All of the short tables, and {size} of {MAX_ROWS} rows of the block table, which comes last."
        self.after(
            "copy",
            f"{names} remain: size {size}. {state['names'][-1]} moves up to row {size - 1}; the first {copied} bytes "
            "are enough.",
            f"{GRAPHS}::DecodeBuffers.bytes_of",
            ask(text, copied, (state["bytes"], state["bytes"] * size // MAX_ROWS), why),
        )
        self.after(
            "replay",
            f"Size {size} reads the first {size} rows, at the same addresses as size {MAX_ROWS}. {listed(ended)} ends.",
            f"{GRAPHS}::DecodeBuffers.meta",
        )

    def alone(self) -> None:
        """Show the smallest size."""
        self.step()
        state = self.states["replay"]
        rows = state["tables"]["block_table"]
        taken = max(rows[0])
        stale = [row for row in range(state["size"], MAX_ROWS) if taken in rows[row]]
        self.after(
            "replay",
            f"{listed(state['names'])} is alone and has taken block {taken} from C. Rows {listed(stale)} still name "
            "it; no step reads them.",
            f"{GRAPHS}::GraphRunner.run",
        )

    def again(self) -> None:
        """Let two requests join, and replay the largest size again."""
        lengths = self.arrive("DE")
        self.step()
        self.after(
            "eager",
            f"D and E arrive with {listed(lengths)} tokens. Their prompts and A's decode share a step: it runs "
            "eagerly.",
            f"{GRAPHS}::GraphRunner.is_decode",
        )
        self.step()
        state = self.states["copy"]
        self.after(
            "copy",
            f"{listed(state['names'])} decode: size {state['size']} again, with a padding row. Nothing is captured "
            "again.",
            COPY,
        )
        moved = "a table has moved" if self.addresses_now() != self.addresses else "no table has moved"
        self.after(
            "replay",
            f"{sum(self.replays.values())} replays of {len(self.replays)} captured sizes, "
            f"{plural(self.eager_steps, 'eager step')}, and {moved}. Recorded without a GPU.",
            f"{GRAPHS}::no_graph",
        )
