"""Course machinery. The trace of how-the-pieces-fit.md: requests on their way through one engine, from text to text."""

from collections.abc import Sequence
from math import exp
from typing import Any

from scripts.traces.sharing import below
from scripts.traces.tape import Tape, ask, listed, plural
from scripts.traces.watched import watched_engine

from mini_engine.engine.answer import AnswerReader
from mini_engine.engine.engine import Engine
from mini_engine.engine.request import Ending, Request
from mini_engine.engine.sampled import Sampled
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler import Chunk

BLOCK_SIZE, NUM_BLOCKS = 4, 9
PROMPTS = {
    "A": "The capital of France is",
    "B": "The capital of France is Paris. The capital of Japan is",
    "C": "The capital of France is Paris. The capital of Japan is Tokyo. The capital of Italy is",
}
PARAMS = SamplingParams(temperature=0, max_tokens=8, stop=["."], include_stop_str_in_output=True, logprobs=3)
STATIONS = (  # name, title, what it does, number of its lesson, the trace that is played inside
    ("server", "Server", "texts in, text out", 7, "l7_server/mailboxes.trace.js"),
    ("tokenizer", "Tokenizer", "text to token ids", 6, "l6_text/bytes.trace.js"),
    ("scheduler", "Scheduler", "what runs in a step", 5, "l5_scheduler/batch.trace.js"),
    ("tree", "Prefix tree", "what is known already", 8, "l8_radix/tree.trace.js"),
    ("tables", "Block tables", "which blocks, in order", 2, "l2_token_flat/pool.trace.js"),
    ("model", "Model", "tokens to K, V, logits", 3, "l3_block_tensor/walk.trace.js"),
    ("sampler", "Sampler", "logits to a token", 4, "l4_sampler/logits.trace.js"),
    ("detokenizer", "Detokenizer", "tokens to text", 6, "l6_text/bytes.trace.js"),
)
ENCODE, PUSH = "mini_engine/text/tokenizer.py::Tokenizer.encode", "mini_engine/text/detokenizer.py::Detokenizer.push"
ENGINE, SCHEDULER = "mini_engine/engine/engine.py::Engine", "mini_engine/engine/scheduler.py::Scheduler"
MATCH, STORE = "mini_engine/kv/radix.py::RadixTree.match", "mini_engine/kv/prefix_cache.py::PrefixCache.store"
GROW, RUN = "mini_engine/kv/manager.py::KvCacheManager.grow", "mini_engine/engine/runner.py::ModelRunner.run"
SAMPLE, DELTA = "mini_engine/engine/sampler.py::sample", "mini_engine/engine/answer.py::AnswerReader.next_delta"


