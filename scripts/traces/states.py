"""Course machinery. Lesson 11's trace: four prompts leave checkpoints in the tree, copy them, and evict one."""

from functools import partial
from typing import Any

from scripts.traces.sharing import below, letters_of
from scripts.traces.tape import Tape, ask, listed, plural

from mini_engine.hybrid.memory import StateMemory
from mini_engine.hybrid.track_slots import TrackSlots
from mini_engine.kv.cache_coordinator import cache_of, coordinated
from mini_engine.kv.prefix_cache import PrefixCache

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


class TextStates(TrackSlots):
    """A state pool whose states are the texts seen so far: a letter is a token here."""

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


class States(Tape):
    """Runs prompts through a manager with lesson 11's memory."""

    def __init__(self) -> None:
        scene = {"block_size": BLOCK_SIZE, "working": WORKING, "track": TRACK}
        title = "Slots, and checkpoints in the tree"
        super().__init__("l11-states", "l11_hybrid/states.trace.js", "states", title, 9, **scene)
        self.states = TextStates(WORKING, TRACK)
        self.memory = StateMemory(self.states, BLOCK_SIZE, INTERVAL)
        cache = partial(PrefixCache, memory=self.memory)
        self.manager: Any = coordinated(NUM_BLOCKS, BLOCK_SIZE, prefixes=cache)
        self.tree, self.checkpoints = cache_of(self.manager).prefixes.tree, self.memory.checkpoints

    def state(self) -> dict[str, Any]:
        """Return the frame's state. marked: slots just changed. copied: slots that a state was copied from."""
        owners = {hold.slots[0]: name for name, hold in self.memory.holds.items()}
        slots = [
            {"slot": slot, "owner": owners.get(slot, ""), "seen": self.states.seen[slot]}
            for slot in range(1, 1 + WORKING + TRACK)
        ]
        nodes = [
            {"first": node.blocks[0], "texts": letters_of(node, BLOCK_SIZE), "locks": node.locks, "parent": parent}
            | {"slot": self.checkpoints.slots.get(node, 0)}
            for node, parent in below(self.tree.root)
        ]
        held = sorted(self.checkpoints.slots.values())
        return {"slots": slots, "held": held, "nodes": nodes, "marked": [], "copied": []}

    def record(self) -> None:
        """Run the prompts one after another."""
        self.show(
            f"{WORKING} working slots, {TRACK} for checkpoints: due every {INTERVAL} tokens, and where prompts part or "
            "end.",
            MEMORY,
        )
        for name, prompt in PROMPTS.items():
            self.arrive(name, prompt)
            while self.chunk(name, prompt):
                pass
            slot = self.memory.holds[name].slots[0]
            self.manager.free(name, list(map(ord, prompt)))
            said = f"{name} has ended. Slot {slot} is zeroed and free; its checkpoints and blocks stay."
            self.show(said, f"{MANAGER}.free")
        stats = cache_of(self.manager).prefixes.stats
        said = f"{stats.found_tokens} of {stats.asked_tokens} prompt tokens were not computed again."
        self.show(said, "mini_engine/kv/radix.py::HitStats.count")

    def arrive(self, name: str, prompt: str) -> None:
        """Admit a request and show its starting state."""
        ids = list(map(ord, prompt))
        before = list(self.checkpoints.slots.values())
        stored = self.tree.peek(ids[:-1]).num_tokens
        found = self.manager.allocate(name, ids)
        slot = self.memory.holds[name].slots[0]
        source = [other for other in before if found and self.states.seen[other] == prompt[:found]]
        said = f"{name} arrives: “{prompt}”"
        if not found:
            said += f" Nothing is stored, so its slot {slot} begins with zeros."
            return self.show(said, f"{MANAGER}.allocate", marked=[slot])
        text = f"{name} asks “{prompt}”. Its first {stored} tokens have K and V in the tree. "
        why = f"K and V of {stored} tokens are stored, but the deepest checkpoint on the way is after {found}."
        question = ask(f"{text}How many need not be computed again?", found, OPTIONS, why)
        said += f" Slot {listed(source)} has its state after {found} tokens"
        said += "." if found == stored else f"; K and V reach {stored}."
        return self.show(said, f"{MEMORY}.begin", question, marked=[slot], copied=source)

    def chunk(self, name: str, prompt: str) -> bool:
        """Compute one chunk. Return True if more of the prompt is left."""
        hold, slots, seen = self.memory.holds[name], self.checkpoints.slots, self.states.seen
        start = hold.num_computed
        stop = self.memory.chunk_end(name, start, len(prompt))
        held, evicted = {slot: seen[slot] for slot in slots.values()}, self.checkpoints.num_evicted
        self.manager.grow(name, stop)
        seen[hold.slots[0]] += prompt[start:stop]
        self.manager.commit(name, list(map(ord, prompt)), stop)
        made = [slot for slot in slots.values() if held.get(slot) != seen[slot]]
        say = f"{name} computes {plural(stop - start, 'token')}, up to {stop}."
        if made:
            say += f" A checkpoint is due: its state goes to slot {listed(made)}"
            gone = self.checkpoints.num_evicted - evicted
            say += ", the oldest's." if gone else "."
        else:
            say += " Its last token gives the logits that choose the first new one."
        code = f"{CHECKPOINTS}.new_checkpoint" if made else f"{MANAGER}.commit"
        self.show(say, code, marked=made or [hold.slots[0]])
        return stop < len(prompt)
