"""Course machinery. Lesson 12's trace: a block is evicted from pool and host memory, and comes back from the disk."""

import tempfile
from pathlib import Path
from typing import Any

from scripts.traces.sharing import Letters
from scripts.traces.tape import Tape, ask, listed, plural

from mini_engine.kv.cache_coordinator import cache_of, coordinated
from mini_engine.kv.prefix_cache import PrefixCache
from mini_engine.tiers.connector import TierConnector
from mini_engine.tiers.disk import DiskTier
from mini_engine.tiers.host import HostTier
from mini_engine.tiers.keys import Identity
from mini_engine.tiers.records import Record
from mini_engine.tiers.store import BlockStore
from mini_engine.tiers.tiers import Tiers as TierStack

BLOCK_SIZE, NUM_BLOCKS, HOST_RECORDS = 4, 7, 4
PROMPTS = {"A": "The sea is deep.", "B": "Bread is warm."}
OPTIONS = (0, 4, 8, 12)
CONNECTOR = "mini_engine/tiers/connector.py::TierConnector"
DISK = "mini_engine/tiers/disk.py::DiskTier"
STORE = "mini_engine/tiers/store.py::BlockStore"


class Tiers(Tape):
    """Runs prompts through lesson 12's manager. shelf: the keys of files, in the order in which they were written."""

    def __init__(self) -> None:
        scene = {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS, "host": HOST_RECORDS}
        super().__init__("l12-tiers", "l12_tiers/tiers.trace.js", "tiers", "Pool, host memory and disk", 7, **scene)
        self.shelf: list[bytes] = []

    def start(self, directory: Path) -> None:
        """Start a new process on a directory."""
        size = Record(bytes(32), bytes(32), bytes(4 * BLOCK_SIZE), bytes(BLOCK_SIZE)).num_bytes
        self.letters, self.disk = Letters(NUM_BLOCKS, BLOCK_SIZE), DiskTier(directory, 2**20)
        self.tiers = TierStack(HostTier(HOST_RECORDS * size), self.disk)
        pool: Any = self.letters
        connector = TierConnector(BlockStore(self.tiers, pool, Identity("weights", "config", "letters", BLOCK_SIZE)))
        self.manager = coordinated(NUM_BLOCKS, BLOCK_SIZE, self.letters.copy, prefixes=PrefixCache, connector=connector)

    def state(self) -> dict[str, Any]:
        """Return the frame's state. moved: texts of the blocks just moved."""
        self.shelf += [key for key in self.disk.sizes if key not in self.shelf]
        owners = {block: name for name, table in self.manager.tables.items() for block in table.blocks}
        pool = []
        for block in range(1, NUM_BLOCKS):
            held = block in self.manager.allocator.held
            text = self.letters.blocks[block].decode() if held else ""
            pool.append({"owner": owners.get(block, ""), "held": held, "text": text})
        host = [bytes(record.payload).decode() for record in self.tiers.host.records.values()]
        disk = [{"name": key.hex()[:4], "text": self.text_of(key)} for key in self.shelf if key in self.disk]
        return {"pool": pool, "host": host, "disk": disk, "moved": []}

    def text_of(self, key: bytes) -> str:
        return self.disk.path(key).read_bytes()[-4 - BLOCK_SIZE : -4].decode(errors="replace")

    def record(self) -> None:
        """Run the prompts, restart, damage a file."""
        with tempfile.TemporaryDirectory(prefix="kv-course-") as folder:
            self.start(Path(folder))
            self.show(
                f"A pool of {NUM_BLOCKS - 1} blocks of {BLOCK_SIZE} letters, host memory for {HOST_RECORDS} records, "
                "an empty directory.",
                CONNECTOR,
            )
            self.visit("A", "Everything is empty.")
            self.visit("B", "The pool must evict blocks for B.")
            self.visit("A", "A comes again. Part of it was evicted from the pool.")
            self.tiers.close()
            self.start(Path(folder))
            said = "A new process begins. Pool and host memory are empty; the files are still there."
            self.show(said, f"{DISK}.scan")
            self.visit("A", "A comes to the new process.")
            self.damage()
            found = self.arrive("B", "B comes to the new process, beside the damaged file.")
            num_bad = self.disk.counts["damaged"]
            said = f"{found} tokens of B were found, not 12: {num_bad} damaged record was counted, and written again."
            self.show(said, f"{DISK}.get")
            self.manager.free("B")
            self.tiers.close()

    def visit(self, name: str, tell: str) -> None:
        """Let a request arrive, be computed and end."""
        self.arrive(name, tell)
        self.manager.free(name, list(map(ord, PROMPTS[name])))
        self.tiers.flush()
        said = f"{name} has ended. Its whole blocks stay in the pool, cached, as in lesson 8."
        self.show(said, f"{CONNECTOR}.save_kv")

    def arrive(self, name: str, tell: str) -> int:
        """Admit a request; ask how many tokens are found; compute the rest. Return the tokens found."""
        prompt, ids = PROMPTS[name], list(map(ord, PROMPTS[name]))
        cached = cache_of(self.manager).prefixes.peek(ids, None, {}).num_tokens
        before = dict(self.tiers.num_found)
        found = self.manager.allocate(name, ids)
        back = {tier: self.tiers.num_found[tier] - count for tier, count in before.items()}
        names = {"host": "host memory", "disk": "the disk"}
        places = listed([f"{plural(count, 'block')} from {names[tier]}" for tier, count in back.items() if count])
        why = f"{cached} are still in the pool, and {places or 'nothing'} came back."
        text = f"{tell} {name} has {len(ids)} tokens. How many of them need not be computed?"
        say = f"{name} arrives. The pool has {cached} of its {len(ids)} tokens."
        say += f" Copied back: {places}." if places else ""
        moved = [prompt[i : i + BLOCK_SIZE] for i in range(cached, found, BLOCK_SIZE)]
        code = f"{STORE}.restore" if places else f"{CONNECTOR}.start_load_kv"
        self.show(say, code, ask(text, found, OPTIONS, why), moved=moved)
        self.compute(name, found)
        return found

    def compute(self, name: str, found: int) -> None:
        prompt, ids = PROMPTS[name], list(map(ord, PROMPTS[name]))
        before, files = set(self.tiers.host.records), set(self.disk.sizes)
        self.manager.grow(name, len(ids))
        blocks = self.manager.tables[name].blocks
        for index in range(found // BLOCK_SIZE, len(blocks)):
            self.letters.blocks[blocks[index]] = prompt[index * BLOCK_SIZE :][:BLOCK_SIZE].encode()
        self.manager.commit(name, ids, len(ids))
        self.tiers.flush()
        records = self.tiers.host.records.items()
        texts = [bytes(record.payload).decode() for key, record in records if key not in before]
        say = f"{plural(len(ids) - found, 'token')} of {name} computed."
        if texts:
            say += f" At once {plural(len(texts), 'record')} in host memory"
            written = len(set(self.disk.sizes) - files)
            say += f"; later {plural(written, 'file')}, by a thread." if written else "."
        self.show(say, f"{CONNECTOR}.save_kv", moved=texts)

    def damage(self) -> None:
        """Flip one bit in the last file that was written."""
        victim = self.shelf[-1]
        path, text = self.disk.path(victim), self.text_of(victim)
        content = bytearray(path.read_bytes())
        content[-6] ^= 1
        path.write_bytes(content)
        said = f"One bit of a file is flipped: “{text}” became “{self.text_of(victim)}”."
        self.show(said, f"{DISK}.put", moved=[self.text_of(victim)])
