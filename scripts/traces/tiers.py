"""Course machinery. Lesson 12's trace: a block falls out of pool and host memory, and comes back from the disk."""

import tempfile
from pathlib import Path

from scripts.traces.tape import Tape, ask, listed, plural

BLOCK_SIZE, NUM_BLOCKS, HOST_RECORDS = 4, 7, 4
PROMPTS = {"A": "The sea is deep.", "B": "Bread is warm."}
OPTIONS = (0, 4, 8, 12)
CONNECTOR = "mini_engine/tiers/connector.py::TierConnector"
DISK = "mini_engine/tiers/disk.py::DiskTier"


def tape() -> Tape:
    scene = {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS, "host": HOST_RECORDS}
    return Tape("l12-tiers", "l12_tiers/tiers.trace.js", "tiers", "Pool, host memory and disk", scene, 7)


class Letters:
    """A pool whose blocks hold letters: a letter is a token here, and its own K and V."""

    payload_bytes = BLOCK_SIZE

    def __init__(self) -> None:
        self.blocks = [b""] * NUM_BLOCKS

    def read(self, blocks):
        return [self.blocks[block].ljust(BLOCK_SIZE) for block in blocks]

    def write(self, blocks, payloads) -> None:
        for block, payload in zip(blocks, payloads, strict=True):
            self.blocks[block] = bytes(payload)

    def copy(self, sources, targets) -> None:
        self.write(targets, self.read(sources))


