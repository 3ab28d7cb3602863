"""Lesson 2. The smoke script refuses a pool that is too small in one line."""

from scripts import l2_smoke

from tests.support import checkpoint


def test_a_pool_that_is_too_small_exits_2_with_one_line(capsys):
    model = str(checkpoint("four, with biases"))
    assert l2_smoke.main(["--model", model, "--prompt-ids", "1,2,3", "--num-slots", "16"]) == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1, error  # in the learner's own words
