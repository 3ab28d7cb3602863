"""Lesson 6. A burst ends when no job arrives within a pause, and after ten pauses at the latest."""

from mini_engine.engine.burst import MOST_PAUSES, PART_OF_A_STEP, PAUSE, wait_for_burst

SLOW = 1.0  # seconds a step


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


def door_after(*pauses, step_seconds=SLOW):
    door = Door(*pauses)
    wait_for_burst(door, lambda: door.jobs, step_seconds, lambda: door.time)  # type: ignore[arg-type]
    return door


def test_all_that_come_in_quick_succession_are_waited_for():
    assert door_after(*[PAUSE / 2] * 5).jobs == 5


def test_nobody_waits_longer_than_a_pause_for_what_does_not_come():
    door = door_after(2 * PAUSE)
    assert (door.jobs, door.time) == (0, PAUSE)


def test_a_burst_without_end_is_cut_off():
    assert door_after(*[PAUSE / 2] * 10_000).jobs == 2 * MOST_PAUSES


def test_an_engine_with_short_steps_waits_for_a_part_of_one():
    door = door_after(step_seconds=PAUSE)
    assert door.time == PART_OF_A_STEP * PAUSE
    assert door_after(step_seconds=0.0).time == 0, "of the first step nothing is known yet"
