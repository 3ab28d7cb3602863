"""Course machinery. Lesson 10's trace: the buffers of replayed decode steps, filled, copied and read.

Everything shown is read from a real GraphRunner's buffers. Its capture is `no_graph`: a replay runs the step again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from scripts.traces.tape import Tape, ask, listed, plural

BLOCK_SIZE, NUM_BLOCKS, MAX_ROWS = 4, 7, 4
PROMPTS = {
    "A": ("The capital of France is", 7),  # and how many tokens its answer has
    "B": ("Once upon", 3),
    "C": ("Count: one, two, three, four", 4),
    "D": ("The opposite of hot is", 2),
    "E": ("One", 2),
}
TABLES = ("token_ids", "positions", "slot_mapping", "cu_seqlens_q", "seq_lens_kv", "block_table")
GRAPHS = "mini_engine/gpu/graphs.py"
COPY = "mini_engine/gpu/staging.py::Staging.filling"


def tape() -> Tape:
    scene = {"rows": MAX_ROWS}
    return Tape("l10-capture", "l10_device/capture.trace.js", "capture", "A step that is replayed", scene, 4)


def watched_staging(runner: Any, seen: Callable[[str, int], None]) -> Any:
    """Return a runner's staging that calls `seen` with "fill" or "copy" and the number of bytes when it has done so."""
    from mini_engine.gpu.staging import Staging

    class Watched(Staging):
        @contextmanager
        def filling(self, num_bytes: int) -> Iterator[None]:
            with super().filling(num_bytes):
                yield
                seen("fill", num_bytes)
            seen("copy", num_bytes)

    return Watched(runner.host.tables, runner.buffers.tables)