class Story:
    """Runs prompts through lesson 12's manager and tells what it does."""

    def __init__(self, tape: Tape, directory: Path) -> None:
        self.tape, self.directory = tape, directory
        self.shelf: list[bytes] = []  # the keys of files, in the order in which they were written
        self.start()

    def start(self) -> None:
        """Begin a new process on the same directory."""
        from mini_engine.kv.manager import KvCacheManager
        from mini_engine.kv.prefix_cache import PrefixCache
        from mini_engine.tiers.connector import TierConnector
        from mini_engine.tiers.disk import DiskTier
        from mini_engine.tiers.host import HostTier
        from mini_engine.tiers.keys import Identity
        from mini_engine.tiers.records import Record
        from mini_engine.tiers.store import BlockStore
        from mini_engine.tiers.tiers import Tiers

        size = Record(bytes(32), bytes(32), bytes(4 * BLOCK_SIZE), bytes(BLOCK_SIZE)).num_bytes
        self.letters, self.disk = Letters(), DiskTier(self.directory, 2**20)
        self.tiers = Tiers(HostTier(HOST_RECORDS * size), self.disk)
        identity = Identity("weights", "config", "letters", BLOCK_SIZE)
        store = BlockStore(self.tiers, self.letters, identity)  # pyright: ignore[reportArgumentType]
        connector = TierConnector(store)
        self.manager = KvCacheManager(
            NUM_BLOCKS, BLOCK_SIZE, self.letters.copy, prefixes=PrefixCache, connector=connector
        )

    def show(self, say: str, question=None, moved=(), *, code: str) -> None:
        """Add a frame. moved: texts of the blocks that something just happened to."""
        self.shelf += [key for key in self.disk.sizes if key not in self.shelf]
        owners = {block: name for name, table in self.manager.tables.items() for block in table.blocks}
        pool = []
        for block in range(1, NUM_BLOCKS):
            held = block in self.manager.allocator.held
            text = self.letters.blocks[block].decode() if held else ""
            pool.append({"owner": owners.get(block, ""), "held": held, "text": text})
        host = [bytes(record.payload).decode() for record in self.tiers.host.records.values()]
        disk = [{"name": key.hex()[:4], "text": self.text_of(key)} for key in self.shelf if key in self.disk]
        self.tape.frame(say, question, code, pool=pool, host=host, disk=disk, moved=list(moved))

    def text_of(self, key: bytes) -> str:
        return self.disk.path(key).read_bytes()[-4 - BLOCK_SIZE : -4].decode(errors="replace")

    def arrive(self, name: str, tell: str) -> int:
        """Admit a request; ask how much is found; compute the rest. Return the tokens found."""
        ids = list(map(ord, PROMPTS[name]))
        cached = self.manager.prefixes.peek(ids, None, {}).num_tokens
        before = dict(self.tiers.num_found)
        found = self.manager.allocate(name, ids)
        back = {tier: self.tiers.num_found[tier] - count for tier, count in before.items()}
        texts = [PROMPTS[name][i : i + BLOCK_SIZE] for i in range(0, len(ids), BLOCK_SIZE)]
        names = {"host": "host memory", "disk": "the disk"}
        places = [f"{plural(count, 'block')} from {names[tier]}" for tier, count in back.items() if count]
        why = f"{cached} are still in the pool, and {listed(places) or 'nothing'} came back."
        question = ask(
            f"{tell} {name} has {len(ids)} tokens. How many of them need not be computed?", found, OPTIONS, why
        )
        say = f"{name} arrives. The pool has {cached} of its {len(ids)} tokens."
        if places:
            say += f" Copied back instead of computed: {listed(places)}."
        code = "mini_engine/tiers/store.py::BlockStore.restore" if places else f"{CONNECTOR}.find"
        self.show(say, question, texts[cached // BLOCK_SIZE : found // BLOCK_SIZE], code=code)
        self.compute(name, found)
        return found

    def compute(self, name: str, found: int) -> None:
        ids = list(map(ord, PROMPTS[name]))
        before, files = set(self.tiers.host.records), set(self.disk.sizes)
        self.manager.grow(name, len(ids))
        blocks = self.manager.tables[name].blocks
        for index in range(found // BLOCK_SIZE, len(blocks)):
            self.letters.blocks[blocks[index]] = PROMPTS[name][index * BLOCK_SIZE :][:BLOCK_SIZE].encode()
        self.manager.commit(name, ids, len(ids))
        self.tiers.flush()
        new = [record for record_key, record in self.tiers.host.records.items() if record_key not in before]
        texts = [bytes(record.payload).decode() for record in new]
        say = f"{plural(len(ids) - found, 'token')} of {name} computed."
        if texts:
            say += f" Whole blocks are copied to host memory at once: {plural(len(texts), 'record')}."
        if written := len(set(self.disk.sizes) - files):
            say += f" {plural(written, 'file')} written later, by a thread in the background."
        self.show(say, moved=texts, code=f"{CONNECTOR}.save")

    def leave(self, name: str) -> None:
        self.manager.free(name, list(map(ord, PROMPTS[name])))
        self.tiers.flush()
        self.show(
            f"{name} has ended. Its whole blocks stay in the pool, cached, as in lesson 8.", code=f"{CONNECTOR}.save"
        )

    def restart(self) -> None:
        self.tiers.close()
        self.start()
        said = "The process ends, and another begins. Pool and host memory are empty; the files are still there."
        self.show(said, code=f"{DISK}.scan")

    def damage(self) -> None:
        """Flip one bit in the last file that was written."""
        victim = self.shelf[-1]
        path, text = self.disk.path(victim), self.text_of(victim)
        content = bytearray(path.read_bytes())
        content[-6] ^= 1
        path.write_bytes(content)
        said = f"One bit of a file is flipped: “{text}” became “{self.text_of(victim)}”."
        self.show(said, moved=[self.text_of(victim)], code=f"{DISK}.put")


def key(ids: list[int]) -> bytes:
    from mini_engine.kv.radix_node import key_of

    return key_of(ids)


def record(tape: Tape) -> None:
    """Run the prompts, restart, damage a file."""
    with tempfile.TemporaryDirectory(prefix="kv-course-") as folder:
        story = Story(tape, Path(folder))
        story.show(
            f"A pool of {NUM_BLOCKS - 1} blocks, host memory for {HOST_RECORDS} records, and an empty directory. A "
            f"block has {BLOCK_SIZE} tokens; here a token is a letter.",
            code=CONNECTOR,
        )
        story.arrive("A", "Everything is empty.")
        story.leave("A")
        story.arrive("B", "The pool must evict blocks for B.")
        story.leave("B")
        story.arrive("A", "A comes again. Part of it was evicted from the pool.")
        story.leave("A")
        story.restart()
        story.arrive("A", "A comes to the new process.")
        story.leave("A")
        story.damage()
        found = story.arrive("B", "B comes to the new process, beside the damaged file.")
        num_bad = story.disk.counts["damaged"]
        said = f"{found} tokens of B were found, not 12: {num_bad} damaged record was counted, and written again."
        story.show(said, code=f"{DISK}.get")
        story.manager.free("B")
        story.tiers.close()
