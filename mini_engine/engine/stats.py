"""Lesson 5. Statistics of one step, and their summary over many steps."""

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from mini_engine.engine.request import FinishReason, Request
from mini_engine.kv.manager import BlocksByState


class StepStats(NamedTuple):
    """Statistics of one step: queues and blocks after it, and the tokens it computed, none if it failed.

    prefill_tokens: tokens of requests that were prefilling when the step began: prompts, and answers computed again
        after a preemption.
    decode_tokens: one for each request that decoded.
    num_preempted: requests preempted while the step was scheduled.
    num_drafted: tokens guessed in this step. num_accepted: guesses accepted, each of which saves a step.
    """

    num_waiting: int = 0
    num_running: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    num_preempted: int = 0
    blocks: BlocksByState = BlocksByState(0, 0)
    num_drafted: int = 0
    num_accepted: int = 0


@dataclass
class Summary:
    """Totals over many steps, updated by `add_step` and `add_finished`."""

    started: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    num_steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    num_preemptions: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    most_running: int = 0
    most_blocks_held: int = 0
    num_new_tokens: int = 0
    finished: dict[FinishReason, int] = field(default_factory=dict)

    def add_step(self, stats: StepStats) -> None:
        """Add one step."""
        self.seconds = time.perf_counter() - self.started
        self.num_steps += 1
        self.prefill_tokens += stats.prefill_tokens
        self.decode_tokens += stats.decode_tokens
        self.num_preemptions += stats.num_preempted
        self.num_drafted += stats.num_drafted
        self.num_accepted += stats.num_accepted
        self.most_running = max(self.most_running, stats.num_running)
        self.most_blocks_held = max(self.most_blocks_held, stats.blocks.held)

    def add_finished(self, request: Request) -> None:
        """Add a finished request. Raises ValueError if it has not finished."""
        if request.finish_reason is None:
            raise ValueError(f"request {request.id!r} has not finished; add it when it has")
        self.num_new_tokens += len(request.output_ids)
        self.finished[request.finish_reason] = self.finished.get(request.finish_reason, 0) + 1

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {reason}" for reason, count in sorted(self.finished.items())) or "none"
        speed = self.num_new_tokens / self.seconds if self.seconds else 0.0
        guessed = f"{self.num_accepted} of {self.num_drafted} guesses accepted; " if self.num_drafted else ""
        return (
            f"{self.num_new_tokens} new tokens in {self.seconds:.2f} s ({speed:.0f} tokens/s), {self.num_steps} steps; "
            f"ended: {ends}; {self.prefill_tokens} tokens computed in prefill, {self.decode_tokens} in decode; "
            f"{guessed}{self.num_preemptions} preemptions; "
            f"at most {self.most_running} running on {self.most_blocks_held} blocks"
        )
