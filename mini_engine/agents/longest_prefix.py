"""Lesson 20. Admits waiting requests whose prefixes are cached first, before these are evicted; none waits forever.

First come, first served lets a cached prefix be evicted for the requests in front of it. Longest prefix first is
SGLang's schedule policy `lpm`. Alone it starves requests without a cached prefix, so waiting is counted in steps.
"""

from collections.abc import Callable
from weakref import WeakKeyDictionary

from mini_engine.base.errors import UserError
from mini_engine.engine.request import Request


class LongestPrefixFirst:
    """Sorts waiting requests by how many of their tokens are cached; `Scheduler` calls it before it admits some.

    Args:
        num_cached: returns how many leading tokens of a waiting request have KV.
        max_steps: a request that has waited for more steps goes before all others, in the order of arrival.
        most: how many of the first requests are sorted. Looking up thousands at each step would take longer than it.
    """

    def __init__(self, num_cached: Callable[[Request], int], max_steps: int = 64, most: int = 128) -> None:
        if max_steps < 0 or most < 0:
            raise UserError(f"max_steps is {max_steps} and most {most}; give 0 or more")
        self.num_cached, self.max_steps, self.most = num_cached, max_steps, most
        self.steps: WeakKeyDictionary[Request, int] = WeakKeyDictionary()

    def __call__(self, waiting: list[Request]) -> None:
        """Sort `waiting` in place, and count one more step for each of these requests.

        The `most` that arrived first are sorted by `rank`; the others follow by arrival, and are not looked up.
        """
        for request in waiting:
            self.steps[request] = self.steps.get(request, 0) + 1
        waiting.sort(key=lambda request: request.arrival)
        waiting[: self.most] = sorted(waiting[: self.most], key=self.rank)

    def rank(self, request: Request) -> tuple[int, ...]:
        """Return a sort key, smallest first; `steps` has how long the request has waited.

        Requests that have waited for more than `max_steps` steps go first, by arrival. The others follow by how many of
        their tokens are cached, the most first; among equals, by arrival.
        """
        if self.steps[request] > self.max_steps:
            return (0, request.arrival)
        return (1, -self.num_cached(request), request.arrival)
