"""Course machinery. Lesson 7's trace: two threads, the mailboxes between them, and a client that reads slowly."""

import asyncio

from scripts.traces.tape import Tape, ask, listed, plural
from scripts.traces.two_threads import LENGTHS, NUM_BLOCKS, PROMPTS, SLOW, Stage

WORKER, MAILBOX = "mini_engine/engine/worker.py::EngineWorker", "mini_engine/engine/mailbox.py::Mailbox"
STREAM = "mini_engine/server/sse.py::EventStream"


def tape() -> Tape:
    scene = {"blocks": NUM_BLOCKS - 1, "clients": list(PROMPTS)}
    return Tape(
        "l7-mailboxes", "l7_server/mailboxes.trace.js", "mailboxes", "Two threads and three mailboxes", scene, 9
    )


class Story:
    """A slow client fills its own mailbox, reads, and leaves; the others get their tokens all the while."""

    def __init__(self, tape: Tape, stage: Stage) -> None:
        self.tape, self.stage = tape, stage

    def show(self, say: str, question=None, made=(), *, code: str) -> None:
        """Add a frame. made: the clients whose answers have just got a token."""
        self.tape.frame(say, question, code=code, made=list(made), **self.stage.state())

    async def play(self) -> None:
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
        stage = self.stage
        await stage.arrive()
        self.show(
            "A, B and C ask. Each request becomes a job in the inbox; the event loop does not touch the engine.",
            code=f"{WORKER}.submit",
        )
        stage.step()
        self.show(
            "The engine's thread empties its inbox, runs a step, and drops a token into each mailbox. It does not wait "
            "until one is fetched.",
            made=stage.made,
            code=f"{WORKER}._step",
        )
        await stage.settle()
        self.show(
            "The event loop was woken once for all three. It fetches what is there and writes events. A and B read "
            f"theirs; {SLOW}'s stays in its socket, so only {SLOW}'s response waits.",
            code=f"{STREAM}._send",
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
            said.append(f"first the inbox, so {name} is aborted and its {freed} are free; then the step.")
        said.append(f"{listed(stage.made)} {'get a token each' if len(stage.made) > 1 else 'gets a token'}.")
        if stage.clients[SLOW].status == "slow":
            waits = stage.waiting(SLOW)
            said.append(f"{SLOW} has not read: {plural(waits, 'token')} in its mailbox.")
        said += [f"{name} has ended; its blocks are free." for name in ended]
        code = f"{WORKER}._abort" if aborted else f"{WORKER}._end" if ended else f"{MAILBOX}.put"
        self.show(" ".join(said), asks and asks(), made=stage.made, code=code)

    def asks_about_others(self):
        why = "Putting a token into a mailbox never waits. The slow client has delayed only itself."
        return ask(
            f"{SLOW} still has not read. Which clients' answers get a token in step {self.stage.steps}?",
            listed(self.stage.made),
            (listed([name for name in PROMPTS if name != SLOW]), "none: the engine waits"),
            why,
        )

    def asks_about_the_aborted(self):
        why = "Aborts are in the inbox, and the inbox comes before the step: no further token is computed for it."
        return ask(
            f"The engine's thread begins its next round. How many tokens does it compute for {SLOW}?",
            int(SLOW in self.stage.made),
            (0, 1, LENGTHS[SLOW] - sum(self.stage.clients[SLOW].events)),
            why,
        )

    async def slow_one_reads(self) -> None:
        """Let the slow client read the event in its socket."""
        client, waits = self.stage.clients[SLOW], self.stage.waiting(SLOW)
        client.reads.set()
        await self.stage.settle()
        why = "What waits in a mailbox is merged when it is fetched. A slow client gets few events, and large ones."
        self.show(
            f"{SLOW} reads its first event. The event loop fetches all {waits} tokens from {SLOW}'s mailbox and writes "
            f"them as one event of {plural(client.unread, 'token')}. The mailbox is empty.",
            ask(
                f"{waits} tokens wait in {SLOW}'s mailbox. Now {SLOW} reads. How many tokens has its next event?",
                client.unread,
                (1, waits + 1, waits),
                why,
            ),
            code=f"{MAILBOX}.take",
        )

    async def slow_one_leaves(self) -> None:
        """Let the slow client close its connection."""
        stage, client = self.stage, self.stage.clients[SLOW]
        held = stage.held()[SLOW]
        client.leaves.set()
        await stage.settle()
        still, lost = stage.held()[SLOW], client.unread + stage.waiting(SLOW)
        why = "Only the engine's thread may free blocks, and it has not looked into its inbox yet."
        self.show(
            f"{SLOW} closes its connection. Its response is cancelled, which puts an abort into the inbox. The "
            f"{plural(lost, 'token')} on the way to it will not be read, and its {plural(still, 'block')} are still "
            "held.",
            ask(
                f"{SLOW} closes its connection between two steps. How many of its {held} blocks are free at once?",
                held - still,
                (held, 1, 0),
                why,
            ),
            code="mini_engine/server/disconnect.py::unless_gone",
        )

    def sum_up(self) -> None:
        clients, computed = self.stage.clients, self.stage.computed()
        got = {name: sum(client.events) for name, client in clients.items()}
        quick = [f"{name} has its {got[name]} tokens" for name in PROMPTS if name != SLOW]
        free = self.stage.engine.scheduler.manager.blocks_by_state.free
        self.show(
            f"{listed(quick)}, one from every step: {SLOW} has cost them nothing. {SLOW} has read {got[SLOW]} of the "
            f"{computed[SLOW]} that were computed for it. {free} of {self.tape.scene['blocks']} blocks are free.",
            code=f"{WORKER}._deliver",
        )


def record(tape: Tape) -> None:
    """Run the story in an event loop; end the engine's thread whatever happens."""
    asyncio.run(play(tape))


async def play(tape: Tape) -> None:
    stage = Stage()
    story = Story(tape, stage)
    story.show(
        "Two threads. The event loop has the connections of three clients, the engine's thread has the engine, and "
        "nothing is shared but an inbox and a mailbox for each client.",
        code=WORKER,
    )
    async with stage:
        await story.play()
