"""Course machinery. Lesson 11's trace: four prompts leave checkpoints in the tree, copy them, and evict one."""

from functools import partial
from typing import Any

from scripts.traces.tape import Tape, ask, listed, plural

BLOCK_SIZE, INTERVAL, NUM_BLOCKS = 4, 8, 40
WORKING, TRACK = 2, 4
PROMPTS = {
    "A": "The sea is blue and deep.",
    "B": "The sea is blue and wide.",
    "C": "The sea is blue and calm.",
    "D": "The sea is blue and deep.",
}
OPTIONS = (0, 16, 20, 24)
MANAGER = "mini_engine/kv/manager.py::KvCacheManager"
MEMORY = "mini_engine/hybrid/memory.py::StateMemory"
CHECKPOINTS = "mini_engine/hybrid/checkpoints.py::Checkpoints"


def tape() -> Tape:
    scene = {"block_size": BLOCK_SIZE, "working": WORKING, "track": TRACK}
    return Tape("l11-states", "l11_hybrid/states.trace.js", "states", "Slots, and checkpoints in the tree", scene, 9)


def text_states():
    """Return a state pool whose states are the texts that they have seen: a letter is a token here."""
    from mini_engine.hybrid.track_slots import TrackSlots

    class TextStates(TrackSlots):
        def __init__(self, max_reqs: int, max_track_slots: int) -> None:
            super().__init__(max_reqs, max_track_slots)
            self.seen = dict.fromkeys(range(self.num_slots), "")

        def reset_states(self, slots) -> None:
            for slot in slots:
                self.seen[slot] = ""

        def copy_states(self, src_index: int, dst_index: int) -> None:
            self.seen[dst_index] = self.seen[src_index]

        def free_track_slot(self, slot: int) -> None:
            super().free_track_slot(slot)
            self.seen[slot] = ""

    return TextStates(WORKING, TRACK)


