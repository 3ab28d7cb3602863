"""Course machinery. The outline of a state machine: requests of a model with a memory, before lesson 12's tiers."""

import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.worlds import FAMILIES


class TierMachine(RuleBasedStateMachine):
    """Requests begin, compute chunks and end before tiers; blocks are evicted; the process starts again.

    A subclass's `set_up` makes `manager`, `tiers` and `hold`, which returns what the memory has of a request. It also
    has `chunk_end(name, start, stop)`; `write(name, tokens, start, stop)`, what the model does; and `check(name)`, that
    a request reads its own tokens as far as they are computed.
    """

    def start_tiers(self, host, disk):
        self.folder = tempfile.TemporaryDirectory(prefix="kv-course-", ignore_cleanup_errors=True)
        self.host, self.directory = host, Path(self.folder.name) if disk else None
        self.count, self.alive = 0, {}
        self.set_up()

    @precondition(lambda self: len(self.alive) < 3)
    @rule(family=st.sampled_from(FAMILIES), length=st.integers(1, 60), most=st.integers(1, 60))
    def serve(self, family, length, most):
        tokens = family[:length]
        cost = self.manager.cost(tokens, length)
        if not cost.should_wait and cost.num_blocks <= self.manager.num_free_blocks:
            self.count += 1
            name = f"r{self.count}"
            found = self.begin(name, tokens)
            assert found < length and found == self.hold(name).num_computed
            self.compute(name, most)

    def begin(self, name, tokens):
        """Admit a request; return how many of its tokens were found."""
        found = self.manager.allocate(name, tokens)
        self.alive[name] = tokens
        self.check(name)
        return found

    def compute(self, name, most=1000):
        tokens = self.alive[name]
        stop = min(len(tokens), self.hold(name).num_computed + most)
        while (start := self.hold(name).num_computed) < stop:
            end = self.chunk_end(name, start, stop)
            if self.manager.missing_blocks(name, end) > self.manager.num_free_blocks:
                return self.end(name)
            self.manager.grow(name, end)
            self.write(name, tokens, start, end)
            self.manager.commit(name, tokens, end)
            self.tiers.flush()
        self.check(name)

    @precondition(lambda self: self.alive)
    @rule(number=st.integers(0, 9), most=st.integers(1, 60))
    def go_on(self, number, most):
        self.compute(sorted(self.alive)[number % len(self.alive)], most)

    @precondition(lambda self: self.alive)
    @rule(number=st.integers(0, 9))
    def finish(self, number):
        self.end(sorted(self.alive)[number % len(self.alive)])

    @rule()
    def restart(self):
        self.close()
        self.set_up()

    def end(self, name):
        tokens = self.alive.pop(name)
        self.manager.free(name, tokens[: self.hold(name).num_computed])
        self.tiers.flush()

    def close(self):
        for name in list(self.alive):
            self.end(name)
        assert self.manager.num_free_blocks == self.manager.num_usable_blocks, "blocks leaked"
        self.tiers.close()

    def teardown(self):
        if hasattr(self, "tiers"):
            self.close()
            self.folder.cleanup()