class Story:
    """An engine whose decode steps are replayed, and what its buffers hold in the course of a step."""

    def __init__(self, tape: Tape) -> None:
        from mini_engine.attention.registry import load_kernel
        from mini_engine.checkpoint.weights import load_model
        from mini_engine.engine.engine import Engine
        from mini_engine.engine.runner import ModelRunner
        from mini_engine.engine.scheduler import Scheduler, SchedulerConfig
        from mini_engine.gpu.graphs import GraphRunner, no_graph
        from mini_engine.kv.block_tensor import KvPool
        from mini_engine.kv.manager import KvCacheManager
        from mini_engine.pocket import POCKET_DIR
        from mini_engine.text.tokenizer import Tokenizer

        self.tape, self.tokenizer, model = tape, Tokenizer(POCKET_DIR), load_model(POCKET_DIR)
        pool = KvPool(model.config, NUM_BLOCKS, BLOCK_SIZE, load_kernel("reference", model.device, model.dtype))
        self.runner = GraphRunner(ModelRunner(model, pool), MAX_ROWS, no_graph)
        limits = SchedulerConfig(max_num_seqs=MAX_ROWS, max_num_batched_tokens=64, watermark=0)
        scheduler = Scheduler(KvCacheManager(NUM_BLOCKS, BLOCK_SIZE, pool.copy_blocks), limits)
        self.engine = Engine(model.config, scheduler, self.runner)
        self.replays = dict.fromkeys(self.runner.replays, 0)
        self.watch()
        self.addresses = self.addresses_now()
        self.names: list[str] = []
        self.size = self.copied = self.eager_steps = 0
        self.states: dict[str, dict[str, Any]] = {"none": self.state("none")}  # of the last step: after each act

    def watch(self) -> None:
        """Note what the buffers hold after each part of a step, which requests are in it, and its capture size."""
        runner = self.runner
        fill, run_eagerly, replays = runner.fill, runner.run_eagerly, runner.replays

        def filled(chunks: Sequence[Any], size: int) -> None:
            self.names, self.size = [chunk.request.id for chunk in chunks], size
            fill(chunks, size)

        def ran_eagerly(chunks: Sequence[Any]) -> Any:
            self.names, self.size = [chunk.request.id for chunk in chunks], 0
            self.eager_steps += 1
            logits = run_eagerly(chunks)
            self.note("eager", 0)
            return logits

        runner.fill, runner.run_eagerly = filled, ran_eagerly
        runner.staging = watched_staging(runner, self.note)
        runner.replays = {size: self.counting(size, replay) for size, replay in replays.items()}

    def counting(self, size: int, replay: Callable[[], None]) -> Callable[[], None]:
        def counted() -> None:
            replay()
            self.replays[size] += 1
            self.note("replay", self.copied)

        return counted

    def addresses_now(self) -> list[int]:
        """Return where each table lies in memory, on the device."""
        return [getattr(self.runner.buffers, name).data_ptr() for name in TABLES]

    def note(self, act: str, copied: int) -> None:
        """Keep what the buffers hold now. copied: bytes that the step's copy moves."""
        self.copied = copied
        self.states[act] = self.state(act)

    def state(self, act: str) -> dict[str, Any]:
        """Read the buffers: the host's after they were filled, otherwise the device's."""
        buffers, block = self.runner.buffers, self.runner.buffers.tables
        shown = self.runner.host if act == "fill" else buffers
        tables = {name: getattr(shown, name).tolist() for name in TABLES}
        return {
            "act": act,
            "names": list(self.names),
            "size": self.size,
            "copied": self.copied,
            "tables": tables,
            "fed": [self.word(token) for token in tables["token_ids"]],
            "chosen": [self.word(int(row.argmax())) if row.any() else "" for row in buffers.logits],
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
        from mini_engine.engine.sampling_params import SamplingParams

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

    def show(self, act: str, say: str, question=None, *, code: str) -> None:
        """Add a frame: the last step after its `act`."""
        self.tape.frame(say, question, code, **self.states[act])


def record(tape: Tape) -> None:
    """Run two batches: three requests of which two end, then two more beside the first."""
    story = Story(tape)
    before(story)
    prompts(story)
    padded(story)
    fewer(story)
    again(story)


def before(story: Story) -> None:
    state = story.states["none"]
    sizes = list(story.runner.replays)
    story.show(
        "none",
        f"Before the first request, sizes {listed(sizes)} are captured, the largest first. What their steps read lies "
        f"in one block of {state['bytes']} bytes: six tables of {plural(max(sizes), 'row')} at most. All are zeros, so "
        "every row is padding.",
        code=f"{GRAPHS}::GraphRunner.capture_all",
    )


def prompts(story: Story) -> None:
    lengths = story.arrive("ABC")
    story.step()
    used = [size for size, count in story.replays.items() if count]
    story.show(
        "eager",
        f"A, B and C arrive with {listed(lengths)} tokens. Their prompts run eagerly: kernels are launched one by one, "
        "because the shape of a prefill hardly ever repeats. The buffers stay as they are.",
        ask(
            f"Three prompts arrive, of {listed(lengths)} tokens. Which capture size does their step use?",
            listed(used) or "none",
            (max(story.replays), sum(lengths)),
            "Only a step in which each request feeds one token, its newest, is replayed.",
        ),
        code=f"{GRAPHS}::GraphRunner.run_eagerly",
    )


def padded(story: Story) -> None:
    """Show the parts of one decode step, then the whole of the next."""
    story.step()
    state = story.states["fill"]
    count, size, tables = len(state["names"]), state["size"], state["tables"]
    slot, last = tables["slot_mapping"][count], tables["slot_mapping"][count - 1]
    story.show(
        "fill",
        f"Now each has one token to feed. {count} rows need size {size}, so the host adds a padding row: no keys, no "
        f"query, since cu_seqlens_q stays at {tables['cu_seqlens_q'][count]}, and slot {slot}, in the null block.",
        ask(
            f"{count} requests decode with a step captured for {size} rows. Into which slot does row {count}, the "
            "padding, write its K and V?",
            slot,
            (last + 1, "none"),
            "The captured step writes K and V for every row. Slot 0 is in the null block, which no request reads.",
        ),
        code=f"{GRAPHS}::DecodeBuffers.fill",
    )
    story.show(
        "copy",
        f"One copy moves {state['copied']} bytes from the host's block to the device's: all six tables, to the "
        "addresses that the captured step reads.",
        code=COPY,
    )
    chosen = [f"{name} “{word}”" for name, word in zip(state["names"], story.states["replay"]["chosen"], strict=False)]
    story.show(
        "replay",
        f"One replay runs all {size} rows. The logits choose {listed(chosen)}. Those of the padding row are ignored.",
        code=f"{GRAPHS}::GraphRunner.run",
    )
    ended = story.step()
    replays = story.replays[size]
    story.show(
        "replay",
        f"The next step writes over the same buffers and replays the same size: {plural(replays, 'replay')} so far. "
        f"{listed(ended)} has its last token and ends.",
        code=f"{GRAPHS}::GraphRunner.run",
    )


def fewer(story: Story) -> None:
    """Show the smaller sizes."""
    ended = story.step()
    state = story.states["copy"]
    copied, size, names = state["copied"], state["size"], state["names"]
    story.show(
        "copy",
        f"{listed(names)} remain: size {size}, no padding. {names[-1]} moves up to row {size - 1}. The block table is "
        f"last in the block, so the first {copied} bytes are enough. Rows {size} and up keep what they held.",
        ask(
            f"{listed(names)} remain, so size {size} is next. How many of the block's {state['bytes']} bytes are "
            "copied?",
            copied,
            (state["bytes"], state["bytes"] * size // MAX_ROWS),
            f"All of the short tables, and {size} of {MAX_ROWS} rows of the block table, which comes last.",
        ),
        code=f"{GRAPHS}::DecodeBuffers.bytes_of",
    )
    story.show(
        "replay",
        f"Size {size} reads the first {size} rows, at the same addresses as size {MAX_ROWS}. What is left of the step "
        f"before is not read. {listed(ended)} ends.",
        code=f"{GRAPHS}::DecodeBuffers.meta",
    )
    story.step()
    state = story.states["replay"]
    rows = state["tables"]["block_table"]
    taken = max(rows[0])
    stale = [row for row in range(state["size"], MAX_ROWS) if taken in rows[row]]
    story.show(
        "replay",
        f"{listed(state['names'])} decodes alone: size {state['size']}, {state['copied']} bytes. It has taken block "
        f"{taken}, which C gave back. Rows {listed(stale)} still name that block, but no step reads them before they "
        "are filled again.",
        code=f"{GRAPHS}::GraphRunner.run",
    )


def again(story: Story) -> None:
    """Let two requests join, and replay the largest size again."""
    lengths = story.arrive("DE")
    story.step()
    story.show(
        "eager",
        f"D and E arrive with {listed(lengths)} tokens. Their prompts and A's decode share a step, so it runs eagerly. "
        "The buffers keep what A's last replay read.",
        code=f"{GRAPHS}::GraphRunner.is_decode",
    )
    story.step()
    state = story.states["copy"]
    story.show(
        "copy",
        f"{listed(state['names'])} decode: size {state['size']} again, whose fourth row is padding. D and E take the "
        "rows that B and C had. Nothing is captured again.",
        code=COPY,
    )
    replays, moved = sum(story.replays.values()), story.addresses_now() != story.addresses
    story.show(
        "replay",
        f"{replays} replays of {len(story.replays)} captured sizes, {plural(story.eager_steps, 'eager step')}, and "
        f"{'a table has moved' if moved else 'no table has moved'}. This was recorded without a GPU: the "
        "buffers are real, and no_graph ran what a graph would replay.",
        code=f"{GRAPHS}::no_graph",
    )