class Story:
    """Runs prompts through a manager with lesson 11's memory, and tells what they do."""

    def __init__(self, tape: Tape) -> None:
        from mini_engine.hybrid.memory import StateMemory
        from mini_engine.kv.manager import KvCacheManager
        from mini_engine.kv.prefix_cache import PrefixCache

        self.tape, self.states = tape, text_states()
        self.memory = StateMemory(self.states, BLOCK_SIZE, INTERVAL)
        cache = partial(PrefixCache, places=self.memory)
        self.manager = KvCacheManager(NUM_BLOCKS, BLOCK_SIZE, prefixes=cache, memories=[self.memory])
        self.tree = self.manager.prefixes.tree

    def nodes(self) -> list[dict[str, Any]]:
        """Return the tree's nodes, parents before children. `parent` is the parent's first block, 0 for the root."""
        found: list[dict[str, Any]] = []

        def visit(node, parent: int) -> None:
            for child in node.children.values():
                words = "".join(map(chr, memoryview(bytes(child.key)).cast("I")))
                blocks = [words[i : i + BLOCK_SIZE] for i in range(0, len(words), BLOCK_SIZE)]
                slot = self.memory.checkpoints.slots.get(child, 0)
                found.append(
                    {"first": child.blocks[0], "texts": blocks, "locks": child.locks, "parent": parent, "slot": slot}
                )
                visit(child, child.blocks[0])

        visit(self.tree.root, 0)
        return found

    def show(self, say: str, question=None, marked=(), copied=(), *, code: str) -> None:
        owners = {hold.slots[0]: name for name, hold in self.memory.holds.items()}
        slots = [
            {"slot": slot, "owner": owners.get(slot, ""), "seen": self.states.seen[slot]}
            for slot in range(1, 1 + WORKING + TRACK)
        ]
        held = sorted(self.memory.checkpoints.slots.values())
        state = {"slots": slots, "held": held, "nodes": self.nodes()}
        self.tape.frame(say, question, code, **state, marked=list(marked), copied=list(copied))

    def arrive(self, name: str) -> None:
        """Admit a request and say what it starts from."""
        prompt = PROMPTS[name]
        ids = list(map(ord, prompt))
        before = dict(self.memory.checkpoints.slots)
        stored = self.tree.peek(ids[:-1]).num_tokens
        found = self.manager.allocate(name, ids)
        slot = self.memory.holds[name].slots[0]
        source = [s for s in before.values() if found and self.states.seen[s] == prompt[:found]]
        if not found:
            say = (
                f"{name} arrives: “{prompt}”, {len(ids)} tokens, a letter each. Nothing is stored, so its slot {slot} "
                "begins with zeros."
            )
            return self.show(say, marked=[slot], code=f"{MANAGER}.allocate")
        why = f"K and V of {stored} tokens are stored, but the deepest checkpoint on the way is after {found}."
        question = ask(
            f"{name} asks “{prompt}”. Its first {stored} tokens have K and V in the tree. How many need not be "
            "computed again?",
            found,
            OPTIONS,
            why,
        )
        rest = "" if found == stored else f" K and V would reach to {stored}, but no state is kept there."
        say = (
            f"{name} arrives: “{prompt}”. The deepest checkpoint in its prefix is after {found} tokens: copied from "
            f"slot {listed(source)} into its own slot {slot}.{rest}"
        )
        return self.show(say, question, marked=[slot], copied=source, code=f"{MEMORY}.begin")

    def chunk(self, name: str) -> bool:
        """Compute one chunk. Return whether more is left of the prompt."""
        prompt, manager, checkpoints = PROMPTS[name], self.manager, self.memory.checkpoints
        ids, hold = list(map(ord, prompt)), self.memory.holds[name]
        start = hold.num_computed
        stop = self.memory.chunk_end(name, start, len(ids))
        before, evicted = set(checkpoints.slots.values()), checkpoints.num_evicted
        held = {slot: self.states.seen[slot] for slot in before}
        manager.grow(name, stop)
        self.states.seen[hold.slots[0]] += prompt[start:stop]
        manager.commit(name, ids, stop)
        made = [slot for slot in checkpoints.slots.values() if held.get(slot) != self.states.seen[slot]]
        say = f"{name} computes {plural(stop - start, 'token')}, up to {stop}."
        if made:
            say += f" The chunk ends here because a checkpoint is due: the state is copied into slot {listed(made)}"
            gone = checkpoints.num_evicted - evicted
            say += ", which the least recently used checkpoint gives up; its node keeps its blocks." if gone else "."
        else:
            say += " Its last token gives the logits that choose the first new one."
        self.show(
            say, marked=made or [hold.slots[0]], code=f"{CHECKPOINTS}.new_checkpoint" if made else f"{MANAGER}.commit"
        )
        return stop < len(ids)

    def leave(self, name: str) -> None:
        """End a request."""
        slot = self.memory.holds[name].slots[0]
        self.manager.free(name, list(map(ord, PROMPTS[name])))
        say = f"{name} has ended. Slot {slot} is zeroed and free; its checkpoints and blocks stay."
        self.show(say, code=f"{MANAGER}.free")


def record(tape: Tape) -> None:
    """Run the prompts one after another."""
    story = Story(tape)
    story.show(
        f"{WORKING} working slots, {TRACK} for checkpoints, and an empty tree with blocks of {BLOCK_SIZE} tokens. A "
        f"checkpoint is due every {INTERVAL} tokens, at a prompt's last whole block, and where a prompt leaves what "
        "is stored.",
        code=MEMORY,
    )
    for name in PROMPTS:
        story.arrive(name)
        while story.chunk(name):
            pass
        story.leave(name)
    stats = story.manager.prefixes.stats
    said = f"{stats.found_tokens} of {stats.asked_tokens} prompt tokens were not computed again."
    story.show(said, code="mini_engine/kv/radix.py::HitStats.count")
