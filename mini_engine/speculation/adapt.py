"""Lesson 14. Decides how many tokens to guess: as many as were recently accepted; none while rows are not free."""

from dataclasses import dataclass, field

MAX_PAUSE = 16  # steps


@dataclass
class Adaptive:
    """The number of guesses for one request, `k`, adapted to the fate of earlier ones.

    All accepted: k doubles. Otherwise k is halved, or becomes the number accepted plus one if that is more. With room
    for fewer than k guesses the rule is the same: k itself is doubled or halved, not the number guessed. From the
    second miss in a row on, there is a pause of 1, 3, 7, … steps, at most MAX_PAUSE, so text that repeats nothing soon
    costs next to nothing.

    max_drafts: the largest k. k: the next number. num_misses: steps in a row whose guesses were all wrong.
    pause: steps to skip before the next guess.
    """

    max_drafts: int
    k: int = field(init=False)
    num_misses: int = field(init=False, default=0)
    pause: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.k = max(1, self.max_drafts // 2)

    def next(self) -> int:
        """Return the number of tokens to guess in this step; 0 during a pause, which each call shortens by one step."""
        if self.pause:
            self.pause -= 1
            return 0
        return self.k

    def record(self, drafted: int, accepted: int) -> None:
        """Record that `accepted` of `drafted` guesses were right. Without a guess, a no-op."""
        if not drafted:
            return
        wanted = 2 * self.k if accepted == drafted else max(accepted + 1, self.k // 2)
        self.k = min(self.max_drafts, wanted)
        self.num_misses = 0 if accepted else self.num_misses + 1
        if self.num_misses > 1:
            self.pause = min(2 ** (self.num_misses - 1) - 1, MAX_PAUSE)


def share_of_rows(max_rows: int, num_decoding: int) -> int:
    """Return the number of guesses for each of `num_decoding` requests in a step of at most `max_rows` rows.

    A request's own token takes one row; the rest is shared evenly, rounded down. With more than max_rows / 2 requests
    nothing is left: the step is then compute-bound, and a row for a guess costs as much as a row for a token that is
    needed. 0 if no request decodes.
    """
    return max(0, max_rows // num_decoding - 1) if num_decoding else 0
