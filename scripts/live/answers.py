"""Course machinery. The pool under the pocket model in a page: lesson 2's allocator gives its tokens slots.

The model runs in JavaScript; it asks here for the slots of its next token's K and V, and keeps them there.
"""

from typing import Any

from scripts.live.labs.pool import ALLOCATOR, RESERVE, Pool
from scripts.traces.tape import listed, plural

from mini_engine.base.errors import OutOfBlocks, UserError

SETTINGS = {"blocks": 16, "size": 4}
MOST_PROMPT, MOST_ANSWER = 32, 24  # tokens; together they fit in the pool
TITLE = "The pocket model's pool"


class Answers(Pool):
    """A pool in which a prompt and its answer grow, one request after another. If it is full, the oldest one leaves."""

    title = TITLE

    def feed(self, name: str, tokens: list[str], count: int, begins: str) -> None:
        """Give the first `count` tokens of the newest request slots. The one after them has just been chosen."""
        self.texts[name] = tokens[: count + 1]
        while True:
            try:
                took, wrote = self.reserve(name, count)
                break
            except OutOfBlocks:
                self.make_room(name)
        self.show(f"{begins} {took}", RESERVE, wrote=wrote)

    def make_room(self, name: str) -> None:
        """End the oldest other request; OutOfBlocks if there is none."""
        oldest = next((other for other in self.requests if other != name), None)
        if oldest is None:
            raise OutOfBlocks(f"{name} alone is larger than the pool")
        blocks = self.requests.pop(oldest).blocks
        del self.texts[oldest]
        self.allocator.free(blocks)
        said = f"No block is left for {name}. {oldest} has ended; its blocks are freed: {listed(blocks)}."
        self.show(said, f"{ALLOCATOR}.free")


def fed(texts: list[dict[str, Any]]) -> dict[str, Any]:
    """Replay requests in one pool.

    texts: in order of arrival, each with `name`, `tokens` (their texts), and the numbers of `prompt` and `fed` tokens.

    Returns:
        the trace of the last one, and its `slots`, one for each token fed.
    """
    pool = Answers(SETTINGS)
    pool.id = "pocket-pool"
    for text in texts:
        name, tokens, prompt = text["name"], text["tokens"], text["prompt"]
        if not 1 <= prompt <= MOST_PROMPT:
            raise UserError(f"the prompt has {prompt} tokens; give 1 to {MOST_PROMPT}")
        pool.frames.clear()
        pool.begin(name, tokens)
        pool.feed(name, tokens, prompt, f"{name}'s prompt has {plural(prompt, 'token')}:")
        for count in range(prompt + 1, text["fed"] + 1):
            pool.feed(name, tokens, count, f"Token {count - 1} of {name}, “{tokens[count - 1]}”, is fed:")
        if text is not texts[-1]:
            del pool.texts[name][text["fed"] :]  # its last token was chosen and is never fed
    request = pool.requests[texts[-1]["name"]]
    return {"trace": pool.trace, "slots": request.slot_indices[: request.cur_len]}
