"""Lesson 6. A burst is over when nobody has come for a moment, or after a while."""

from mini_engine.engine.burst import LONGEST, PAUSE, wait_for_burst


class Door:
    """A condition and its clock: jobs come after these seconds each, and none after the last."""

    def __init__(self, *pauses):
        self.pauses, self.time, self.jobs = list(pauses), 0.0, 0

    def wait_for(self, predicate, timeout):
        if not self.pauses or self.pauses[0] > timeout:
            self.time += timeout
            return predicate()
        self.time += self.pauses.pop(0)
        self.jobs += 1
        return predicate()


def jobs_of(*pauses):
    door = Door(*pauses)
    wait_for_burst(door, lambda: door.jobs, lambda: door.time)  # type: ignore[arg-type]
    return door.jobs


def test_all_that_come_in_quick_succession_are_waited_for():
    assert jobs_of(*[PAUSE / 2] * 5) == 5


def test_nobody_waits_longer_than_a_pause_for_what_does_not_come():
    assert jobs_of(2 * PAUSE) == 0


def test_a_burst_without_end_is_cut_off():
    assert jobs_of(*[PAUSE / 2] * 10_000) == round(LONGEST / (PAUSE / 2))
