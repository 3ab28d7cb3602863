"""Course machinery. Lesson 7's trace: two threads, the mailboxes between them, and a client that reads slowly."""

import asyncio
from typing import Any

from scripts.traces.tape import Tape, ask, listed, plural
from scripts.traces.two_threads import LENGTHS, NUM_BLOCKS, PROMPTS, SLOW, Stage

WORKER, MAILBOX = "mini_engine/engine/worker.py::EngineWorker", "mini_engine/engine/mailbox.py::Mailbox"
STREAM = "mini_engine/server/sse.py::EventStream"


class Mailboxes(Tape):
    """A slow client fills its own mailbox, reads, and leaves; the others keep getting their tokens."""

    stage: Stage

    def __init__(self) -> None:
        scene = {"blocks": NUM_BLOCKS - 1, "clients": list(PROMPTS)}
        title = "Two threads and three mailboxes"
        super().__init__("l7-mailboxes", "l7_server/mailboxes.trace.js", "mailboxes", title, 9, **scene)

    def state(self) -> dict[str, Any]:
        """Return the frame's state. made: the clients whose answers have just got a token."""
        return self.stage.state() | {"made": []}

    def record(self) -> None:
        """Run the story in an event loop; end the engine's thread whatever happens."""
        asyncio.run(self.play())

    async def play(self) -> None:
        self.stage = Stage(self.model, self.tokenizer)
        self.show(
            "The event loop and the engine's thread share only an inbox and a mailbox for each client.",
            WORKER,
        )
        async with self.stage:
            await self.first_step()
            await self.next_step()
            await self.next_step()
            await self.next_step(self.asks_about_others)
            await self.slow_one_reads()
            await self.next_step()
            await self.next_step()
            await self.slow_one_leaves()
            await self.next_step(self.asks_about_the_aborted)
            while self.stage.engine.has_unfinished:
                await self.next_step()
            self.sum_up()

    async def first_step(self) -> None:
        """Show the way of the first tokens in three frames: jobs, a step, events."""
        await self.stage.arrive()
        self.show(
            "A, B and C ask. Each request becomes a job in the inbox; the engine is not touched.",
            f"{WORKER}.submit",
        )
        self.stage.step()
        self.show(
            "The engine's thread empties its inbox, runs a step, fills the mailboxes, and goes on.",
            f"{WORKER}._step",
            made=self.stage.made,
        )
        await self.stage.settle()
        self.show(
            f"The event loop, woken once, writes events. A and B read theirs; {SLOW}'s stays in its socket.",
            f"{STREAM}._send",
        )

    async def next_step(self, asks=None) -> None:
        """Run a round of the engine's thread, then the event loop, and show both as one frame."""
        stage = self.stage
        before = stage.held()
        aborted = [name for kind, name in stage.inbox if kind == "abort"]
        stage.step()
        await stage.settle()
        ended = [name for name in before if name not in stage.held() and name not in aborted]
        said = [f"Step {stage.steps}:"]
        for name in aborted:
            freed = plural(before[name], "block")
            said.append(f"inbox first, so {name} is aborted and its {freed} are free.")
        said.append(listed(stage.made, "gets a token.", "get a token each."))
        if stage.clients[SLOW].status == "slow":
            said.append(f"{SLOW} has not read: {plural(stage.waiting(SLOW), 'token')} in its mailbox.")
        said += [f"{name} has ended; its blocks are free." for name in ended]
        code = f"{WORKER}._abort" if aborted else f"{WORKER}._end" if ended else f"{MAILBOX}.put"
        self.show(" ".join(said), code, asks and asks(), made=stage.made)

    def asks_about_others(self):
        text = f"{SLOW} still has not read. Which clients' answers get a token in step {self.stage.steps}?"
        wrong = (listed([name for name in PROMPTS if name != SLOW]), "none: the engine waits")
        why = "Putting a token into a mailbox never waits. The slow client has delayed only itself."
        return ask(text, listed(self.stage.made), wrong, why)

    def asks_about_the_aborted(self):
        text = f"The engine's thread begins its next round. How many tokens does it compute for {SLOW}?"
        wrong = (0, 1, LENGTHS[SLOW] - sum(self.stage.clients[SLOW].events))
        why = "Aborts are in the inbox, and the inbox comes before the step: no further token is computed for it."
        return ask(text, int(SLOW in self.stage.made), wrong, why)

    async def slow_one_reads(self) -> None:
        """Let the slow client read the event in its socket."""
        client, waits = self.stage.clients[SLOW], self.stage.waiting(SLOW)
        client.reads.set()
        await self.stage.settle()
        text = f"{waits} tokens wait in {SLOW}'s mailbox. Now {SLOW} reads. How many tokens has its next event?"
        why = "What waits in a mailbox is merged when it is fetched. A slow client gets few events, and large ones."
        self.show(
            f"{SLOW} reads its first event. All {waits} tokens in its mailbox become one event of "
            f"{plural(client.unread, 'token')}.",
            f"{MAILBOX}.take",
            ask(text, client.unread, (1, waits + 1, waits), why),
        )

    async def slow_one_leaves(self) -> None:
        """Let the slow client close its connection."""
        stage, client = self.stage, self.stage.clients[SLOW]
        held = stage.held()[SLOW]
        client.leaves.set()
        await stage.settle()
        still, lost = stage.held()[SLOW], client.unread + stage.waiting(SLOW)
        text = f"{SLOW} closes its connection between two steps. How many of its {held} blocks are free at once?"
        why = "Only the engine's thread may free blocks, and it has not looked into its inbox yet."
        self.show(
            f"{SLOW} disconnects, {plural(lost, 'token')} unread. An abort is in the inbox; its "
            f"{plural(still, 'block')} are still held.",
            "mini_engine/server/disconnect.py::unless_gone",
            ask(text, held - still, (held, 1, 0), why),
        )

    def sum_up(self) -> None:
        computed = self.stage.computed()
        got = {name: sum(client.events) for name, client in self.stage.clients.items()}
        quick = listed([f"{name} has its {got[name]}" for name in PROMPTS if name != SLOW])

        free = self.stage.engine.scheduler.manager.blocks_by_state.free
        self.show(
            f"{quick} tokens: {SLOW}, who read {got[SLOW]} of {computed[SLOW]}, cost them nothing. "
            f"{free} blocks are free.",
            f"{WORKER}._deliver",
        )
