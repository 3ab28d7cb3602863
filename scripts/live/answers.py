"""Course machinery. The pool under the pocket model in a page: lesson 2's allocator gives its tokens slots.

The model runs in JavaScript; it asks here where K and V of its next token go, and keeps them there.
"""

from typing import Any

from scripts.live.labs.pool import ALLOCATOR, RESERVE, Pool
from scripts.traces.tape import Tape, listed, plural

from mini_engine.errors import OutOfBlocks, UserError

SETTINGS = {"blocks": 16, "size": 4}
MOST_PROMPT, MOST_ANSWER = 32, 24  # tokens; together they fit into the pool
TITLE = "The pocket model's pool"


class Answers(Pool):
    """A pool in which a prompt and its answer grow, one request after another. The oldest leaves when room runs out."""

    def begin(self, name: str, tokens: list[str]) -> None:
        from mini_engine.kv.token_flat import FlatRequest

        self.requests[name], self.tokens = FlatRequest(list(range(len(tokens)))), tokens

    def feed(self, name: str, count: int, begins: str) -> None:
        """Give the first `count` tokens of the newest request slots. The one after them has just been chosen."""
        from mini_engine.kv.token_flat import reserve

        request, self.words[name] = self.requests[name], self.tokens[: count + 1]
        before, written = len(request.blocks), request.cur_len
        while True:
            try:
                reserve(request, self.allocator, count)
                break
            except OutOfBlocks:
                self.make_room(name)
        wrote = request.slot_indices[written:count]
        for position, slot in zip(range(written, count), wrote, strict=True):
            self.slots[slot] = f"{name}{position}"
        request.cur_len = count
        new = request.blocks[before:]
        took = f"it takes {plural(len(new), 'block')}, {listed(new)}." if new else "its last block has room."
        self.show(f"{begins} {took}", wrote, code=RESERVE)

    def make_room(self, name: str) -> None:
        """End the oldest other request; OutOfBlocks if there is none."""
        oldest = next((other for other in self.requests if other != name), None)
        if oldest is None:
            raise OutOfBlocks(f"{name} alone is larger than the pool")
        blocks = self.requests.pop(oldest).blocks
        del self.words[oldest]
        self.allocator.free(blocks)
        said = f"No block is left for {name}. {oldest} has ended; its blocks are freed: {listed(blocks)}."
        self.show(said, code=f"{ALLOCATOR}.free")


def fed(texts: list[dict[str, Any]]) -> dict[str, Any]:
    """Replay requests in one pool.

    texts: in order of arrival, each with `name`, `tokens` (their texts), and how many are its `prompt` and are `fed`.

    Returns:
        the trace of the last one, and its `slots`, one for each token fed.
    """
    tape = Tape("pocket-pool", "", "pool", TITLE, {})
    world = Answers(tape, SETTINGS)
    for text in texts:
        name, tokens, prompt = text["name"], text["tokens"], text["prompt"]
        if not 1 <= prompt <= MOST_PROMPT:
            raise UserError(f"the prompt has {prompt} tokens; give 1 to {MOST_PROMPT}")
        tape.frames.clear()
        world.begin(name, tokens)
        world.feed(name, prompt, f"{name}'s prompt has {plural(prompt, 'token')}:")
        for count in range(prompt + 1, text["fed"] + 1):
            world.feed(name, count, f"Token {count - 1} of {name}, “{tokens[count - 1]}”, is fed:")
        if text is not texts[-1]:
            del world.words[name][text["fed"] :]  # its last token was chosen and is never fed
    request = world.requests[texts[-1]["name"]]
    trace = {"id": tape.id, "kind": tape.kind, "title": tape.title, "scene": tape.scene, "frames": tape.frames}
    return {"trace": trace, "slots": request.slot_indices[: request.cur_len]}
