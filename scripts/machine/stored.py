"""Course machinery. Reads reports from elsewhere, and decides which of them the course's page accepts."""

import json
from pathlib import Path

from scripts.machine.schema import Lesson, Report, from_json

from mini_engine.base.errors import UserError

LARGEST = 200_000  # bytes
MOST_STOPPED = 1  # lessons whose scripts may have ended with an error; the row counts the others


def read(path: Path) -> Report:
    """Return a report from a file.

    Raises:
        UserError: there is no such file, or it is not a report; the message names the first mistake.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise UserError(f"{path} has {path.stat().st_size} bytes; a report has at most {LARGEST}")
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or not a report
        raise UserError(f"{path} holds no report: {error or 'it is nested too deeply'}") from error


def has_stopped(lesson: Lesson) -> bool:
    """Return True if a lesson's script ended with an error before it compared a token."""
    return lesson.status == "failed" and not lesson.tokens


def why_not(report: Report) -> str:
    """Return why the course's page does not accept a report; "" if it does."""
    if report.quick:
        return "it was made with --quick"
    if not report.finished:
        return "it was stopped before its end"
    if report.machine.dirty or report.machine.commit == "unknown":
        return "it is of a tree with changes, or of no commit; run it on a clean checkout"
    if [lesson.number for lesson in report.lessons] != list(range(len(report.lessons))) or not report.lessons:
        return "it lacks lessons"
    for lesson in report.lessons:
        if has_stopped(lesson):
            continue
        if lesson.status != "ok" or not lesson.tokens or lesson.equal_tokens != lesson.tokens:
            return f"lesson {lesson.number} did not give all of Hugging Face's tokens"
    if len(stopped := [lesson.number for lesson in report.lessons if has_stopped(lesson)]) > MOST_STOPPED:
        return f"the scripts of the lessons {', '.join(map(str, stopped))} ended with an error"
    if failed := [one for one in report.kernels if one.status == "failed"]:
        return f"the kernel {failed[0].name} in {failed[0].dtype} failed"
    if not any(one.status == "ok" for one in report.kernels):
        return "no kernel was checked"
    return ""
