"""Course machinery. Below a Checkpoint's command, its page shows what the command prints.

Protects readers from an output that their own run would not give. To record again: python -m scripts.pages.checkpoints
"""

from scripts.pages.checkpoints import command_of, printed, recorded

import pytest

from lessons._course.catalog import read_lessons
from lessons._course.places import Places

LESSONS = [lesson for lesson in read_lessons(Places.find()) if lesson.smoke]
each_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.id)


@each_lesson
def test_the_command_of_the_page_is_the_recorded_one(lesson):
    found = recorded().get(lesson.id, {}).get("command")
    assert found == command_of(lesson.page.read_text(encoding="utf-8")), (
        f"record lesson {lesson.number} again: python -m scripts.pages.checkpoints {lesson.number}"
    )


@pytest.mark.nightly
@each_lesson
def test_the_command_prints_what_is_recorded(lesson):
    assert printed(recorded()[lesson.id]["command"]) == recorded()[lesson.id]["output"]
