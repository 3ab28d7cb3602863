"""Lesson 19. The page's command that ends a worker while an answer streams."""

import re

from scripts import lost_worker

import pytest


@pytest.mark.nightly
def test_a_worker_that_ends_costs_no_answer_and_no_buffer(capsys):
    assert lost_worker.main(["--tokens", "60"]) == 0, "an answer differs from one process's"
    said = capsys.readouterr().out
    rows = [[int(count) for count in re.findall(r"\d+", line)[:4]] for line in said.splitlines() if " '" in line]
    begun, *_, ended = [row for row in rows if len(row) == 4]
    assert begun[1] + begun[2] > 0, "B's prompt had no buffer while A's answer streamed"
    assert ended[1:] == [0, 0, 0], "lent, filled and owed: in the end all buffers are free"
