"""Lesson 14. The engine with speculation: lesson 5's step, in which a request may gain several tokens."""

from collections.abc import Sequence

from mini_engine.engine.engine import Engine, StepResult
from mini_engine.engine.sampled import Sampled
from mini_engine.engine.sampler import sample
from mini_engine.engine.scheduler import Chunk
from mini_engine.errors import UserError
from mini_engine.speculation.config import Speculation
from mini_engine.speculation.lookup import Drafter, LookupDrafter
from mini_engine.speculation.scheduler import SpeculatingScheduler
from mini_engine.speculation.tree_lookup import TreeDrafter
from mini_engine.speculation.verify import sample_rows, with_drafts


class SpeculatingEngine(Engine):
    """An Engine that guesses tokens and verifies them. `new_tokens` of a step has each request's newest token.

    A step with drafts is not replayed from lesson 10's captured steps: those have one row for each request.
    """

    scheduler: SpeculatingScheduler

    def step(self) -> StepResult:
        """As in lesson 5; the statistics also say how many tokens were guessed and how many of them accepted."""
        result, scheduler = super().step(), self.scheduler
        counts = {"num_drafted": scheduler.num_drafted, "num_accepted": scheduler.num_accepted}
        return result._replace(stats=result.stats._replace(**counts))

    def _run(self, chunks: Sequence[Chunk]) -> list[Sampled]:
        """Run the model and the sampler; return a token for each chunk that samples and for each of its drafts."""
        drafts = self.scheduler.drafts
        if not drafts:
            return super()._run(chunks)
        logits = self.runner.run([with_drafts(chunk, drafts.get(chunk.request, ())) for chunk in chunks])
        sampling = [chunk.request for chunk in chunks if chunk.samples]
        return sample(logits, [row for request in sampling for row in sample_rows(request, drafts.get(request, ()))])


def speculating(engine: Engine, speculation: Speculation, drafter: Drafter | None = None) -> SpeculatingEngine:
    """Return an engine with speculation that takes over another one's parts. Call this before the first request.

    Args:
        drafter: guesses the tokens; by default prompt lookup, with the tree before it if `speculation` says so.

    Raises:
        UserError: the model is a hybrid.
    """
    if hasattr(engine.config, "num_gdn_layers"):
        raise UserError(
            "speculate is set, but this model is a hybrid: a wrong guess cannot be taken out of a recurrent state; "
            "leave it out",
            param="speculate",
        )
    old = engine.scheduler
    drafter = drafter or LookupDrafter(speculation)
    scheduler = SpeculatingScheduler(old.manager, old.config, speculation, drafter)
    if speculation.use_tree:
        scheduler.drafter = TreeDrafter(lambda: scheduler.manager, drafter)
    return SpeculatingEngine(engine.config, scheduler, engine.runner)
