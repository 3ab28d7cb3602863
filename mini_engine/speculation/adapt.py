"""Lesson 14. Decides how many tokens to guess: as many as were recently accepted; none while rows are not free."""

from dataclasses import dataclass, field

MAX_PAUSE = 16  # steps


@dataclass
class Adaptive:
    """The number of guesses for one request, `k`, after what became of the earlier ones.

    All accepted: k doubles. Otherwise it is halved, or one more than were accepted if that is more. If there was room
    for fewer than k guesses, the rule is the same: k itself is doubled or halved, not the number that was guessed. From
    the second miss in a row on there is a pause of 1, 3, 7, … steps, MAX_PAUSE at most: text that repeats nothing soon
    costs next to nothing.

    max_drafts: the most. k: the next number. num_misses: consecutive steps with guesses, none of which came true.
    pause: steps to let pass before the next guess.
    """

    max_drafts: int
    k: int = field(init=False)
    num_misses: int = field(init=False, default=0)
    pause: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.k = max(1, self.max_drafts // 2)

    def next(self) -> int:
        """Return how many tokens to guess in this step; 0 during a pause, which this shortens by one step."""
        if self.pause:
            self.pause -= 1
            return 0
        return self.k

    def record(self, drafted: int, accepted: int) -> None:
        """Take note that `accepted` of `drafted` guesses came true. Without a guess there is nothing to learn."""
        if not drafted:
            return
        wanted = 2 * self.k if accepted == drafted else max(accepted + 1, self.k // 2)
        self.k = min(self.max_drafts, wanted)
        self.num_misses = 0 if accepted else self.num_misses + 1
        if self.num_misses > 1:
            self.pause = min(2 ** (self.num_misses - 1) - 1, MAX_PAUSE)


def share_of_rows(max_rows: int, num_decoding: int) -> int:
    """Return how many guesses each of `num_decoding` requests may have in a step of at most `max_rows` rows.

    A request's own token takes one row; the rest is shared evenly, rounded down, so from more than half of `max_rows`
    requests on nothing is left: the step is limited by arithmetic then, and a row for a guess takes as long as a row
    for a token that is needed. 0 if no request decodes.
    """
    return max(0, max_rows // num_decoding - 1) if num_decoding else 0
