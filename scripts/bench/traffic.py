"""Course machinery. Lesson 12's requests: a generator whose statistics are those of a recorded trace of chats.

A request is a list of block ids. Equal ids mean the same tokens up to and including that block, as in the traces of
Mooncake (Qin et al., FAST'25): one JSON object a line, `hash_ids` with an id for each block of 512 tokens.
"""

import random
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import log

Requests = list[list[int]]


@dataclass(frozen=True)
class Chats:
    """Statistics of Mooncake's conversation trace, in blocks and in requests.

    num_requests: as many as in the trace. continues: the probability that another turn follows a request.
    opening, turn: median and spread (of the logarithm) of the blocks in a first prompt, and of those that a turn adds.
    gap: median and spread of the number of requests between two turns.
    """

    num_requests: int = 12_031
    continues: float = 0.38
    opening: tuple[float, float] = (11.0, 1.18)
    turn: tuple[float, float] = (2.0, 1.56)
    gap: tuple[float, float] = (423.0, 1.07)

    def generate(self, seed: int = 0) -> Requests:
        """Return requests in the order of their arrival. All begin with one block, the system prompt."""
        chance, ids, requests = random.Random(seed), count(1), []
        coming: list[tuple[int, int, list[int]]] = []  # the time of a chat's next turn, and its blocks so far

        def blocks(median: float, spread: float) -> int:
            return max(1, round(chance.lognormvariate(log(median), spread)))

        while len(requests) < self.num_requests:
            history, size = [0], self.opening
            if coming and coming[0][0] <= len(requests):
                history, size = heappop(coming)[2], self.turn
            request = history + [next(ids) for _ in range(blocks(*size))]
            requests.append(request)
            if chance.random() < self.continues:
                again = len(requests) + blocks(*self.gap)
                heappush(coming, (again, next(ids), request[:-1]))  # the last block is only partly filled
        return requests
