"""Course machinery. Writes points down: as Markdown for a job's summary, and as the JSON that grading systems read.

Gradescope: docs/specs.md in gradescope/autograder_samples, as of commit 00f6aa0, and its later form with a status for
each test. Classroom 50: schemas/result-v1.schema.json in foundation50/classroom50, at commit 6e593c7.
"""

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from scripts.grading.points import Graded

CLASSROOM50 = "classroom50/result/v1"
MARKS = {"done": "✓", "equal": "✓"}


def totals(found: Sequence[Graded]) -> tuple[int, int]:
    """Return the points and the most possible."""
    return sum(one.points for one in found), sum(one.most for one in found)


def markdown(found: Sequence[Graded], student: str = "") -> str:
    """Return a heading, a table with a row for each item, and the checks' first findings, folded."""
    points, most = totals(found)
    name = f"{cell(student)}: " if student else ""
    lines = [f"## {name}{points} of {most} points", "", "| lesson | | state | points |", "| --- | --- | --- | ---: |"]
    for one in found:
        for item in one.items:
            state = f"{MARKS.get(item.state, '✗')} {item.state}"
            lines.append(f"| {one.lesson} | {cell(item.name)} | {cell(state)} | {item.points} of {item.most} |")
        lines.append(f"| {one.lesson} | **{cell(one.title)}** | | **{one.points} of {one.most}** |")
    for one in found:
        if one.finding:
            lines += ["", f"Lesson {one.lesson}:", "", *("    " + line for line in one.finding.splitlines())]
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    """Return text for a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def as_json(found: Sequence[Graded]) -> dict[str, Any]:
    """Return the course's own form."""
    points, most = totals(found)
    return {"points": points, "most": most, "lessons": [one.as_dict() for one in found]}


def gradescope(found: Sequence[Graded]) -> dict[str, Any]:
    """Return Gradescope's results.json. Its score is the sum of the tests'."""
    tests = []
    for one in found:
        for place, item in enumerate(one.items, 1):
            shown = {"name": f"Lesson {one.lesson}, {item.name}", "number": f"{one.lesson}.{item.number or place}"}
            scored = {"score": item.points, "max_score": item.most}
            passed = "passed" if item.points == item.most else "failed"
            tests.append(shown | scored | {"status": passed, "output": item.state, "visibility": "visible"})
    output = "\n\n".join(f"Lesson {one.lesson}. {one.finding or 'It passes.'}" for one in found)
    seconds = round(sum(one.seconds for one in found))
    return {"tests": tests, "output": output, "execution_time": seconds, "stdout_visibility": "hidden"}


def classroom50(found: Sequence[Graded], told: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return Classroom 50's result.json; `told` are the variables that its runner sets."""
    points, most = totals(found)
    commit = told.get("COMMIT_URL", "")
    names = {
        "classroom": "CLASSROOM",
        "assignment": "ASSIGNMENT",
        "submission": "SUBMISSION_TAG",
        "release": "RELEASE_URL",
    }
    tests = [
        {
            "test-name": f"lesson {one.lesson}, {item.name}",
            "passed": item.points == item.most,
            "score": item.points,
            "max-score": item.most,
            "output": item.state,
        }
        for one in found
        for item in one.items
    ]
    return (
        {"schema": CLASSROOM50}
        | {key: told.get(variable, "") for key, variable in names.items()}
        | {
            "assignment_type": told.get("ASSIGNMENT_TYPE") or "individual",
            "owner": told.get("OWNER") or told.get("USERNAME", ""),
            "commit": commit,
            "review": told.get("REVIEW_URL") or commit,
            "datetime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "score": points,
            "max-score": most,
            "tests": tests,
        }
    )