class EngineWalk(Tape):
    """Three texts that begin alike: A alone, B beside it, then C, which finds what B has left.

    slots: what was written to each slot, as a request and the position of its token. found: tokens that the tree knew.
    texts: what clients have so far. pieces: what the last step added to them. rows: its best tokens. is_brief: stations
    that have been shown get no frames of their own.
    """

    engine: Engine

    def __init__(self) -> None:
        stations = [
            dict(zip(("name", "title", "says", "lesson", "trace"), station, strict=True)) for station in STATIONS
        ]
        scene = {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS, "stations": stations, "requests": {}}
        super().__init__(
            "engine", "how-the-pieces-fit/engine.trace.js", "engine", "One engine, from text to text", 15, **scene
        )
        self.requests, self.readers = dict[str, Request](), dict[str, AnswerReader]()
        self.texts, self.pieces = dict[str, str](), dict[str, str]()
        self.slots, self.found = dict[int, tuple[str, int]](), dict[str, int]()
        self.rows, self.writes = list[dict[str, Any]](), list[int]()
        self.steps, self.is_brief = 0, False

    def record(self) -> None:
        self.engine = watched_engine(self, self.model, NUM_BLOCKS, BLOCK_SIZE)
        self.arrives("A", f"A client sends A: “{PROMPTS['A']}”. It waits for what comes next.")
        self.queues("A", "A waits in the queue. Before each step, the scheduler chooses what the step computes.")
        self.next_step()
        self.arrives("B", "Another client sends B. It begins with the same words as A.")
        self.queues("B", "Step 2 has room for both: one token for A, which decodes, and B’s prompt.")
        self.next_step()
        self.is_brief = True
        while self.engine.has_unfinished:
            self.next_step()
        self.arrives("C", "A third client sends C: B’s question, B’s answer, and one more question.")
        self.queues("C")
        while self.engine.has_unfinished:
            self.next_step()
        self.sum_up()

    # What every frame shows

    def state(self) -> dict[str, Any]:
        manager: Any = self.engine.scheduler.manager
        free = set(manager.allocator.free_blocks)
        slots = {slot: token for slot, token in sorted(self.slots.items()) if slot // BLOCK_SIZE not in free}
        state = {
            "step": self.steps,
            "requests": [self.request_state(name) for name in self.texts],
            "tables": {name: list(table.blocks) for name, table in manager.tables.items()},
            "tree": [block for node, _ in below(manager.tree.root) for block in node.blocks],
            "slots": [[slot, *token] for slot, token in slots.items()],
        }
        return state | {"writes": list(self.writes), "rows": list(self.rows), "pieces": dict(self.pieces)}

    def request_state(self, name: str) -> dict[str, Any]:
        """Return where a request is, what was found for it, and its answer: tokens, and the text that was sent."""
        request, scheduler = self.requests.get(name), self.engine.scheduler
        if request is None:
            return {"name": name, "where": "new", "found": 0, "answer": [], "text": ""}
        where = "waits" if request in scheduler.waiting else "runs" if request in scheduler.running else "ended"
        answer = [self.tokenizer.decode([token]) for token in request.output_ids]
        known = {"name": name, "where": where, "found": self.found.get(name, 0)}
        return known | {"answer": answer, "text": self.texts[name]}

    # What happens outside a step

    def arrives(self, name: str, say: str) -> None:
        ids = self.tokenizer.encode(PROMPTS[name])
        words = [self.tokenizer.decode([token]) for token in ids]
        self.scene["requests"][name] = {"text": PROMPTS[name], "words": words, "ids": ids}
        self.texts[name] = ""
        self.show(say, ENCODE, at="server", about=[name])
        if self.is_brief:
            return
        say = f"The tokenizer cuts the text into {len(ids)} tokens. The engine sees only their numbers."
        self.show(say, ENCODE, at="tokenizer", about=[name])

    def queues(self, name: str, say: str = "") -> None:
        ids = self.scene["requests"][name]["ids"]
        request = self.requests[name] = self.engine.add_request(name, ids, PARAMS)
        self.readers[name] = AnswerReader(request, self.tokenizer)
        if not self.is_brief:
            self.show(say, f"{ENGINE}.add_request", at="scheduler", about=[name])

    def next_step(self) -> None:
        """Run a step, turn its tokens into text, and send it."""
        names = list(self.engine.scheduler.requests)
        self.steps += 1
        self.engine.step()
        self.pieces = {}
        for name in names:
            delta = self.readers[name].next_delta()
            self.pieces[name], self.texts[name] = delta.text, self.texts[name] + delta.text
            self.engine.conclude(self.requests[name], Ending(delta.finish_reason, delta.error))
        ended = [name for name in names if self.requests[name].is_finished]
        if self.is_brief:
            self.repeated(names, ended)
        else:
            self.streamed(names, ended)

    # What happens inside a step

    def matched(self, name: str, found: int) -> None:
        self.found[name], total = found, len(self.requests[name].prompt_ids)
        if not found:
            say = f"The tree is asked what is known of A. It is empty: {found} of {total} tokens."
            return self.show(say, MATCH, at="tree", about=[name])
        shared = found // BLOCK_SIZE
        blocks = list(self.engine.scheduler.manager.tables[name].blocks)
        say = f"{found} of {name}’s {total} tokens are in the tree, in {named(blocks)}: not computed again."
        why = f"Whole blocks are found: {plural(shared, 'block')} of {BLOCK_SIZE} tokens."
        text = f"{name} has {total} tokens. How many of them does the tree know?"
        self.show(say, MATCH, ask(text, found, (0, found + 1, total), why), at="tree", about=[name])

    def grown(self, name: str, num_tokens: int, num_before: int) -> None:
        if self.is_brief:
            return
        blocks = list(self.engine.scheduler.manager.tables[name].blocks)
        new, computed = blocks[num_before:], num_tokens - num_before * BLOCK_SIZE
        say = f"{plural(computed, 'token')} of {name} need {plural(len(new), 'block')} of {BLOCK_SIZE} slots: "
        why = f"A block has {BLOCK_SIZE} slots; a table may end with a block that is not full."
        text = f"{plural(computed, 'token')} of {name} need slots. How many blocks does it get?"
        question = ask(text, len(new), (1, computed, len(new) + 1), why)
        say += f"{named(new)}. {name}’s table lists them in order."
        self.show(say, GROW, question if name == "A" else None, at="tables", about=[name])

    def planned(self, chunks: Sequence[Chunk], slots: Sequence[int]) -> None:
        tokens = [(chunk.request.id, index) for chunk in chunks for index in range(chunk.start, chunk.stop)]
        self.writes = list(slots)
        self.slots |= dict(zip(slots, tokens, strict=True))

    def ran(self, chunks: Sequence[Chunk], num_rows: int) -> None:
        if self.is_brief and len(self.writes) == 1:
            return
        counts = {chunk.request.id: chunk.stop - chunk.start for chunk in chunks}
        total = sum(counts.values())
        parts = listed(
            [f"{count if i else plural(count, 'token')} of {name}" for i, (name, count) in enumerate(counts.items())]
        )
        say = f"Step {self.steps}: one pass over {parts}. Each token writes its K and V into its slot."
        question = None
        if len(counts) > 1:
            why = f"{parts}: A reads the K and V of its older tokens, B those that it shares with A."
            text = "A decodes; B brings its prompt. How many tokens go through the model in this step?"
            question = ask(text, total, (len(counts), total - 1, total + BLOCK_SIZE), why)
        self.show(say, RUN, question, at="model", about=list(counts))

    def sampled(self, rows: Sequence[tuple[Request, Sampled]]) -> None:
        self.rows = []
        for request, row in rows:
            assert row.logprobs is not None, "PARAMS asks for them"
            best = [[self.tokenizer.decode([token]), round(100 * exp(value))] for token, value in row.logprobs.top]
            self.rows.append({"name": request.id, "best": best, "chosen": self.tokenizer.decode([row.token_id])})
        if self.is_brief:
            return
        words = listed([f"“{row['chosen'].strip()}” for {row['name']}" for row in self.rows])
        say = f"Only a request’s last token yields logits. The sampler takes the best: {words}."
        self.show(say, SAMPLE, at="sampler", about=[row["name"] for row in self.rows])

    def stored(self, name: str, blocks: list[int]) -> None:
        if self.steps > 1:
            return
        say = f"{name}’s prompt has filled {named(blocks)}. The tree keeps what is full, for texts that begin alike."
        self.show(say, STORE, at="tree", about=[name])

    # What a step has brought

    def streamed(self, names: list[str], ended: list[str]) -> None:
        pieces = listed([f"“{self.pieces[name]}”" for name in names])
        self.show(f"The detokenizer makes text of the new tokens: {pieces}.", PUSH, at="detokenizer", about=names)
        if ended:
            say = f"“.” ends {listed(ended)}’s answer. The block that it did not fill is free again; the tree’s stay."
            return self.show(say, f"{SCHEDULER}.finish", at="server", about=names)
        say = f"{listed(names)}’s client reads the first word while the engine already works on the next."
        self.show(say, DELTA, at="server", about=names)

    def repeated(self, names: list[str], ended: list[str]) -> None:
        """Show a whole step in one frame."""
        text = " ".join(self.texts[name] for name in names)
        if ended:
            say = f"“.” ends {listed(ended)}’s answer. Its full blocks stay in the tree: cached, until room is needed."
            return self.show(say, f"{SCHEDULER}.finish", at="server", about=names)
        say = f"Step {self.steps}: once around for one token. {listed(names)}’s client has “{text.strip()}” now."
        self.show(say, DELTA, at="detokenizer", about=names)

    def sum_up(self) -> None:
        requests = self.requests.values()
        asked, found = sum(len(r.prompt_ids) for r in requests), sum(r.num_cached_tokens for r in requests)
        say = f"{self.steps} steps, three answers. {found} of {asked} prompt tokens were found, not computed."
        self.show(say, f"{ENGINE}.step", at="tree", about=list(self.requests))


def named(blocks: Sequence[int]) -> str:
    """Return "block 1", "blocks 3 and 4"."""
    return f"block{'s' * (len(blocks) > 1)} {listed(blocks)}"
