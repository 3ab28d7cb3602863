"""Lesson 5. The limits of a step, checked once."""

from dataclasses import dataclass
from operator import attrgetter

from mini_engine.base.errors import UserError
from mini_engine.base.values import check_choice, check_switch, checked_real, checked_whole

POLICIES = {"fcfs": attrgetter("arrival"), "priority": attrgetter("priority", "arrival")}
LEAST = dict.fromkeys(("max_num_seqs", "max_num_batched_tokens", "chunked_prefill_size"), 1)


@dataclass(frozen=True)
class SchedulerConfig:
    """The limits of a step.

    max_num_seqs: requests that may hold blocks at the same time.
    max_num_batched_tokens: tokens computed in one step; at least max_num_seqs, so that every request can decode.
    chunked_prefill_size: tokens of one prompt computed in one step.
    watermark: blocks per running request that an admission leaves free, because running requests will soon need more.
    reserve_answers: promise room for the whole answer. No request is preempted then, but fewer run at once.
    overtaking: how much longer a prompt may take because shorter ones overtake it: 0.1 is a tenth; 0: none overtakes.
    policy: "fcfs", first come first served, or "priority", smaller numbers first.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    chunked_prefill_size: int = 512
    watermark: float = 0.5
    reserve_answers: bool = False
    overtaking: float = 0.1
    policy: str = "fcfs"

    def __post_init__(self) -> None:
        for name, least in LEAST.items():  # the only way to set a frozen field:
            object.__setattr__(self, name, checked_whole(name, getattr(self, name), least))
        checked_real("watermark", self.watermark, 0)
        checked_real("overtaking", self.overtaking, 0, 1)
        check_switch("reserve_answers", self.reserve_answers)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise UserError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, but max_num_seqs is {self.max_num_seqs}; "
                "every running request needs one token per step, so raise the first or lower the second",
                param="max_num_batched_tokens",
            )
        check_choice("policy", self.policy, POLICIES)
