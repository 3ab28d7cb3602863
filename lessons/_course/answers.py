"""Course machinery. Known right and wrong answers to each task, from a lesson's `answers.toml`.

The proofs write them into a student's file: a right answer must pass, a wrong one must fail at its own task.
"""

import ast
import textwrap
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from lessons._course.catalog import Lesson
from lessons._course.places import CourseError
from lessons._course.starter import definitions


@dataclass(frozen=True)
class Answer:
    """One answer to one task.

    name: what is different about it, in a few words.
    code: functions that replace the task's targets of the same names; imports and helpers go above them.
    find, replace: instead of `code`, a change of the reference.
    says: a pattern that the check's output for this answer matches; empty for a right answer.
    """

    task: int
    name: str
    code: str = ""
    find: str = ""
    replace: str = ""
    says: str = ""

    def into(self, sources: dict[str, str], targets: dict[str, list[str]]) -> dict[str, str]:
        """Return `sources` (by module) with this answer written into them. targets: the task's symbols by module."""
        changed = {module: self._write(sources[module], symbols) for module, symbols in targets.items()}
        if all(sources[module] == text for module, text in changed.items()):
            raise CourseError(f"answer {self.name!r} of task {self.task} changes nothing")
        return sources | changed

    def _write(self, source: str, symbols: list[str]) -> str:
        if self.code:
            return with_functions(source, self.code, symbols)
        if source.count(self.find) > 1:
            raise CourseError(
                f"{self.find!r} occurs {source.count(self.find)} times; answer {self.name!r} is ambiguous"
            )
        return source.replace(self.find, self.replace)


@dataclass(frozen=True)
class Answers:
    """A lesson's answers: right ones that differ from the reference, and wrong ones beyond the page's pitfalls."""

    right: tuple[Answer, ...]
    wrong: tuple[Answer, ...]

    def rounds(self) -> list[list[Answer]]:
        """Return the right answers in rounds: the first of each task, the second of each task, and so on."""
        by_task: dict[int, list[Answer]] = {}
        for answer in self.right:
            by_task.setdefault(answer.task, []).append(answer)
        longest = max(map(len, by_task.values()), default=0)
        return [[some[i] for some in by_task.values() if i < len(some)] for i in range(longest)]


def read_answers(lesson: Lesson) -> Answers:
    """Read the lesson's answers.toml; a lesson without one has no answers.

    Raises:
        CourseError: it is not valid TOML, or an answer lacks a key or belongs to no task.
    """
    path = lesson.folder / "answers.toml"
    if not path.exists():
        return Answers((), ())
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        answers = Answers(_answers(raw, "right"), _answers(raw, "wrong"))
        for answer in (*answers.right, *answers.wrong):
            lesson.task(answer.task)
            if bool(answer.code) == bool(answer.find):
                raise CourseError(f"answer {answer.name!r} needs either code, or find and replace")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CourseError(f"{path}: {error}") from None
    return answers


def _answers(raw: dict, kind: str) -> tuple[Answer, ...]:
    """Return the answers in the tables `[tasks.N.kind]`: `name = code`, or `name = {…}` with other fields."""
    return tuple(
        Answer(int(number), name, **({"code": entry} if isinstance(entry, str) else entry))
        for number, task in raw["tasks"].items()
        for name, entry in task[kind].items()
    )


def apply(lesson: Lesson, answers: Sequence[Answer], sources: dict[str, str]) -> dict[str, str]:
    """Return the sources, by module, with these answers written into them."""

    def write(so_far: dict[str, str], answer: Answer) -> dict[str, str]:
        targets: dict[str, list[str]] = {}
        for target in lesson.task(answer.task).targets:
            targets.setdefault(target.file, []).append(target.symbol)
        return answer.into(so_far, targets)

    return reduce(write, answers, sources)


def with_functions(source: str, code: str, symbols: Sequence[str]) -> str:
    """Return `source` with the functions in `symbols` replaced by those of the same name in `code`.

    Everything else in `code`, imports and helpers, is inserted above the first definition.
    """
    new, tree = ast.parse(textwrap.dedent(code).strip()), ast.parse(source)
    wanted = {symbol.rpartition(".")[2]: symbol for symbol in symbols}
    mine = {node.name: node for node in new.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    spans = {name: node for name, node in definitions(tree) if name in symbols}
    written = textwrap.dedent(code).strip().splitlines()
    lines = source.splitlines()
    for name, symbol in sorted(wanted.items(), key=lambda pair: spans[pair[1]].lineno, reverse=True):
        if name not in mine:
            continue
        body = "\n".join(written[mine[name].lineno - 1 : mine[name].end_lineno])
        node = spans[symbol]
        lines[node.lineno - 1 : node.end_lineno] = textwrap.indent(body, " " * node.col_offset).splitlines()
    helpers = [node for node in new.body if getattr(node, "name", None) not in wanted]
    above = [line for node in helpers for line in [*written[first_line(node) - 1 : node.end_lineno], ""]]
    top = next(first_line(node) for name, node in definitions(tree)) - 1
    return "\n".join([*lines[:top], *above, *lines[top:]]) + "\n"


def first_line(node: ast.stmt) -> int:
    """Return the line where a statement begins, its decorators included."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])
